"""What building the package says and writes where libraries of C++ cannot be built, and where they must not be."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

from glax._src.kernels.cpu.library import load_library as load_cpu_library
from glax._src.kernels.cuda.library import load_library as load_cuda_library

ROOT = pathlib.Path(__file__).parents[2]
NATIVE = ROOT / "glax" / "_src" / "kernels" / "cpu" / "native"
FAILURE = "glax/_src/kernels/cpu/build_failure.txt"


@pytest.fixture
def sources(tmp_path) -> pathlib.Path:
    """Return a copy of what the package is built from."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "build_failure.txt")
    for package in ("glax", "glax_cli"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    return tmp_path


def run(folder: pathlib.Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *command],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_a_wheel_without_libraries_is_for_any_platform_and_says_so(sources):
    done = run(sources, "bdist_wheel", CC="false", CXX="false")
    assert done.returncode == 0, done.stderr
    assert "glax._src.kernels.cpu._native was not built: false returned non-zero exit status 1" in done.stderr
    assert "the wheel has no native kernels, so it is for any platform" in done.stderr
    (wheel,) = (sources / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        assert FAILURE in names and "glax/__init__.py" in names
        assert not [name for name in names if name.endswith((".so", ".pyd"))]
        (about,) = [name for name in names if name.endswith("/WHEEL")]
        assert "Root-Is-Purelib: true" in content.read(about).decode()


COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo "a library" > "$2"
"""


def test_one_wheel_serves_every_python_of_a_platform(sources):
    """Built by a compiler that writes a word. An older library in the source's folder is replaced, not written into."""
    compiler = sources / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    old = sources / "glax" / "_src" / "kernels" / "cpu" / "_native.so"
    old.write_text("old")
    linked = sources / "loaded"
    linked.hardlink_to(old)
    done = run(sources, "build_ext", "--inplace", "bdist_wheel", CC=str(compiler), CXX=str(compiler))
    assert done.returncode == 0 and "not built" not in done.stderr, done.stderr
    assert old.read_text() == "a library\n" and linked.read_text() == "old"
    (wheel,) = (sources / "dist").glob("*.whl")
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        libraries = {name for name in names if name.endswith(".so")}
        assert libraries == {"glax/_src/kernels/cpu/_native.so", "glax/_src/kernels/cuda/_launch.so"}
        assert "glax_cli/parser.py" in names
        (about,) = [name for name in names if name.endswith("/WHEEL")]
        assert "Root-Is-Purelib: false" in content.read(about).decode()


def test_the_metadata_names_the_same_pythons_everywhere():
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    first, behind = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", document["project"]["requires-python"]).groups())
    named = [x.removeprefix("Programming Language :: Python :: 3.") for x in document["project"]["classifiers"]]
    assert [x for x in named if x.isdecimal()] == [str(minor) for minor in range(first, behind)]
    assert document["tool"]["cibuildwheel"]["build"] == [f"cp3{minor}-*" for minor in range(first, behind)]


@pytest.mark.parametrize("library", [load_cpu_library, load_cuda_library])
def test_the_libraries_hold_no_symbols_of_python(library):
    """So that one file serves all of them."""
    loaded = library()
    if isinstance(loaded, str):
        pytest.skip(loaded)
    content = pathlib.Path(loaded._name).read_bytes()
    assert not [word for word in (b"Py_", b"PyObject", b"libpython") if word in content]


@pytest.mark.parametrize("variable", ["CFLAGS", "CXXFLAGS", "LDFLAGS", "CC"])
def test_inexact_arithmetic_is_refused(sources, variable):
    """Under -ffast-math results were off by 4 to 20%, and denormal numbers were 0 in the whole process."""
    given = dict(
        CFLAGS="-O2 -ffast-math", CXXFLAGS="-Ofast", LDFLAGS="-ffast-math", CC="gcc -funsafe-math-optimizations"
    )
    done = run(sources, "build_ext", "--inplace", **{variable: given[variable]})
    assert done.returncode == 0, done.stderr
    assert not list(sources.glob("glax/_src/kernels/*/*.so"))
    flag = given[variable].split()[-1]
    assert (sources / FAILURE).read_text().startswith(f"{flag} gives other numbers: leave it out of CFLAGS")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("flag", ["-ffast-math", "-ffinite-math-only"])
def test_the_sources_refuse_inexact_arithmetic(flag):
    """Whoever compiles them without setup.py."""
    command = ["g++", "-std=c++17", "-fsyntax-only", flag, str(NATIVE / "baseline.cc")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "compile without -ffast-math" in done.stderr
