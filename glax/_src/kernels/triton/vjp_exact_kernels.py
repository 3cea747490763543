"""The gradient of chunks whose key gates are too strong for the fast form of `gradient`, in a kernel of its own.

The same formulas; pairs are formed in log2(C) products, each with a reference between its tokens, so that no exponent is
positive. In one kernel with the fast form it would take registers from it and treble the time to compile. dv needs none of this.
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.tiles import (
    FAST_LIMIT,
    at,
    dot,
    exact_factors,
    exp,
    half_fine_dot,
    halving,
    kept_loop,
    levels,
    load_key_gates,
    load_state,
    load_tile,
    looked_at,
    store_tile,
    sums,
)
from glax._src.kernels.triton.vjp_kernels import term_sums


@triton.jit
def exact_gradient(
    q, k, v, g, do, scale, before, behind, table, reach, pairs, dq, dk, dg, dscale,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Over the results of `gradient`, in their memory. A program looks at EACH of the `pairs` of a chunk and a head."""
    count_of_pairs = tl.load(pairs)
    for each in range(0, looked_at(reach, count_of_pairs, EACH)):
        pair = tl.program_id(0) * EACH + each
        if tl.load(reach + pair, mask=pair < count_of_pairs, other=0.0) > FAST_LIMIT:
            h, e = pair % H, pair // H
            entry = table + e * 6
            origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
            factor = tl.load(scale + n).to(tl.float32)
            exact_keys(
                q, k, v, g, do, before, behind, dq, dk, dg, dscale, factor, h, e, origin, length, count,
                H, HQ, HK, HV, K, V, C, BK, BV, SIGN, DTYPE, PRECISION,
            )  # fmt: skip


@triton.jit
def exact_gradient_passed_outputs(
    q, k, v, g, do, scale, before, behind, table, reach, pairs, dq, dk, dg, dscale,
    dq_again, dk_again, dg_again, dscale_again,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """`exact_gradient` for jax-triton 0.3, which hands over what is updated as outputs, too."""
    exact_gradient(
        q, k, v, g, do, scale, before, behind, table, reach, pairs, dq, dk, dg, dscale,
        H, HQ, HK, HV, K, V, C, BK, BV, SIGN, DTYPE, PRECISION, EACH,
    )  # fmt: skip


@triton.jit
def exact_keys(
    q, k, v, g, do, before, behind, dq, dk, dg, dscale, factor, h, e, origin, length, count,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of a chunk."""
    tokens, cv = tl.arange(0, C), tl.arange(0, BV)
    i, j = tokens[:, None], tokens[None, :]
    written = tl.where(count > 0, V, 0)
    # [C, BV]
    tv = load_tile(at(v, origin, h // (H // HV), HV, V), tokens, cv, count, HV, V, SIGN)
    tdo = load_tile(at(do, origin, h, H, V), tokens, cv, count, H, V, SIGN)
    d_own = tl.sum(tdo.to(tl.float32) * tv.to(tl.float32), 1)
    dP = tl.where(i > j, dot(tdo, tl.trans(tv), DTYPE, PRECISION), 0.0).to(DTYPE)
    d_scale = tl.zeros([C], tl.float32)
    for k0 in range(0, kept_loop(K, length), BK):
        ck = k0 + tl.arange(0, BK)
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
        gates = load_key_gates(g, origin, h, tokens, ck, count, H, K, SIGN)
        S = load_state(before, e, h, ck, cv, written, H, K, V)
        dS = load_state(behind, e, h, ck, cv, written, H, K, V)
        pull = tl.zeros([C, BK], tl.float32)
        push = tl.zeros([C, BK], tl.float32)
        pairs = tl.zeros([C, BK], tl.float32)
        for level in range(0, kept_loop(levels(C), length)):
            mask, matrix = halving(tokens, (C // 2) >> level)
            way = exp(sums(matrix, gates))
            pulled = tl.where(mask, dP, 0.0)
            x, y = tq * way, tk * way
            level_pull = half_fine_dot(pulled, y, DTYPE, PRECISION)
            level_push = half_fine_dot(tl.trans(pulled), x, DTYPE, PRECISION)
            pairs += x * level_pull - y * level_push
            pull += level_pull * way
            push += level_push * way
        up, down, last = exact_factors(gates, tokens)
        edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1) * last
        read = dot(tdo, tl.trans(S), DTYPE, PRECISION) * up
        fed = dot(tv, tl.trans(dS), DTYPE, PRECISION) * down
        from_behind = (tq * read + pairs) * factor
        tdg = term_sums(tl.where(j >= i, 1.0, 0.0), from_behind, tdo.dtype == tl.bfloat16)
        tdg += dot(tl.where(j < i, 1.0, 0.0), tk * fed, DTYPE, PRECISION) + edge[None, :]
        store_tile(at(dg, origin, h, H, K), tdg, tokens, ck, length, H, K, SIGN)
        read += pull + d_own[:, None] * tk
        d_scale += tl.sum(tq * read, 1)
        store_tile(at(dq, origin, h, H, K), read * factor, tokens, ck, length, H, K, SIGN)
        fed += (push + d_own[:, None] * tq) * factor
        store_tile(at(dk, origin, h, H, K), fed, tokens, ck, length, H, K, SIGN)
    tl.store(dscale + e.to(tl.int64) * H + h, tl.sum(d_scale, 0))
