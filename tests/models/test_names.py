"""Names of parameters in checkpoints: the rules that choose layers by number."""

import re

import pytest

from glax.models.names import Names, mixer_names, one_of


@pytest.mark.fast
def test_a_pattern_of_layers_matches_no_part_of_another_number():
    found = [layer for layer in range(400) if re.search(rf"\.{one_of([0, 3, 13])}\.", f"blocks.{layer}.attn.0_norm")]
    assert found == [0, 3, 13]
    assert [layer for layer in range(400) if re.search(one_of([0, 3, 13]), f"blocks.{layer}.x")] == [0, 3, 13]
    assert re.search(one_of([]), "blocks.0.attn") is None


@pytest.mark.fast
def test_the_number_of_rules_is_that_of_the_kinds_of_layers():
    tables = {"a": ("self_attn", {"query": "q_proj"}), "b": ("mamba", {"query": "in_proj"})}
    few, many = (mixer_names(["a", *["b"] * count, "a"], tables) for count in (2, 30))
    assert len(few) == len(many)
    names = Names(many)
    assert [names(f"blocks.{layer}.attn.query.bias") for layer in (0, 1, 3, 30, 31)] == [
        "blocks.0.self_attn.q_proj.bias",
        "blocks.1.mamba.in_proj.bias",
        "blocks.3.mamba.in_proj.bias",
        "blocks.30.mamba.in_proj.bias",
        "blocks.31.self_attn.q_proj.bias",
    ]
