"""A Hopper kernel is lowered once in a process, and stands in every program that has it; a thread compiles it meanwhile."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import glax
from glax._src.core import files
from glax._src.core.bind import bind
from glax._src.core.registry import Backend
from glax._src.kernels.pallas_gpu.device import cache as lowering_cache

pytestmark = pytest.mark.fast
TYPES = [jax.ShapeDtypeStruct(s, d) for s, d in (((4, 5), "float32"), ((6,), "bfloat16"), ((3,), "int32"))]
X, Y, Z = jnp.zeros(2), jnp.zeros((4, 5)), jnp.zeros(6, jnp.bfloat16)


@pytest.fixture(autouse=True)
def compiled(monkeypatch, tmp_path):
    """On a GPU that is not here: shapes that a thread is given to compile, in order."""
    found, one = [], ThreadPoolExecutor(1)
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(lowering_cache, "known", {})
    monkeypatch.setattr(lowering_cache, "longest", {})
    monkeypatch.setattr(lowering_cache, "threads", lambda: one)
    monkeypatch.setattr(lowering_cache, "is_edited", lambda: False)
    monkeypatch.setattr(lowering_cache.Kernel, "compile", lambda self: found.append([x.shape for x in self.shapes]))
    return lambda: one.shutdown() or found


def launching(traced: list):
    """A kernel that takes its operands in another order, writes over one of them, and gives one back."""

    def call(x, y, z):
        traced.append(threading.current_thread())
        over = jax.ffi.ffi_call(
            "mosaic_gpu_v2",
            (jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct(y.shape, y.dtype)),
            input_output_aliases={1: 1},
        )
        count, y = over(z, y, x, kernel_hash=b"\x00\xff", module=b"ML\xefR")
        return [y, z, count]

    return call


def program(launch, *operands, times: int = 1) -> str:
    def main(z, y, x):
        for _ in range(times):
            y, z, count = launch(x, y, z)
        return y, z, count

    return jax.jit(main).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("times", [1, 2])
def test_stands_in_a_program_as_without(times, compiled):
    """Operands, results, attributes, layouts, and what is written over."""
    kernel = launching([])
    found = program(lambda *x: lowering_cache.once("kernel", kernel, *x, results=TYPES), Z, Y, X, times=times)
    assert found.count("@mosaic_gpu_v2") == times
    assert found == program(kernel, Z, Y, X, times=times)
    assert compiled() == [[(2,), (4, 5), (6,)]]


def test_lowered_once_for_its_shapes(compiled):
    traced = []

    def launch(*operands):
        results = [jax.ShapeDtypeStruct(operands[1].shape, "float32"), *TYPES[1:]]
        return lowering_cache.once("kernel", launching(traced), *operands, results=results)

    program(launch, Z, Y, X)
    program(lambda *x: launch(*x), Z, Y, X)
    assert len(traced) == 1 and traced[0] is not threading.current_thread()
    program(launch, Z, Y[:3], X)
    assert len(traced) == 2
    assert compiled() == [[(2,), (4, 5), (6,)], [(2,), (3, 5), (6,)]]


def lowered_anew(monkeypatch, traced: list, key="kernel") -> str:
    """A program with one kernel, as a process lowers it that has lowered no kernel before."""
    monkeypatch.setattr(lowering_cache, "known", {})
    return program(lambda *x: lowering_cache.once(key, launching(traced), *x, results=TYPES), Z, Y, X)


def test_a_later_process_reads_what_was_lowered(monkeypatch, compiled):
    traced = []
    texts = [lowered_anew(monkeypatch, traced) for _ in range(2)]
    assert len(traced) == 1 and texts[0] == texts[1] == program(launching([]), Z, Y, X)
    assert compiled() == [[(2,), (4, 5), (6,)]] * 2


def test_what_another_key_option_or_version_lowered_is_not_read(monkeypatch):
    traced = []
    lowered_anew(monkeypatch, traced)
    lowered_anew(monkeypatch, traced, key="other kernel")
    assert len(traced) == 2
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        lowered_anew(monkeypatch, traced)
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert len(traced) == 3
    monkeypatch.setattr(lowering_cache, "sources", lambda: "changed")
    lowered_anew(monkeypatch, traced)
    assert len(traced) == 4


def test_a_damaged_file_is_lowered_again_and_replaced(monkeypatch, tmp_path):
    traced = []
    lowered_anew(monkeypatch, traced)
    (stored,) = tmp_path.rglob("*.mlirbc")
    content = stored.read_bytes()
    stored.write_bytes(content[:-1])
    lowered_anew(monkeypatch, traced)
    assert len(traced) == 2 and stored.read_bytes() == content


def test_a_key_that_names_an_address_is_not_stored(monkeypatch, tmp_path):
    traced = []
    for _ in range(2):
        lowered_anew(monkeypatch, traced, key=("kernel", object()))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    lowered_anew(monkeypatch, traced)
    assert len(traced) == 3 and not list(tmp_path.rglob("*.mlirbc"))


def test_nothing_is_stored_or_read_once_the_source_is_edited(monkeypatch, tmp_path):
    """The digest of the new source must not name what the old one lowered."""
    package, traced = tmp_path / "package", []
    package.mkdir()
    monkeypatch.setattr(files, "PACKAGE", package)
    monkeypatch.setattr(lowering_cache, "is_edited", files.is_edited)
    monkeypatch.setattr(lowering_cache, "sources", lambda: "unchanged")
    (package / "kernel.py").touch()
    os.utime(package / "kernel.py", (files.IMPORTED - 1, files.IMPORTED - 1))
    lowered_anew(monkeypatch, traced)
    lowered_anew(monkeypatch, traced)
    assert len(traced) == 1
    (package / "kernel.py").touch()
    lowered_anew(monkeypatch, traced)
    lowered_anew(monkeypatch, traced, key="other kernel")
    assert len(traced) == 3 and len(list(tmp_path.rglob("*.mlirbc"))) == 1


def test_known_results_leave_tracing_to_the_lowering(compiled):
    """A call that JAX traces, and that no program contains, costs nothing."""
    traced = []

    def launch(*operands):
        return lowering_cache.once("kernel", launching(traced), *operands, results=TYPES)

    assert [x.shape for x in jax.eval_shape(launch, X, Y, Z)] == [(4, 5), (6,), (3,)]
    assert not traced and not compiled()


def test_known_results_change_no_program(compiled):
    kernel = launching([])
    found = program(lambda *x: lowering_cache.once("kernel", kernel, *x, results=TYPES), Z, Y, X)
    assert found == program(kernel, Z, Y, X)
    assert compiled() == [[(2,), (4, 5), (6,)]]


def call_with_gradient(order: list, forward: int, gradient: int, fails: bool = False):
    """Lower a program with the forward of a call of `forward` tokens, and trace its gradient of `gradient` tokens first."""

    def launching_as(name):
        def call(x, y, z):
            order.append(name)
            if fails and name == "longest":
                raise ValueError("no such gradient")
            return launching([])(x, y, z)

        return call

    def record(name, T, *operands, **options):
        q = jnp.zeros((1, T, 1, 2))
        with lowering_cache.recording(bind(q, q, q)):
            return lowering_cache.once((name, T), launching_as(name), *operands, results=TYPES, **options)

    def main(z, y, x):
        record("longest", gradient, x, y, z, is_longest=True)
        return record("forward", forward, x, y, z)

    jax.jit(main).trace(Z, Y, X).lower(lowering_platforms=("cuda",))


def test_a_gradients_longest_kernel_is_lowered_before_its_forward():
    order: list[str] = []
    call_with_gradient(order, 8, 8)
    assert order == ["longest", "forward"]
    assert not lowering_cache.longest


def test_gradients_of_other_shapes_are_left_alone():
    """`vmap` also traces the gradient of one element of a batch."""
    order: list[str] = []
    call_with_gradient(order, 8, 9)
    assert order == ["forward"]


def test_a_gradient_that_fails_leaves_its_forward_alone():
    order: list[str] = []
    call_with_gradient(order, 8, 8, fails=True)
    assert order == ["longest", "forward"]


def name_of(kernel: lowering_cache.Kernel) -> str:
    return next(key[0][0] for key, found in lowering_cache.known.items() if found is kernel)


def launched_nowhere(order: list):
    """The property `Kernel.traced` of kernels that note their names, and launch a program that is not there."""

    def traced(kernel):
        order.append(name_of(kernel))
        call = jax.ffi.ffi_call("mosaic_gpu_v2", [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.types])
        return jax.jit(lambda *x: call(*x, module=b"ML\xefR"), keep_unused=True).trace(*kernel.shapes)

    return property(traced)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need JAX 0.11")
@pytest.mark.parametrize(
    "gate, beta, heads, K, V, longest",
    [
        ("gk", False, 4, 128, 128, "gradient_key"),
        ("gk", False, 4, 256, 256, "gradient_wide"),
        ("g", False, 4, 128, 128, "gradient_head"),
        ("g", False, 2, 128, 128, "gradient_groups"),
        ("g", True, 2, 128, 128, "delta_gradient"),
        ("g", True, 2, 256, 128, "delta_gradient_wide"),
        ("gk", True, 2, 128, 128, "delta_key_gradient"),
    ],
)
def test_a_differentiated_call_lowers_its_longest_kernel_first(gate, beta, heads, K, V, longest, monkeypatch):
    """Through the registry: the gradient's marked kernel comes first, and the forward's kernels follow."""
    order: list[str] = []
    monkeypatch.setattr(lowering_cache.Kernel, "traced", launched_nowhere(order))

    def shaped(heads, *width):
        return jax.ShapeDtypeStruct((1, 2048, heads, *width), jnp.bfloat16)

    q, v, given = shaped(heads, K), shaped(4, V), {gate: shaped(4, *[K] * (gate == "gk"))}
    given |= {"beta": shaped(4)} if beta else {}

    def loss(q, k, v, given):
        return glax.recurrent(q, k, v, **given, platform="pallas").output.astype(jnp.float32).sum()

    jax.clear_caches()  # of kernels' calls as they were traced
    jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(q, q, v, given).lower(lowering_platforms=("cuda",))
    assert order[0] == longest and order.count(longest) == 1 and len(order) > 2
    assert not lowering_cache.longest


def test_what_fails_in_a_thread_is_left_to_the_program(monkeypatch):
    def fail(self):
        raise ValueError("no such instruction")

    monkeypatch.setattr(lowering_cache.Kernel, "compile", fail)
    assert "mosaic_gpu_v2" in program(
        lambda *x: lowering_cache.once("fails", launching([]), *x, results=TYPES), Z, Y, X
    )


def test_nothing_of_it_elsewhere(compiled, monkeypatch):
    """Untraced, or on another backend, a kernel is as Pallas has it."""
    calls = []

    def call(x):
        calls.append(x)
        return [x]

    lowering_cache.once("untraced", call, jnp.ones(3), results=[X])
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.CPU))
    jax.jit(lambda x: lowering_cache.once("elsewhere", call, x, results=[X]))(jnp.ones(3))
    assert len(calls) == 2 and not lowering_cache.known and not compiled()
