"""The words that docs/glossary.md retires do not come back."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
GLOSSARY = "docs/glossary.md"
SEARCHED = (
    "docs", "benchmarks", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md",
    "glax", "glax_cli", "examples", "tests/*.py",
)  # fmt: skip
# The glossary lists the words, this file checks for two of them, and old experiments may quote them.
EXEMPT = (GLOSSARY, "tests/tooling/test_words.py", "docs/internals/experiments/")
TEXTS = ".md", ".py", ".txt", ".json", ".toml"


def retired() -> list[str]:
    section = (ROOT / GLOSSARY).read_text().split("## Retired words")[1]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", section, flags=re.MULTILINE)
    return [word for row in rows if row != "retired" for word in row.split(", ")]


def searched() -> list[pathlib.Path]:
    found = subprocess.run(["git", "ls-files", *SEARCHED], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("the files of the project are those that git lists")
    return [ROOT / name for name in found.stdout.splitlines() if name.endswith(TEXTS) and not name.startswith(EXEMPT)]


def test_retired_words_do_not_come_back():
    words = retired()
    assert "walk" in words and "is not written" in words
    pattern = re.compile(rf"(?<!\.)\b({'|'.join(map(re.escape, words))})\b", flags=re.IGNORECASE)
    for path in searched():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not (found := pattern.search(line)), (
                f"{path.relative_to(ROOT)}:{number}: {found[0]!r}: {line.strip()}"
            )
