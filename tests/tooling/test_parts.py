"""`--part K/N` of pytest, by which CI runs a part of the cases."""

import dataclasses

import pytest

from tests.conftest import Part

CASES = [f"a.py::many[{i}]" for i in range(7)] + ["a.py::one", *(f"b.py::two[{x}]" for x in "xy")]


@dataclasses.dataclass(eq=False)
class Item:
    nodeid: str


@dataclasses.dataclass
class Config:
    """Stands for pytest's, and for its hooks."""

    part: str
    dropped: list[Item] = dataclasses.field(default_factory=list)

    @property
    def hook(self):
        return self

    def getoption(self, name: str) -> str:
        return {"--part": self.part}[name]

    def pytest_deselected(self, items: list[Item]):
        self.dropped += items


def chosen(part: int, parts: int) -> list[str]:
    items, config = [Item(name) for name in CASES], Config(f"{part}/{parts}")
    Part().pytest_collection_modifyitems(config, items)
    assert len(items) + len(config.dropped) == len(CASES)
    return [item.nodeid for item in items]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 20])
def test_all_cases_are_in_one_part_and_a_test_of_many_has_one_in_each(parts):
    found = [chosen(part, parts) for part in range(parts)]
    assert sorted(name for names in found for name in names) == sorted(CASES)
    assert all(any("many" in name for name in names) for names in found) == (parts <= 7)
    assert all(names == sorted(names, key=CASES.index) for names in found)


def test_the_whole_is_one_part():
    assert chosen(0, 1) == CASES
