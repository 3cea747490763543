"""Which instructions wait for the state exchange, read from programs compiled for 4 and 8 simulated devices."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glax import parallel
from glax._src.core.bind import bind
from glax._src.core.decay import USUAL_FORMS
from glax._src.core.registry import Backend, Platform, TwoPhase, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.parallel.boundary import (
    CONSTANT_ROWS,
    FIRST_ROWS,
    NEXT_ROWS,
    BoundaryRows,
    scan_windows,
    state_and_decay,
)
from glax._src.parallel.exchange import Edge
from glax._src.parallel.sequence import overlap_of
from glax._src.solve.dispatch import Choice, resolve
from glax.testing.reference import reference
from tests.cases import FORMS, Case, inputs
from tests.close import assert_close
from tests.compiling import quick_jit
from tests.parallel.meshes import mesh_of
from tests.parallel.test_parallel import WAITING

COLLECTIVES = "all-gather", "collective-permute"
LOOPS = "while", "call"  # small loops are called


class Program:
    """The entry computation of compiled HLO, with all instructions that each instruction depends on."""

    def __init__(self, compiled):
        text = compiled.as_text()
        self.opcode, self.scope, uses = {}, {}, {}
        for line in text[text.index("\nENTRY") :].splitlines():
            if found := re.match(r"\s*(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\(%?(.*)", line):
                name, opcode, rest = found.groups()
                scope = re.search(r'op_name="([^"]*)"', rest)
                self.opcode[name], self.scope[name] = opcode, scope[1] if scope else ""
                uses[name] = set(re.findall(r"[\w.-]+", rest.split("metadata=")[0]))
        self.needs: dict[str, set[str]] = {}
        for name, used in uses.items():  # operands come before what uses them
            direct = used & self.needs.keys()
            self.needs[name] = direct.union(*(self.needs[other] for other in direct))

    def find(self, *opcodes: str, scope: str, other: str = "\0") -> set[str]:
        opcodes = {x + end for x in opcodes for end in ("", "-start")}
        return {
            x
            for x, op in self.opcode.items()
            if op in opcodes and scope in self.scope[x] and other not in self.scope[x]
        }

    def waits(self, these: set[str], those: set[str]) -> bool:
        """Whether any of these needs any of those."""
        assert these and those
        return any(self.needs[x] & those for x in these)


def compiled(form: str, shards: int, packed: bool) -> Program:
    """Forward and gradient on XLA's kernels: loops in the program, at this T, by names of their own."""
    mesh = mesh_of(s=shards)
    cuts = (0, 300, 300, 500)
    case = Case("", T=544, gates=FORMS[form], K=4, V=4, heads=(1, 1, 1), cuts=cuts if packed else None)
    arguments, options = inputs(case, "mild"), dict(cu_seqlens=jnp.array(cuts)) if packed else {}
    spread = functools.partial(parallel.recurrent, mesh=mesh, sequence_axis="s", platform="xla", **options)

    def value(arguments):
        return (spread(**arguments).output ** 2).sum()

    return Program(quick_jit(jax.value_and_grad(value)).lower(arguments).compile())


def pairs(program: Program) -> list[tuple[set[str], set[str]]]:
    """The exchange and the kernel of the forward, and those of the gradient."""
    return [
        (
            program.find(*COLLECTIVES, scope="jvp", other="transpose"),
            program.find(*LOOPS, scope="/glax.", other=".vjp"),
        ),
        (program.find(*COLLECTIVES, scope="transpose"), program.find(*LOOPS, scope="/glax.chunked.vjp")),
    ]


@pytest.mark.parametrize(
    ("form", "shards", "packed"),
    [(form, 4, False) for form in USUAL_FORMS if form not in WAITING] + [("key", 8, True), ("key+value", 8, False)],
)
def test_shards_that_correct(form, shards, packed, correcting):
    """Exchange and kernel wait for each other in neither direction: the scheduler runs them side by side."""
    program = compiled(form, shards, packed)
    for exchange, kernel in pairs(program):
        assert len(exchange) == (1 if shards == 4 else 4)
        assert not program.waits(exchange, kernel) and not program.waits(kernel, exchange)


@pytest.mark.parametrize(("form", "shards", "packed"), [("none", 8, True), ("constant", 4, False), ("key", 4, False)])
def test_shards_that_wait(form, shards, packed):
    """The exchange of shards that wait depends on no kernel."""
    program = compiled(form, shards, packed)
    for exchange, kernel in pairs(program):
        assert len(exchange) == (1 if shards == 4 else 4)
        assert not program.waits(exchange, kernel) and program.waits(kernel, exchange)


@pytest.mark.fast
@pytest.mark.parametrize("gradient", [False, True])
def test_the_rule_of_ways(gradient, monkeypatch):
    """Two-phase kernels run in two phases. Others are corrected on accelerators, if gates depend on the data."""
    load_kernels()
    rs = {form: bind(**inputs(Case("", T=64, gates=FORMS[form], K=8, V=8), "mild")) for form in USUAL_FORMS}
    choice = Choice(Platform.XLA)
    assert {overlap_of(resolve(choice, r), r, gradient) for r in rs.values()} == {"wait"}
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    ways = {form: "wait" if form in WAITING else "correct" for form in USUAL_FORMS}
    assert {form: overlap_of(resolve(choice, r), r, gradient) for form, r in rs.items()} == ways
    for name, spec in kernel_registry.kernels.items():
        in_two_phases = dataclasses.replace(
            spec, two_phase=lambda r, config: TwoPhase(None, None) if r.decay.form == "key" else None
        )
        monkeypatch.setitem(kernel_registry.kernels, name, in_two_phases)
    assert {form: overlap_of(resolve(choice, r), r, gradient) for form, r in rs.items()} == ways | dict(key="two_phase")


def opaque(scope: str, *operands):
    """A number of all operands, by a loop that the compiler does not see through."""
    with jax.named_scope(scope):
        given = sum(jnp.ravel(x)[jnp.array([0, -1])].sum().astype(jnp.float32) for x in jax.tree.leaves(operands))
        return jax.lax.fori_loop(0, 9 + (given > 0), lambda i, x: jnp.sin(x) + i, given)


def hopper_of_loops(monkeypatch) -> dict:
    """By algorithm, the parts of the Hopper kernels with loops for kernels."""
    from glax._src.kernels.pallas_gpu import HopperConfig, layout
    from glax._src.kernels.pallas_gpu import plain as launch
    from glax._src.kernels.pallas_gpu.plan import ScanResults

    def key_scan(w, table, q, a, b, g, scale, start, *rest):
        x = opaque("states" if w.two_way else "scan", table, q, a, b, g, scale, start, *rest)
        results = [jnp.full(y.shape, x, y.dtype) for y in w.results(*q.shape[:2], len(table))]
        return ScanResults(
            *results, jnp.full((len(table), w.H, w.K), x), jnp.zeros((q.shape[0], -(-q.shape[1] // 64), w.H))
        )

    def entering(parts, given, states, *rest):
        return jnp.full_like(states, opaque("entering", states, *rest))

    def of_chunks(q, k, v, g, *rest, **_):
        x, each = opaque("chunks", q, k, v, g, *rest), (q.shape[0], q.shape[1] // 64, q.shape[2])
        return *(jnp.full_like(y, x) for y in (q, k, v, g[0])), jnp.full(each, x)

    monkeypatch.setattr(layout, "key_scan", key_scan)
    monkeypatch.setattr(layout, "segment_scan", entering)
    monkeypatch.setattr(launch, "gradient_key", of_chunks)
    given = dict(config=HopperConfig(parts=8))
    forward, gradient = (
        (launch.begin, launch.finish, launch.finish_with_residuals),
        (launch.begin_vjp, launch.finish_vjp),
    )
    return {"chunked": in_config(given, *forward), "chunked.vjp": in_config(given, *gradient)}


def triton_of_loops(monkeypatch) -> dict:
    pytest.importorskip("triton")
    pytest.importorskip("jax_triton")
    from glax._src.kernels.triton import GradientConfig, TritonChunkedConfig, chunked

    def launch(kernel, programs, operands, outputs, **_):
        x = opaque(kernel.__name__, operands)
        return [jnp.full(shape, x, dtype) for shape, dtype in outputs]

    monkeypatch.setattr(chunked, "launch", launch)
    forward, gradient = (dict(config=kind(segment=256)) for kind in (TritonChunkedConfig, GradientConfig))
    return {
        "chunked": in_config(forward, chunked.local_states, chunked.finish),
        "chunked.vjp": in_config(gradient, chunked.local_states_vjp, chunked.finish_vjp),
    }


def in_config(given: dict, *parts) -> TwoPhase:
    """Whatever config the kernel that they stand for is given."""
    return TwoPhase(
        *(functools.partial(lambda part, *operands, config: part(*operands, **given), part) for part in parts)
    )


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kernels", "beside"),
    [(hopper_of_loops, ["entering", "entering"]), (triton_of_loops, ["scan_segments", "segment_states"])],
    ids=["hopper", "triton"],
)
def test_kernels_in_parts_work_beside_the_exchange(kernels, beside, monkeypatch):
    """In the forward and in the gradient: of these neither the exchange waits for the kernel nor that for the exchange."""
    load_kernels()
    for algorithm, parts in kernels(monkeypatch).items():
        name = f"{algorithm}/xla/any"
        stands = dict(two_phase=lambda r, config, parts=parts: parts, priority=lambda r: 1000)
        monkeypatch.setitem(kernel_registry.kernels, name, dataclasses.replace(kernel_registry.kernels[name], **stands))
    jax.clear_caches()
    arguments = dict.fromkeys(("query", "key", "value", "gk"), jnp.ones((1, 4 * 2048, 2, 64), jnp.bfloat16))
    spread = functools.partial(parallel.recurrent, mesh=mesh_of(s=4), sequence_axis="s", platform="xla")

    def value(arguments):
        return (spread(**arguments).output.astype(jnp.float32) ** 2).sum()

    program = Program(quick_jit(jax.value_and_grad(value)).lower(arguments).compile())
    jax.clear_caches()
    for ((exchange,), loops), name in zip(pairs(program), beside, strict=True):
        apart = [x for x in loops if not program.waits({exchange}, {x}) and not program.waits({x}, {exchange})]
        assert any(f"/{name}/" in program.scope[x] for x in apart), [program.scope[x] for x in apart]


@pytest.mark.parametrize("T", [48, 4096])
def test_triton_kernels_in_parts_do_no_more(T, monkeypatch):
    """Where T is cut, a scan of the segments' states is all that they launch beside what the whole kernel does.

    NaN is the state that arrives. The gradient scans from S before it reads that state.
    """
    pytest.importorskip("triton")
    pytest.importorskip("jax_triton")
    from glax._src.kernels.triton import chunked

    launched = []

    def launch(kernel, programs, operands, outputs, **_):
        reads = any(jnp.issubdtype(x.dtype, jnp.floating) and jnp.isnan(x).any() for x in operands)
        launched.append((kernel.__name__, bool(reads)))
        return [jnp.full(shape, jnp.nan if reads else 0, dtype) for shape, dtype in outputs]

    monkeypatch.setattr(chunked, "launch", launch)
    ones, nan = jnp.ones((1, T, 1, 16)), jnp.full((1, 1, 16, 16), jnp.nan)
    r = bind(ones, ones, ones, gk=-ones).replace(initial_state=jnp.zeros((1, 1, 16, 16)))
    for name, late in (("chunked", ()), ("chunked.vjp", ("segment_states", "scan_segments"))):
        spec = kernel_registry.kernels[f"{name}/triton/gpu"]
        config = spec.config.heuristic(r)
        parts = spec.two_phase(r, config)
        assert (parts is not None) == (T == 4096)
        if parts is None:
            continue
        arrived = (r, ones, nan) if late else (r.replace(initial_state=nan),)
        launched.clear()
        spec.run(r, *arrived[1:], config=config)
        whole = sorted(name for name, _ in launched)
        launched.clear()
        begun, *_ = parts.local_states(r, *(0 * jnp.nan_to_num(x) for x in arrived[1:]), config=config)
        first = [name for name, _ in launched]
        parts.finish(begun, *arrived, config=config)
        assert sorted(name for name, _ in launched) == sorted([*whole, "scan_segments"])
        second = launched[len(first) :]
        assert [name for name, reads in second[: [reads for _, reads in second].index(True)]] == [*late]


def test_a_program_that_waits_is_seen():
    """The test above distinguishes an exchange that waits for the kernel from one that runs beside it."""
    mesh = mesh_of(s=4)
    spec = jax.sharding.PartitionSpec("s")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec))
    def behind(x, y):
        with jax.named_scope("kernel"):
            x = jax.lax.fori_loop(0, 9 + (x[0] > 0), lambda i, x: jnp.sin(x) + i, x)
        return jax.lax.all_gather(x, "s"), jax.lax.ppermute(y, "s", [(0, 1)])

    program = Program(quick_jit(behind).lower(jnp.ones(4), jnp.ones(4)).compile())
    kernel = program.find(*LOOPS, scope="kernel")
    assert program.waits(program.find("all-gather", scope=""), kernel)
    assert not program.waits(program.find("collective-permute", scope=""), kernel)


# ---- what a message reads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("form", USUAL_FORMS)
def test_message_is_the_state_and_the_decay(form, reverse):
    """The message of a shard that one sequence spans, in windows of their real sizes."""
    T = (
        max(CONSTANT_ROWS + 5, FIRST_ROWS + NEXT_ROWS + 5)
        if form in ("none", "constant")
        else FIRST_ROWS + NEXT_ROWS + 5
    )
    case = Case("", T=T, gates=FORMS[form], K=3, V=2, heads=(1, 1, 1), state_dtype=None)
    r = bind(**inputs(case, "-0.004"), reverse=reverse)
    rows = BoundaryRows(r, Edge(jnp.int32(0), jnp.bool(True), jnp.int32(T)), from_low=reverse)
    run = quick_jit(lambda begun: state_and_decay(rows, jnp.bool(True), begun, r.k, r.v, adjoint=False))
    state, row_decay, column_decay = run(r.start_state)
    assert_close("S", state, reference(r).final_state, 1e-5)
    through = (run(r.start_state + 1e30)[0] - state) / 1e30
    decay = row_decay[..., None] * (1 if column_decay is None else column_decay[..., None, :])
    assert_close("D", through, np.broadcast_to(decay, through.shape), 1e-5)


@pytest.mark.parametrize("from_low", [False, True])
def test_rows_beyond_underflowed_decays_are_not_read(from_low):
    """The cost of a message depends on the gates, not on the length of the shard."""
    T = 20 * NEXT_ROWS
    log = jnp.full((1, T, 1), -1.0)
    r = bind(jnp.ones((1, T, 1, 2)), jnp.ones((1, T, 1, 2)), jnp.ones((1, T, 1, 2)), g=log)
    far = jnp.arange(T) >= FIRST_ROWS if from_low else jnp.arange(T) < T - FIRST_ROWS
    r = r.replace(v=jnp.where(far[:, None, None], jnp.nan, r.v))
    rows = BoundaryRows(r, Edge(jnp.int32(0), jnp.bool(True), jnp.int32(T)), from_low)
    state, row_decay, _ = state_and_decay(rows, jnp.bool(True), r.start_state, r.k, r.v, adjoint=False)
    assert jnp.isfinite(state).all() and (row_decay == 0).all()
    visited, _, _ = scan_windows(rows, lambda window, i, G, logs, carry: carry, ())
    assert visited == 0
