"""The README's examples run, and its links lead somewhere."""

import pathlib
import re
import tomllib

import jax
import pytest

import glax

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.fast
def test_the_train_step_learns():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = dict(qkv=(32, 96), beta=(32, 4), gate=(32, 4))
    p = {name: 0.2 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    x, y = (jax.random.normal(key, (2, 40, 32)) for key in keys[3:])
    losses = []
    for _ in range(3):
        p, loss = names["train_step"](p, x, y)
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.core
def test_every_public_name_is_named_and_documented():
    pages = README + "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for name in set(glax.__all__) - {"__version__"}:
        assert re.search(rf"\b{name}\b", pages), name
        # An instance's text would be its class's, and a dataclass without one is given its signature.
        text = getattr(glax, name).__doc__
        assert text and not text.startswith(f"{name}("), name


@pytest.mark.core
def test_the_readme_is_short():
    assert len(README.splitlines()) < 120


@pytest.mark.core
def test_every_variant_names_its_paper():
    for name in ("recurrent", "recurrent_gla", "simple_gla", "retention", "lightning_attention"):
        assert f"`{name}`" in README, name
        assert "https://arxiv.org/" in getattr(glax, name).__doc__, name


@pytest.mark.core
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
