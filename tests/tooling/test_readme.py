"""The README's examples run, and its links lead somewhere."""

import pathlib
import re
import tomllib

import jax
import numpy as np
import pytest

import glax

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.fast
def test_quick_start_runs_and_is_right():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    whole = glax.recurrent_gla(*(names[name] for name in ("q", "k", "v", "gk")))
    np.testing.assert_allclose(names["rest"].final_state, whole.final_state, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(names["rest"].output, whole.output[:, 300:], rtol=1e-4, atol=1e-4)
    assert names["packed"].final_state.shape == (3, 4, 64, 64)
    assert names["d_gk"].shape == names["gk"].shape
    assert jax.numpy.isfinite(names["token"]).all()


@pytest.mark.fast
def test_every_public_name_is_named_and_documented():
    pages = README + "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for name in set(glax.__all__) - {"__version__"}:
        assert re.search(rf"\b{name}\b", pages), name
        # An instance's text would be its class's, and a dataclass without one is given its signature.
        text = getattr(glax, name).__doc__
        assert text and not text.startswith(f"{name}("), name


@pytest.mark.fast
def test_the_readme_is_short():
    assert len(README.splitlines()) < 120


@pytest.mark.fast
def test_every_variant_names_its_paper():
    for name in ("recurrent", "recurrent_gla", "simple_gla", "retention", "lightning_attention"):
        assert f"`{name}`" in README, name
        assert "https://arxiv.org/" in getattr(glax, name).__doc__, name


@pytest.mark.fast
def test_what_the_package_needs_is_what_the_readme_says():
    needs = re.search(r"`pip install \.` \(needs ([^)]*)\)", README)[1]
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(re.split(r", | and ", needs)) == sorted(re.match(r"\w+", name)[0] for name in declared)


@pytest.mark.fast
def test_the_source_distribution_holds_all_that_tests_read():
    listed = pytest.importorskip(
        "setuptools._distutils.filelist"
    ).FileList()  # which builds it; new Pythons come without
    listed.findall(str(ROOT))
    listed.allfiles = [str(pathlib.Path(name).relative_to(ROOT)) for name in listed.allfiles]
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            listed.process_template_line(line)
    for folder in ("tests", "docs", "examples", "benchmarks", "constraints"):
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT)
            if path.is_file() and path.suffix != ".pyc" and name.parts[:2] != ("benchmarks", "out"):
                assert str(name) in listed.files, name


@pytest.mark.fast
def test_links_and_commands_exist():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^    make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE), command
