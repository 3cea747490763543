"""The segments and columns that the heuristic of the Hopper kernels chooses, and the stripes of a program."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from glax._src.core.bind import bind
from glax._src.kernels.pallas_gpu import config
from glax._src.kernels.pallas_gpu.config import HopperConfig, Work
from glax._src.kernels.pallas_gpu.plan import DeltaScan

# B, T, heads of q and k, heads of v, K, V; segments, columns of a program on 132 multiprocessors
CHOSEN = {
    "GLA-1.3B": ((4, 2048, 4, 4, 256, 512), "key", (1, 128)),
    "HGRN2-1.3B": ((4, 2048, 16, 16, 128, 128), "key", (1, 64)),
    "Nemotron-H-8B": ((2, 4096, 8, 128, 128, 64), "head", (1, 128)),
    "Nemotron-H-8B with a group more": ((2, 4096, 9, 144, 128, 64), "head", (1, 128)),
    "long row, few heads": ((1, 32768, 8, 8, 128, 128), "key", (16, 128)),
    "two long rows": ((2, 16384, 16, 16, 128, 128), "head", (4, 128)),
    "one long row of 17 heads": ((1, 8192, 17, 17, 128, 128), "head", (7, 128)),
}


@pytest.fixture(autouse=True)
def an_h100(monkeypatch):
    monkeypatch.setattr(config, "multiprocessors", lambda: 132)


def recurrence(sizes, gate):
    B, T, groups, H, K, V = sizes
    gates = (B, T, H, K) if gate == "key" else (B, T, H)
    shapes = (B, T, groups, K), (B, T, groups, K), (B, T, H, V), gates
    q, k, v, g = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes)
    found = []
    jax.eval_shape(lambda q, k, v, g: found.append(bind(q, k, v, **{dict(key="gk", head="g")[gate]: g})), q, k, v, g)
    return found[0]


@pytest.mark.parametrize("name", CHOSEN)
def test_segments_of_heuristic(name):
    sizes, gate, wanted = CHOSEN[name]
    found = HopperConfig.heuristic(recurrence(sizes, gate))
    assert (found.parts, found.columns) == wanted


def test_states_of_segments_have_a_price():
    """144 pairs of heads are two rounds of 132 programs. Eight segments fill nine rounds of an eighth, which by their scans alone
    would be sooner, but they move 302 MB of states: one H100 took 2.59 times the time of 128 heads."""
    work = Work.of(recurrence(*CHOSEN["Nemotron-H-8B with a group more"][:2]))
    whole, segments = work.rounds((1, 128)), work.rounds((8, 128))
    states = work.passing_states(programs=8 * 144, columns=128)
    assert segments - states < whole < segments
    moved = 4 * 8 * 144 * 128 * 128 * 4
    assert states == pytest.approx(moved / (64 * 4 * 128 * 2 * 132))  # a chunk of q, k, v and output


@pytest.mark.parametrize(
    ("kind", "heads", "gains"),
    [
        ("outputs", 33, False),  # 132 programs of a stripe, one round
        ("outputs", 34, True),  # 136: two rounds, or one of 68
        ("residuals", 66, True),  # 264, or 132
        ("residuals", 67, False),  # 268: three rounds, or two
        ("states", 128, True),  # four, or two
        ("adjoint", 66, False),
    ],
)
def test_stripes_are_carried_together_where_that_saves_rounds(kind, heads, gains):
    scan = DeltaScan(kind, heads, 128, 128, reverse=False, start=False)
    assert scan.gains_together(segments=2, multiprocessors=132) == gains
    for change in (dict(form="erase"), dict(K=256), dict(V=192)):
        assert not dataclasses.replace(scan, **change).gains_together(2, 132)
