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
    load_pairs,
    load_state,
    load_tokens,
    place_of,
    runtime_bound,
    store_tile,
)


@triton.jit
def entering_states(k, v, g, scale, start, table, out, final, D: tl.constexpr):
    """Compute S where each chunk begins, out [chunks, H, K, V], and at the end of every sequence, final [N, H, K, V]."""
    carry_state(
        tl.program_id(0), k, v, g, scale, start, table, out, final, final, D, D.HK, D.HV, False, True, True, D.START,
    )  # fmt: skip


@triton.jit
def chunk_outputs(q, k, v, g, scores, scale, states, table, o, D: tl.constexpr):
    """Compute BV columns of a chunk's outputs, o [rows, H, V], from the states [chunks, H, K, V].

    Each iteration takes BK channels. g: the cumulative sums G of head gates. With key gates, q and scores are `q_scaled` and
    `scores` of `scale_operands`, and k and g are not read. The programs of one chunk and head are neighbours, which read the
    same queries and keys.
    """
    block, h, e = place_of(tl.program_id(0), D.NV, D)
    entry = table + e * 6
    origin, length, count, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    cv, tokens = block * D.BV + tl.arange(0, D.BV), tl.arange(0, D.C)
    i, j = tokens[:, None], tokens[None, :]
    factor = tl.load(scale + n).to(tl.float32)
    limit = tl.where(count > 0, D.V, 0)  # padding has no state
    # [C, BV]
    out = tl.zeros([D.C, D.BV], tl.float32)
    # [C, C]
    A = tl.zeros([D.C, D.C], tl.float32)
    for k0 in range(0, runtime_bound(D.K, count), D.BK):
        ck = k0 + tl.arange(0, D.BK)
        # [C, BK]
        tq = load_tokens(q, origin, h, D.HQ, D.K, tokens, ck, count, D)
        # [BK, BV]
        S = load_state(states, e, h, ck, cv, limit, D.H, D.K, D.V)
        out += dot(tq, S, D)
        if D.FORM != "key":
            tk = load_tokens(k, origin, h, D.HK, D.K, tokens, ck, count, D)
            A += dot(tq, tl.trans(tk), D)
    if D.FORM == "key":
        A = load_pairs(scores, e.to(tl.int64) * D.H + h, tokens, count, D)
    elif D.FORM == "none":
        A = tl.where(i >= j, A, 0.0)
    else:
        G = load_head_sums(g, origin, h, n, tokens, count, D)
        A = A * exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
        out = out * exp(G)[:, None]
    tv = load_tokens(v, origin, h, D.HV, D.V, tokens, cv, count, D)
    out = tl.dot(A.to(D.DTYPE), tv.to(D.DTYPE), out, input_precision=D.PRECISION) * factor
    store_tile(at(o, origin, h, D.H, D.V), out, tokens, cv, length, D.H, D.V, D.SIGN)
