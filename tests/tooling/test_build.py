"""What building the package says and writes where libraries of C++ cannot be built, and where they must not be."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NATIVE = ROOT / "glax" / "_src" / "kernels" / "cpu" / "native"
FAILURE = "glax/_src/kernels/cpu/build_failure.txt"


@pytest.fixture
def sources(tmp_path) -> pathlib.Path:
    """Return a copy of what the package is built from."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "build_failure.txt")
    shutil.copytree(ROOT / "glax", tmp_path / "glax", ignore=ignored)
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
    assert "glax._src.kernels.cpu._native was not built: " in done.stderr
    assert "the wheel has no native kernels, so it is for any platform" in done.stderr
    (wheel,) = (sources / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        assert FAILURE in names and "glax/__init__.py" in names
        assert not [name for name in names if name.endswith((".so", ".pyd"))]
        (about,) = [name for name in names if name.endswith("/WHEEL")]
        assert "Root-Is-Purelib: true" in content.read(about).decode()


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
