"""Store the state at every chunk, then write the outputs of all chunks in parallel: the forward of wide heads.

A scan that holds all K rows of the state has few columns and few warps on a multiprocessor. Without key gates it also repeats the
products of queries and keys for every 32 columns. Here a program of the scan has a block of K as well, no scan multiplies
queries, and their products with keys are repeated for every 128 columns.

G_i is the sum of the log decays of a chunk through its token i, and S is the state where the chunk begins:

    o_i = (q_i e^{G_i})^T S + sum_{j <= i} (sum_k q_ik k_jk e^{G_ik - G_jk}) v_j
"""

from glax._src.kernels.triton.launch import tl, triton
from glax._src.kernels.triton.state_kernels import carry_state
from glax._src.kernels.triton.tiles import (
    at,
    dot,
    exp,
    load_head_sums,
    load_state,
    load_tile,
    runtime_bound,
    store_tile,
)


@triton.jit
def entering_states(
    k, v, g, scale, start, table, out, final,
    H: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr, START: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute S where each chunk begins, out [chunks, H, K, V], and at the end of every sequence, final [N, H, K, V]."""
    carry_state(
        tl.program_id(0), k, v, g, scale, start, table, out, final, final,
        H, HK, HV, K, V, C, BK, BV, FORM, SIGN, False, True, True, START, DTYPE, PRECISION,
    )  # fmt: skip


@triton.jit
def chunk_outputs(
    q, k, v, g, scores, scale, states, table, o,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FORM: tl.constexpr, SIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BV columns of a chunk's outputs, o [rows, H, V], from the states [chunks, H, K, V].

    Each iteration takes BK channels. g: the cumulative sums G of head gates. With key gates, q and scores are `q_scaled` and
    `scores` of `scale_operands`, and k and g are not read. The programs of one chunk and head are neighbours, which read the
    same queries and keys.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    block, h, e = tl.program_id(0) % NV, tl.program_id(0) // NV % H, tl.program_id(0) // (NV * H)
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    cv, tokens = block * BV + tl.arange(0, BV), tl.arange(0, C)
    i, j = tokens[:, None], tokens[None, :]
    factor = tl.load(scale + n).to(tl.float32)
    limit = tl.where(count > 0, V, 0)  # padding has no state
    # [C, BV]
    out = tl.zeros([C, BV], tl.float32)
    # [C, C]
    A = tl.zeros([C, C], tl.float32)
    for k0 in range(0, runtime_bound(K, count), BK):
        ck = k0 + tl.arange(0, BK)
        # [C, BK]
        tq = load_tile(at(q, origin, h // (H // HQ), HQ, K), tokens, ck, count, HQ, K, SIGN)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, H, K, V)
        out += dot(tq, S, DTYPE, PRECISION)
        if FORM != "key":
            tk = load_tile(at(k, origin, h // (H // HK), HK, K), tokens, ck, count, HK, K, SIGN)
            A += dot(tq, tl.trans(tk), DTYPE, PRECISION)
    if FORM == "key":
        A = load_tile(scores + (e.to(tl.int64) * H + h) * C * C, tokens, tokens, count, 1, C, 1)
    elif FORM == "none":
        A = tl.where(i >= j, A, 0.0)
    else:
        G = load_head_sums(g, origin, h, n, tokens, count, H, FORM, SIGN)
        A = A * exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
        out = out * exp(G)[:, None]
    tv = load_tile(at(v, origin, h // (H // HV), HV, V), tokens, cv, count, HV, V, SIGN)
    out = tl.dot(A.to(DTYPE), tv.to(DTYPE), out, input_precision=PRECISION) * factor
    store_tile(at(o, origin, h, H, V), out, tokens, cv, length, H, V, SIGN)
