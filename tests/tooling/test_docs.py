"""The pages of docs/ run, say what is so, and link to what exists."""

import doctest
import importlib
import importlib.util
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax
import glax.models
from glax import nn
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from tests.close import assert_close

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
KERNEL_PAGE = "adding_a_kernel.md"


def code_of(page: str) -> str:
    return "\n".join(PYTHON.findall((DOCS / page).read_text()))


def run(page: str) -> dict:
    names: dict = {}
    exec(compile(code_of(page), page, "exec"), names)
    return names


@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page) and page != KERNEL_PAGE])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    run(page)


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_a_file(page):
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)", text):
        assert ((DOCS / page).parent / target).exists(), target


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PUBLIC = (
    "glax",
    "configs",
    "serving",
    "server",
    "parallel",
    "nn",
    "models",
    "testing",
    "compat.easydel",
    "compat.ejkernel",
)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_stands_on_the_page_of_its_module(module):
    public = importlib.import_module("glax" if module == "glax" else f"glax.{module}")
    page = (DOCS / "api" / f"{module.split('.')[0]}.md").read_text()
    missing = [name for name in public.__all__ if not re.search(rf"(:: |[.`]){name}\b", page)]
    assert missing == ["__version__"] * (module == "glax") + ["configs"] * (module == "glax")


# Instances, what other modules define, and errors that nobody raises by hand.
WITHOUT_EXAMPLE = {
    "__version__",
    "configs",
    "kernel_registry",
    "CASES",
    "MODEL_TYPES",
    "UnsupportedOption",
    "QueueFull",
    "Stopped",
}


def test_every_public_docstring_has_an_example_that_runs(tmp_path, monkeypatch):
    """In one process: the examples share shapes, and so what is compiled. They have a `model`, and a `folder` that holds it."""
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16)
    model, folder = glax.models.from_config(dict(model_type="gla", **sizes), rngs=nnx.Rngs(0)), tmp_path / "model"
    glax.models.save_pretrained(model, folder)
    for module in ("glax", *(f"glax.{name}" for name in PUBLIC if name not in ("glax", "configs"))):
        public = importlib.import_module(module)
        for name in sorted(set(public.__all__) - WITHOUT_EXAMPLE):
            names = dict(glax=glax, jax=jax, jnp=jnp, nn=nn, nnx=nnx, model=model, folder=folder)
            (example,) = doctest.DocTestFinder(recurse=False).find(
                getattr(public, name), f"{module}.{name}", globs=names
            )
            assert example.examples, f"{module}.{name} has no example"
            assert doctest.DocTestRunner().run(example).failed == 0, f"{module}.{name}"
    pages = "".join((DOCS / page).read_text() for page in PAGES if page.startswith("api/"))
    for whole in sorted(set(re.findall(r":: (glax\.\S+\.\S+)$", pages, flags=re.MULTILINE))):
        module, _, name = whole.rpartition(".")
        names = dict(glax=glax, jax=jax, jnp=jnp, nn=nn, nnx=nnx, model=model, folder=folder)
        public = getattr(importlib.import_module(module), name, None)  # None for a module
        for example in doctest.DocTestFinder(recurse=False, exclude_empty=True).find(public, whole, globs=names):
            assert doctest.DocTestRunner().run(example).failed == 0, whole


def test_the_support_matrix_is_the_registrys():
    made = script("support_matrix")
    assert made.between(made.matrix()) in made.PAGE.read_text(), "python docs/support_matrix.py --write"


def test_the_reference_of_the_command_line_is_the_parsers():
    made = script("command_line")
    assert made.page() == made.PAGE.read_text(), "python docs/command_line.py --write"


def test_the_verdict_on_the_page_is_of_as_many_kernels_as_there_are():
    load_kernels()
    assert f" of {len(kernel_registry.kernels)} run here" in (DOCS / "command_line.md").read_text()


def test_the_table_of_parameters_is_that_of_the_models():
    made = script("parameter_names")
    assert made.between(made.table()) in made.PAGE.read_text(), "python docs/parameter_names.py --write"
    assert set(made.MODELS) == set(glax.models.MODEL_TYPES)
    for kind in made.MODELS:
        assert f"| {kind} | `embedding.embedding` |" in made.table([kind])


def test_the_table_of_model_types_is_what_their_functions_do():
    made = script("model_types")
    assert made.between(made.table()) in made.PAGE.read_text(), "python docs/model_types.py --write"
    assert {code.kind for code in made.codes()} == set(glax.models.MODEL_TYPES)


def test_figures_are_those_of_the_files_of_results():
    made = script("performance_page")
    assert made.page() == made.PAGE.read_text(), "python docs/performance_page.py --write"


def test_the_readmes_table_and_picture_have_the_files_of_results():
    made = script("pictures")
    assert made.with_table(made.README.read_text()) == made.README.read_text(), "python docs/pictures.py speed"
    calls = [made.name_of(call) for call in made.beside_peers(list(made.lines("nvidia_h100")))]
    picture = (made.FOLDER / "speed.svg").read_text()
    assert [name for name in calls if f">{name}<" not in picture] == [], "python docs/pictures.py speed"


def test_the_check_of_a_site_finds_what_is_dead_or_remote(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">b</a><a id="here" href="#here">a</a><img src="x.png">')
    (tmp_path / "b.html").write_text(
        '<p id="there"><a href="c.html"></a><script src="https://example.org/x.js"></script>'
    )
    found = script("check_site").problems(tmp_path.resolve())
    assert found == [
        "a.html links to x.png, which does not exist",
        "b.html links to c.html, which does not exist",
        "b.html loads https://example.org/x.js",
    ]


def test_a_third_party_kernel_is_chosen_differentiated_tuned_and_cached(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    load_kernels()
    before = dict(kernel_registry.kernels)
    q = jax.random.normal(jax.random.key(0), (1, 100, 2, 16))
    plain = glax.recurrent(q, q, q)
    slope = jax.grad(lambda q: glax.recurrent(q, q, q).output.sum())(q)
    try:
        jax.clear_caches()
        names = run(KERNEL_PAGE)
        assert "quadratic/xla/any: QuadraticConfig(block=64), by heuristic" in capsys.readouterr().out
        assert_close("output", names["output"], plain.output, 1e-5)
        assert_close("final_state", names["state"], plain.final_state, 1e-5)
        assert_close("gradient", names["gradient"], slope, 5e-5)
        (measurement,) = names["measured"].values()
        assert set(measurement.candidates) == {"QuadraticConfig(block=32)", "QuadraticConfig(block=64)"}
        assert [path.name.split("@")[0] for path in tmp_path.rglob("*.json")] == ["quadratic.xla.any"]
        (decision,) = glax.explain(glax.recurrent, q, q, q)
        assert (decision.config, decision.selector) == (measurement.config, "memory")
        refused = glax.explain(lambda q: glax.recurrent(q, q, q, g=jnp.zeros(q.shape[:3])), q)[0].refused
        assert (
            refused["quadratic/xla/any"]
            == "takes decays of the form none; got head (given by g): leave out platform and cfg"
        )
    finally:
        kernel_registry.kernels.clear()
        kernel_registry.kernels.update(before)
        jax.clear_caches()
    np.testing.assert_array_equal(glax.recurrent(q, q, q).output, plain.output)


def test_the_calls_of_other_packages_have_the_values_of_their_references():
    """docs/peer_values.py says where these come from."""
    held = json.loads((DOCS / "peer_values.json").read_text())
    a = {name: jnp.array(x) for name, x in held["inputs"].items()}
    page = run("coming_from.md")
    q, k, v, rest = a["q"], a["k"], a["v"], dict(initial_state=a["start"])
    asked = rest | dict(output_final_state=True)
    found = dict(
        chunk_gla=page["chunk_gla"](q, k, v, a["gk"], **asked),
        chunk_simple_gla=page["chunk_simple_gla"](q, k, v, a["g"], **asked),
        chunk_gated_delta_rule=page["chunk_gated_delta_rule"](q, k, v, a["g"], a["beta"], **asked),
        chunk_kda=page["chunk_kda"](q, k, v, a["gk"], a["beta"], **asked),
        jax_chunk_gated_delta_rule=page["jax_chunk_gated_delta_rule"](
            q, k, v, a["g"], a["beta"], use_qk_norm_in_gdn=True, **rest
        ),
        mamba_chunk_scan_combined=[
            page["mamba_chunk_scan_combined"](
                a["x"], a["dt"], a["A"], a["Bs"], a["Cs"], 4, a["D"], a["z"], a["dt_bias"], dt_softplus=True
            )
        ],
    )
    assert set(found) == set(held["values"])
    for name, wanted in held["values"].items():
        for got, want in zip(found[name], wanted, strict=True):
            np.testing.assert_allclose(got, np.array(want), rtol=2e-5, atol=2e-5, err_msg=name)
