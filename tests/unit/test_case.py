"""`python -m tests.case` reproduces a case, and finds the token, chunk and head that are off."""

import dataclasses

import jax
import pytest

import glax
from tests import case

CASE = ["key", "--platform", "xla", "--set", "T=70", "--set", "K=8", "--set", "V=8", "--set", "B=1"]


def test_every_intermediate_is_within_its_bar(capsys):
    assert case.main([*CASE, "--dump", "output,state,scores,gradient"]) == 0
    said = capsys.readouterr().out
    for name in (
        "output",
        "final_state",
        "state behind chunk 1",
        "scores of chunk 1",
        "d q",
        "d gk",
        "d initial_state",
    ):
        assert f"\n{name} " in said, name
    assert "are off" not in said and "query" not in said


@pytest.mark.parametrize("name, field, at", [("chunked", "output", (0, 66, 1, 3)), ("chunked.vjp", "k", (0, 9, 0, 2))])
def test_the_first_wrong_number_is_found(name, field, at, monkeypatch, capsys):
    _ = glax.configs.ChunkedConfig  # loads the kernels
    kernels = glax.kernel_registry.kernels
    spec = kernels[f"{name}/xla/any"]

    def wrong(*operands, config):
        found = spec.run(*operands, config=config)
        spoiled = getattr(found, field).at[at].add(1.0)
        return found._replace(**{field: spoiled}) if isinstance(found, tuple) else found.replace(**{field: spoiled})

    monkeypatch.setitem(kernels, spec.name, dataclasses.replace(spec, run=wrong))
    assert case.main([*CASE, "--dump", "output,gradient"]) == 1
    said = capsys.readouterr().out
    _, token, head, _ = at
    place = f"sequence 0, token {token}, head {head}, row {token % 64} of chunk {token // 64}"
    assert f"the first at {place}:" in said and said.count("are off") == 1


def test_a_gradient_that_takes_no_residuals_runs(monkeypatch):
    _ = glax.configs.ChunkedConfig  # loads the kernels
    kernels = glax.kernel_registry.kernels
    spec = kernels["chunked.vjp/xla/any"]

    def run(r, d_output, d_final, *, config):
        return spec.run(r, d_output, d_final, config=config)

    monkeypatch.setitem(kernels, spec.name, dataclasses.replace(spec, run=run))
    assert case.main([*CASE, "--dump", "gradient"]) == 0


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["no such case"], "expected names of --list"),
        (["key", "--dump", "carry"], "expected names of --list"),
        (["key", "--set", "size=3"], "--set takes one of"),
        (["key-packed", "--dump", "state"], "needs one sequence a row"),
        (["key", "--platform", "cpp", "--dump", "gradient", "--set", "tokens"], "--set takes one of"),
    ],
)
def test_what_is_wrong_is_named(arguments, said, capsys):
    with pytest.raises(SystemExit) as raised:
        case.main(arguments)
    assert said in capsys.readouterr().err + str(raised.value)


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="has an interpreter")
def test_a_platform_without_an_interpreter_is_named(capsys):
    with pytest.raises(SystemExit, match="pallas needs a gpu here"):
        case.main(["bfloat16, key", "--platform", "pallas"])
