"""`--part K/N` of pytest, by which CI runs a part of each test's cases."""

import types

import pytest

from tests.conftest import Part

CASES = [f"a.py::many[{i}]" for i in range(7)] + ["a.py::one", *(f"b.py::two[{x}]" for x in "xy")]


def kept(part: int, parts: int) -> list[str]:
    items, dropped = [types.SimpleNamespace(nodeid=name) for name in CASES], []
    hook = types.SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    config = types.SimpleNamespace(getoption=lambda name: f"{part}/{parts}", hook=hook)
    Part().pytest_collection_modifyitems(config, items)
    assert len(items) + len(dropped) == len(CASES)
    return [item.nodeid for item in items]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 20])
def test_every_test_has_a_case_in_each_part_and_all_cases_are_in_one(parts):
    found = [kept(part, parts) for part in range(parts)]
    assert {name for names in found for name in names} == set(CASES)
    assert all(
        {name.partition("[")[0] for name in names} == {"a.py::many", "a.py::one", "b.py::two"} for names in found
    )
    assert all(names == sorted(names, key=CASES.index) for names in found)


def test_the_whole_is_one_part():
    assert kept(0, 1) == CASES
