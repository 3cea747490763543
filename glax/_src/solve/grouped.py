"""Choose the kernels that multiply rows by the matrix of their group, and insert them into the program.

There are two: Triton's for GPUs of NVIDIA, which is chosen wherever it is able, and XLA's, `jax.lax.ragged_dot`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glax._src.core.backend import Backend
from glax._src.core.recurrence import aligned
from glax._src.core.registry import Platform
from glax._src.kernels.common.grouped import GroupedOperands
from glax._src.kernels.triton import grouped_config
from glax._src.solve.autodiff import float0_zeros
from glax._src.solve.dispatch import executor
from glax._src.solve.partitioning import is_on_one_device, is_spread_by_type, why_not_on_gpu
from glax._src.tuning.op import FunctionKernel


class GroupedKernel(FunctionKernel):
    """Hold an implementation of a product of grouped rows."""

    op_ids = ("grouped/triton/gpu", "grouped.sums/triton/gpu")


def grouped_product(x: Float[Array, "M K"], w: Float[Array, "E K N"], sizes: Int[Array, "E"]) -> Float[Array, "M N"]:
    """Return y [M, N] with y_m = x_m w_e, in the dtype of x, by the best kernel. e is the group of row m.

    The rows of x are sorted by group: first sizes[0] rows of group 0, then sizes[1] rows of group 1, and so on. Rows behind the
    last group are 0 in y. x and w have one dtype.
    """
    operands = GroupedOperands(x, w, sizes)
    if (why := refusal(operands)) is not None:
        return executor(XLA, operands, transposed=False, refused={TRITON.op_id: why})
    from glax._src.solve.reverse_mode import reverse_mode  # loads modules of JAX that are not a part of `import jax`

    return products(False, *reverse_mode(aligned(operands)))


def refusal(operands: GroupedOperands) -> str | None:
    """Return why Triton's kernels do not run a call here, or None."""
    if Backend.here() is not Backend.GPU or is_spread_by_type(operands):
        return why_not_on_gpu()
    return grouped_config.refusal(operands)


# ---- the kernels -------------------------------------------------------------------------------------------------------


def run_products(operands: GroupedOperands, *, cfg, transposed: bool):
    from glax._src.kernels.triton import grouped  # imports Triton

    return grouped.products(operands, cfg, transposed)


def run_sums(operands: GroupedOperands, *, cfg):
    from glax._src.kernels.triton import grouped  # imports Triton

    return grouped.sums(operands, cfg)


def products_by_xla(operands: GroupedOperands, *, cfg, transposed: bool):
    x, w, sizes = operands
    return jax.lax.ragged_dot(x, jnp.swapaxes(w, 1, 2) if transposed else w, sizes)


def sums_by_xla(operands: GroupedOperands, *, cfg):
    x, y, sizes = operands
    w = jax.ShapeDtypeStruct((sizes.shape[0], x.shape[1], y.shape[1]), x.dtype)
    return jax.linear_transpose(lambda w: jax.lax.ragged_dot(x, w, sizes), w)(y)[0]


PRODUCTS_ID, SUMS_ID = GroupedKernel.op_ids
TRITON = GroupedKernel(PRODUCTS_ID, run_products, grouped_config.product_config)
TRITON_SUMS = GroupedKernel(SUMS_ID, run_sums, grouped_config.sum_config)
XLA = GroupedKernel("grouped/xla/any", products_by_xla)
XLA_SUMS = GroupedKernel("grouped.sums/xla/any", sums_by_xla)


def placed(ours: GroupedKernel, by_xla: GroupedKernel, x: Array, other: Array, sizes: Array, **options) -> Array:
    """Return the result of `ours`, or of `by_xla` if the program is lowered for another backend or XLA divides it over devices.

    x, other, sizes: the fields of `GroupedOperands`. options: further arguments of both kernels. The examples of vmap run one
    after another, because each has groups of its own.
    """
    from glax._src.solve.lowering import Kernel as Inserted  # loads modules of JAX that are not a part of `import jax`

    def run(*operands):
        return executor(ours, GroupedOperands(*operands), **options)

    def again(platform: Platform | None, results, *operands):
        if Backend.here() is Backend.GPU and platform is not Platform.XLA:
            return run(*operands)
        return executor(by_xla, GroupedOperands(*operands), **options, refused={ours.op_id: why_not_on_gpu()})

    kernel = Inserted(run, again, opaque=True, is_divisible=False)
    call = jax.custom_batching.custom_vmap(lambda *operands: kernel.bind(not is_on_one_device(), *operands))

    @call.def_vmap
    def rule(size: int, batched, *operands):
        def each(own):
            rest = iter(own)
            return call(*(next(rest) if is_own else x for x, is_own in zip(operands, batched, strict=True)))

        return jax.lax.map(each, [x for x, is_own in zip(operands, batched, strict=True) if is_own]), True

    return call(x, other, sizes)


# ---- derivatives: each is a product of the same two kinds, so they exist in every order --------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def products(transposed: bool, x: Array, w: Array, sizes: Array) -> Array:
    """Return y_m = x_m w_e, or x_m w_e^T if transposed, where e is the group of row m: [M, N] for x [M, K] and w [E, K, N]."""
    return placed(TRITON, XLA, x, w, sizes, transposed=transposed)


def products_fwd(transposed: bool, x: Array, w: Array, sizes: Array):
    return products(transposed, x, w, sizes), (x, w, sizes)


def products_bwd(transposed: bool, residuals, d_y: Array):
    x, w, sizes = residuals
    d_w = sums(d_y, x, sizes) if transposed else sums(x, d_y, sizes)
    return products(not transposed, d_y, w, sizes), d_w, float0_zeros(sizes)


products.defvjp(products_fwd, products_bwd)


@jax.custom_vjp
def sums(x: Array, y: Array, sizes: Array) -> Array:
    """Return w [E, K, N], where w_e is the sum of x_m^T y_m over the rows m of group e: x [M, K], y [M, N], sizes [E]."""
    return placed(TRITON_SUMS, XLA_SUMS, x, y, sizes)


def sums_fwd(x: Array, y: Array, sizes: Array):
    return sums(x, y, sizes), (x, y, sizes)


def sums_bwd(residuals, d_w: Array):
    x, y, sizes = residuals
    return products(True, y, d_w, sizes), products(False, x, d_w, sizes), float0_zeros(sizes)


sums.defvjp(sums_fwd, sums_bwd)
