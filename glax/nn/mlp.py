"""Provide gated MLPs, and mixtures of experts: a router, and MLPs of which each token reads a few."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from glax._src.core.bind import check_integers
from glax._src.core.recurrence import to_int32
from glax._src.solve.grouped import grouped_product
from glax._src.solve.partitioning import flat_axes
from glax.nn.arguments import checked
from glax.nn.norms import RMSNorm
from glax.nn.parts import EMBED, EXPERTS, MLP, activation, check_floats, linear, normal, parameter, products

Situ = tuple[float, float | None]
Chosen = tuple[Float[Array, "M k"], Int[Array, "M k"]]  # the weights and the numbers of the experts of each token


class SwiGLU(nnx.Module):
    """Compute y = W_down (act(W_gate x) * W_up x).   Shazeer 2020, https://arxiv.org/abs/2002.05202.

    width, inside: the widths of x and y, and of W_gate x. bias: whether the three projections have a bias.
    activation: the name of act in `glax.nn.parts.ACTIVATIONS`; "swish" is SiLU. "powlu" is x^(3 / (sqrt(x) + 1)) sigmoid(x) for
        x > 0, and SiLU elsewhere.
    limit: W_gate x is at most limit, and W_up x between -limit and limit; no bound if None.
    situ: numbers (b, c), for b tanh(g / b) sigmoid(g) in place of act(g), and c tanh(u / c) in place of u = W_up x. With c None u
        is as it is. It excludes limit and another activation than "swish".   Kimi Team 2026, https://arxiv.org/abs/2607.24653.

    W_gate x and W_up x are computed by one matrix product if x has more than `width` rows and there is no bias.
    dtype, param_dtype and kernel_init are as in `glax.nn.linear_attention.MixerOptions`. mlp(x [..., width]) returns y of the
    same shape. Raises TypeError or ValueError, which names the argument.

    >>> mlp = nn.SwiGLU(64, 128, rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((16, 64))).shape
    (16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        inside: int,
        *,
        activation: str = "swish",
        limit: float | None = None,
        situ: Situ | None = None,
        bias: bool = False,
        dtype: jnp.dtype | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        self.width, self.activation, self.limit = width, activation, limit
        self.situ = checked_situ(situ, limit, "activation", activation)
        self.act(jnp.zeros(()))  # raises ValueError for an unknown name
        options: dict[str, Any] = dict(
            bias=bias, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
        )
        self.gate = linear(width, inside, (EMBED, MLP), **options)
        self.up = linear(width, inside, (EMBED, MLP), **options)
        self.down = linear(inside, width, (MLP, EMBED), **options)

    def act(self, x: Array) -> Array:
        """Return act(x), the activation that the layer's constructor names."""
        return powlu(x) if self.activation == "powlu" else activation("activation", self.activation)(x)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Return y [..., width] of x [..., width]. Raises TypeError or ValueError for other x."""
        check_floats("x", x, self.width)
        gate, up = products(x, self.gate, self.up)
        gated = gated_product(gate.astype(jnp.float32), up.astype(jnp.float32), self.act, self.limit, self.situ)
        return self.down(gated.astype(x.dtype))


def gated_product(gate: Array, up: Array, act: Callable, limit: float | None, situ: Situ | None) -> Array:
    """Return act(gate) up in their dtype, after `bounded` with `limit`.

    With situ = (b, c) return b tanh(gate / b) sigmoid(gate) c tanh(up / c) instead, formed in float32 and rounded to up's
    dtype; the factor c tanh(up / c) is `up` if c is None.
    """
    if situ is None:
        gate, up = bounded(gate, up, limit)
        return act(gate) * up
    (b, c), dtype = situ, up.dtype
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    up = up if c is None else c * jnp.tanh(up / c)
    return (b * jnp.tanh(gate / b) * jax.nn.sigmoid(gate) * up).astype(dtype)


def checked_situ(situ: Situ | None, limit: float | None, name: str, act: str) -> Situ | None:
    """Return situ = (b, c) as floats, where c may be None; return None if situ is None.

    name, act: the name and the value of the argument that holds the activation. Raises ValueError, which names the argument,
    unless b is a finite number above 0, and c such a number or None. With situ it also raises ValueError if `limit` is given,
    or if the activation is not SiLU, because situ takes the place of both.
    """
    if situ is None:
        return None
    is_pair = isinstance(situ, tuple | list) and len(situ) == 2
    if not is_pair or not is_above_0(situ[0]) or not (situ[1] is None or is_above_0(situ[1])):
        raise ValueError(f"situ must be a pair of finite numbers above 0, or of one and None, got {situ!r}")
    if limit is not None:
        raise ValueError(f"limit must be None with situ, got {limit}")
    if act not in ("swish", "silu"):
        raise ValueError(f"{name} must be 'swish' or 'silu' with situ, which takes its place, got {act!r}")
    b, c = situ
    return float(b), None if c is None else float(c)


def is_above_0(value: Any) -> bool:
    """Return whether a value is a finite number above 0. Booleans are no numbers here."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_number and bool(0 < value < float("inf"))


def bounded(gate: Array, up: Array, limit: float | None) -> tuple[Array, Array]:
    """Return min(gate, limit) and up between -limit and limit; both as they are if limit is None."""
    return (gate, up) if limit is None else (jnp.minimum(gate, limit), jnp.clip(up, -limit, limit))


def powlu(x: Array, power: float = 3.0) -> Array:
    """Return x^(power / (sqrt(x) + 1)) sigmoid(x) for x > 0, and SiLU elsewhere."""
    positive = jnp.where(x > 0, x, 1.0)  # else the gradient of the branch that is not taken would be NaN
    above = positive ** (power / (jnp.sqrt(positive) + 1))
    return jnp.where(x > 0, above, x) * jax.nn.sigmoid(x)


# ---- experts ----------------------------------------------------------------------------------------------------------


def softmax_router(x: Float[Array, "M D"], kernel: Float[Array, "D E"], top_k: int, normalize: bool = True) -> Chosen:
    """Return (weights, experts), float32 and int32 [M, k = top_k] each: the softmax weights and the numbers of the k experts
    with the greatest logits of each token. The logits are x kernel.

    normalize: whether the softmax is over the k chosen experts, so that the weights of a token add up to 1; else it is over all
    E.
    """
    every = (x @ kernel.astype(x.dtype)).astype(jnp.float32)
    logits, chosen = jax.lax.top_k(every, top_k)
    if normalize:
        return jax.nn.softmax(logits, -1), chosen
    return jnp.exp(logits - jax.nn.logsumexp(every, -1, keepdims=True)), chosen


def sigmoid_router(
    x: Float[Array, "M D"],
    kernel: Float[Array, "D E"],
    correction: Float[Array, "E"] | None,
    top_k: int,
    *,
    groups: int = 1,
    best_groups: int = 1,
    normalize: bool = True,
    scaling: float = 1.0,
    sum_floor: float = 1e-20,
) -> Chosen:
    """Return (weights, experts), float32 and int32 [M, top_k] each: the weights and the numbers of each token's experts.

    The score of an expert is sigmoid(x kernel), and experts are ranked by score + correction. The E experts form `groups` equal
    groups. A group is ranked by the sum of its two greatest score + correction. The experts are the top_k of the `best_groups`
    best groups, and their weights are their scores.

    correction: no gradient flows to it; 0 if None.
    normalize: whether the weights of a token are divided by their sum + sum_floor.
    scaling: a factor of the weights, which is applied last.

    Liu et al. 2024, https://arxiv.org/abs/2412.19437.
    """
    logits = jnp.matmul(x.astype(jnp.float32), kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    preferred = scores if correction is None else scores + correction.astype(jnp.float32)[None]
    preferred = jax.lax.stop_gradient(preferred)
    by_group = preferred.reshape(*preferred.shape[:-1], groups, preferred.shape[-1] // groups)
    best = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(-1)
    _, picked = jax.lax.top_k(best, best_groups)
    in_picked = jax.nn.one_hot(picked, groups, dtype=bool).any(1)  # [M, groups]
    preferred = jnp.where(in_picked[..., None], by_group, -jnp.inf).reshape(preferred.shape)
    _, experts = jax.lax.top_k(preferred, top_k)
    weights = jnp.take_along_axis(scores, experts, 1)
    if normalize and top_k == 1:  # so written, the two terms of its gradient do not cancel
        weights = 1 - sum_floor / (weights + sum_floor)
    elif normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + sum_floor)
    return weights * scaling, experts


def check_groups(count: int, top_k: int, groups: int, best_groups: int):
    """Raise ValueError, which names the argument, unless `groups` equal groups divide the `count` experts, and `best_groups` of
    these groups hold at least top_k experts. If there is more than one group, each must have at least 2 experts."""
    if count % groups or (groups > 1 and count // groups < 2):
        raise ValueError(
            f"groups must be a divisor of count={count} that leaves at least 2 experts in a group, got {groups}"
        )
    if best_groups > groups:
        raise ValueError(f"best_groups must be at most groups={groups}, got {best_groups}")
    if top_k > best_groups * (count // groups):
        raise ValueError(
            f"top_k must be at most the {best_groups * (count // groups)} experts of best_groups, got {top_k}"
        )


class Experts(nnx.Module):
    """Compute y = sum over chosen experts e of p_e W_down,e (act(W_gate,e x) * W_up,e x), or without a gate of
    p_e W_down,e act(W_up,e x).

    Tokens are sorted by expert, so that each expert multiplies only its own tokens.

    width, inside, count: D, the width of x and y; I, the width of W_gate x; and E, the number of experts.
    form:  "split": the parameters `gate` and `up` [E, D, I] apart. "fused": both in `input` [E, D, 2 I], the gate first.
           "plain": `up` alone, without a gate. W_down is `down` [E, I, D] in every form.
    act:   the name of a function in `glax.nn.parts.ACTIVATIONS`. limit, situ: as in `SwiGLU`, for forms with a gate.
    param_dtype, kernel_init: the dtype and the first values of the parameters, as in `glax.nn.linear_attention.MixerOptions`.
    dtype: of the products and of y; the dtype of x if None.

    experts(x [M, D], (p [M, k], e [M, k])) returns y [M, D]: e are the numbers of each token's k experts, from
    0 to E - 1, and p their weights, of any float dtype. Raises TypeError or ValueError, which names the argument.

    The attribute `rows` is the `jax.sharding.NamedSharding` of x [M, D]; None in a new module. The caller sets it, as
    `glax.models` does in training on a mesh. Each device then sorts its own rows and gathers the parameters. If it is None, the
    compiler gathers the rows.

    Shazeer et al. 2017, https://arxiv.org/abs/1701.06538.

    >>> experts = nn.Experts(64, 128, count=4, rngs=nnx.Rngs(0))
    >>> experts(jnp.ones((16, 64)), (jnp.ones((16, 1)), jnp.zeros((16, 1), jnp.int32))).shape
    (16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        inside: int,
        count: int,
        *,
        form: str = "split",
        act: str = "silu",
        limit: float | None = None,
        situ: Situ | None = None,
        dtype=None,
        param_dtype=jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        activation("act", act)
        for name, value in (("limit", limit), ("situ", situ)):
            if value is not None and form == "plain":
                raise ValueError(f"{name} must be None with form='plain', which has no gate, got {value}")
        self.width, self.form, self.act, self.count, self.dtype, self.limit = width, form, act, count, dtype, limit
        self.situ = checked_situ(situ, limit, "act", act)
        self.rows: NamedSharding | None = None
        init = normal(0.02) if kernel_init is None else kernel_init

        def stack(inputs: int, outputs: int, *axes) -> nnx.Param:
            return parameter(init(rngs.params(), (count, inputs, outputs), param_dtype), EXPERTS, *axes)

        match form:
            case "split":
                self.gate, self.up = (stack(width, inside, EMBED, MLP) for _ in range(2))
            case "fused":
                self.input = stack(width, 2 * inside, EMBED, MLP)
            case "plain":
                self.up = stack(width, inside, EMBED, MLP)
            case _:
                raise ValueError(f"form must be 'split', 'fused' or 'plain', got {form!r}")
        self.down = stack(inside, width, MLP, EMBED)

    def __call__(self, x: Float[Array, "M D"], chosen: Chosen) -> Float[Array, "M D"]:
        """Return y [M, D], the weighted sum of the outputs of the experts that each token chose.

        chosen: (the weights [M, k], the numbers of the experts [M, k]) of each token.
        """
        weights, experts = chosen
        check_floats("x", x, self.width)
        check_floats("weights", weights)
        check_integers("experts", experts)
        for name, y in (("weights", weights), ("experts", experts)):
            if y.ndim != 2 or y.shape != (x.shape[0], experts.shape[-1]):
                raise ValueError(f"{name} must be [M, k] with M={x.shape[0]} as x has rows, got shape {y.shape}")
        x = x if self.dtype is None else x.astype(self.dtype)
        kernels = {
            name: param[...].astype(x.dtype) for name, param in vars(self).items() if isinstance(param, nnx.Param)
        }
        return self.on_rows(self.sum_over_experts, (x, weights, to_int32(experts)), kernels)

    def on_rows(self, f: Callable, arrays: tuple, *parameters: Any) -> Any:
        """Return f(*arrays, *parameters). If `rows` is a sharding, each device calls f with its own rows of the arrays and the
        whole parameters, and holds its own rows of the result.

        arrays: arrays with M rows. f: a function whose result has M rows too. Row i of the result must depend on no other row
        of the arrays than row i.
        """
        if self.rows is None:
            return f(*arrays, *parameters)
        spec = self.rows.spec
        specs = (*[spec] * len(arrays), *[PartitionSpec()] * len(parameters))
        names = set(flat_axes(spec[0]))
        options: dict[str, Any] = dict(in_specs=specs, out_specs=spec, axis_names=names, check_vma=False)
        return jax.shard_map(f, mesh=self.rows.mesh, **options)(*arrays, *parameters)

    def sum_over_experts(
        self,
        x: Float[Array, "M D"],
        weights: Float[Array, "M k"],
        experts: Int[Array, "M k"],
        kernels: Mapping[str, Float[Array, "E inputs outputs"]],
    ) -> Float[Array, "M D"]:
        """Return y_t = sum_i weights_ti expert_i(x_t) [M, D], over the k experts of each token.

        weights, experts: the weights and the numbers, below E, of each token's k experts. kernels: the parameters by name, in
        the dtype of x.
        """
        k = experts.shape[1]
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=self.count)
        y = self.through(kernels, x[order // k], sizes)
        y = y * weights.reshape(-1)[order][:, None].astype(y.dtype)
        # The inverse of a permutation, so that each token sums its experts in one order.
        back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
        return y[back].reshape(*experts.shape, self.width).sum(1)

    def through(
        self, kernels: Mapping[str, Array], x: Float[Array, "Mk D"], sizes: Int[Array, "E"]
    ) -> Float[Array, "Mk D"]:
        """Return the output [M k, D] of each row's expert.

        kernels: the parameters by name, in the dtype of x: "gate", "up" and "down" with form="split", "input" and "down" with
        form="fused", "up" and "down" with form="plain". x: a row for each token and each of its k experts, sorted by expert.
        sizes: the number of rows of each expert, whose sum is M k.
        """
        act = activation("act", self.act)

        def product(x, name):
            return grouped_product(x, kernels[name], sizes)

        if self.form == "plain":
            return product(act(product(x, "up")), "down")
        if self.form == "fused":
            gate, up = jnp.split(product(x, "input"), 2, axis=-1)
        else:
            gate, up = product(x, "gate"), product(x, "up")
        return product(gated_product(gate, up, act, self.limit, self.situ), "down")


class SparseMLP(nnx.Module):
    """Add the outputs of experts, which a router chooses, and of an MLP that every token reads, if there is one:

        y = sum over e in the top_k of x of p_e expert_e(x) + shared(x)
        y = W_out RMSNorm(sum over e of p_e expert_e(W_in x)) + shared(x)    with latent_width

    width:   D, the width of x and y. inside, count: I and E of `Experts`. top_k: how many experts a token has.
    form, act, limit, situ: as in `Experts`.
    latent_width: the width of W_in x and of the experts; None for experts of width D, without W_in and W_out.
    latent_norm_eps: the epsilon of the RMSNorm; None for no norm. latent_bias: whether W_in and W_out have a bias.
    shared:  a module from x [..., D] to rows of the same shape; none if None.
    routing: "softmax" or "sigmoid", the function of the logits x @ router; router [D, E] is a parameter.
    normalize: whether p_e is normalised over the top_k experts.
        With "softmax" p_e is the softmax over the top_k if True, and over all experts if False.
        With "sigmoid" p_e is scaling * sigmoid(logit_e) / (sum_floor + the sum of sigmoid(logit) over the top_k) if True, and
        scaling * sigmoid(logit_e) if False.
    corrected: whether the parameter `correction` [E], which starts as 0, is added to sigmoid(logits) where experts are chosen.
    groups, best_groups: into how many equal groups experts are divided, and in how many of these a token's top_k lie: those
        whose two greatest of sigmoid(logits) + correction have the greatest sum.

    sum_floor, scaling, corrected, groups and best_groups are for "sigmoid" alone. dtype, param_dtype and kernel_init are as in
    `Experts`. mlp(x [..., D]) returns y [..., D]; the router reads x before it is converted to `dtype`. Raises
    TypeError or ValueError, which names the argument. Liu et al. 2024, https://arxiv.org/abs/2412.19437.

    >>> mlp = nn.SparseMLP(64, 128, count=4, top_k=2, rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((16, 64))).shape
    (16, 64)
    """

    @checked
    def __init__(
        self,
        width: int,
        inside: int,
        count: int,
        top_k: int,
        *,
        form: str = "split",
        act: str = "silu",
        shared: Any = None,
        normalize: bool = True,
        routing: str = "softmax",
        groups: int = 1,
        best_groups: int = 1,
        scaling: float = 1.0,
        corrected: bool = True,
        sum_floor: float = 1e-20,
        limit: float | None = None,
        situ: Situ | None = None,
        latent_width: int | None = None,
        latent_norm_eps: float | None = None,
        latent_bias: bool = False,
        dtype=None,
        param_dtype=jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        if top_k > count:
            raise ValueError(f"top_k must be at most count={count}, got {top_k}")
        if routing not in ("softmax", "sigmoid"):
            raise ValueError(f"routing must be 'softmax' or 'sigmoid', got {routing!r}")
        if routing == "sigmoid":
            check_groups(count, top_k, groups, best_groups)
        own = dict(groups=(groups, 1), best_groups=(best_groups, 1), scaling=(scaling, 1), corrected=(corrected, True))
        for name, (value, usual) in (own | dict(sum_floor=(sum_floor, 1e-20))).items():
            if routing == "softmax" and value != usual:
                raise ValueError(f"{name} must be {usual}, or come with routing='sigmoid', got {value}")
        self.top_k, self.shared, self.normalize, self.routing = top_k, shared, normalize, routing
        self.groups, self.best_groups, self.scaling, self.sum_floor = groups, best_groups, scaling, sum_floor
        init = normal(0.02) if kernel_init is None else kernel_init
        self.router = parameter(init(rngs.params(), (width, count), param_dtype), EMBED, None)
        has_correction = routing == "sigmoid" and corrected
        self.correction = parameter(jnp.zeros(count, param_dtype), None) if has_correction else None
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
        if latent_width is None and latent_norm_eps is not None:
            raise ValueError(f"latent_norm_eps must be None without latent_width, got {latent_norm_eps}")
        if latent_width is None and latent_bias:
            raise ValueError("latent_bias must be False without latent_width, got True")
        self.width, eps = width, latent_norm_eps
        inner = width if latent_width is None else latent_width
        ends: dict[str, Any] = options | dict(bias=latent_bias)
        self.experts = Experts(inner, inside, count, form=form, act=act, limit=limit, situ=situ, **options)
        self.into = None if latent_width is None else linear(width, inner, (EMBED, None), **ends)
        self.out_norm = None if eps is None else RMSNorm(inner, epsilon=eps, param_dtype=param_dtype)
        self.out_of = None if latent_width is None else linear(inner, width, (None, EMBED), **ends)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Return y, the weighted sum of the chosen experts' outputs and the shared MLP's output, [..., D], for x [..., D]."""
        check_floats("x", x, self.width)
        flat = x.reshape(-1, x.shape[-1])
        y = self.experts(flat if self.into is None else self.into(flat), self.chosen(flat))
        y = y if self.out_norm is None else self.out_norm(y)
        y = (y if self.out_of is None else self.out_of(y)).reshape(x.shape)
        return y if self.shared is None else y + self.shared(x)

    def chosen(self, x: Float[Array, "M D"]) -> Chosen:
        """Return (the weights, the numbers of the experts) of each row of x, [M, top_k] each."""
        if self.routing == "softmax":
            route = functools.partial(softmax_router, top_k=self.top_k, normalize=self.normalize)
            return self.experts.on_rows(route, (x,), self.router[...])
        correction = None if self.correction is None else self.correction[...]
        groups: dict[str, int] = dict(groups=self.groups, best_groups=self.best_groups)
        more: dict[str, Any] = dict(normalize=self.normalize, scaling=self.scaling, sum_floor=self.sum_floor, **groups)
        route = functools.partial(sigmoid_router, top_k=self.top_k, **more)
        return self.experts.on_rows(route, (x,), self.router[...], correction)
