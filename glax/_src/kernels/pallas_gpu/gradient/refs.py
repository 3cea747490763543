"""Define the references of one program of the chunk-wise gradient, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glax._src.kernels.pallas_gpu.gradient.tiles import ScanOrder

Ref = Any


@dataclass(frozen=True)
class GradientRefs:
    """Hold the references of one program. A field that ends in _g is in global memory; the others are in shared memory.

    A reference that a kernel does not have is None. D is the width of keys and values. A tile of tokens is [64, D], or
    [D / 64, 64, 64] for per-key gates. `teams` counts the chunks in work; two slots belong to each.
    """

    scan: ScanOrder

    # Operands.
    q_g: Ref = None  # [B, T, HQ, D]
    k_g: Ref = None  # [B, T, HK, D]
    v_g: Ref = None  # [B, T, HV, D]
    g_g: Ref = None  # [B, T, heads, D]: log gates, or the first of their two terms
    g_rest_g: Ref = None  # [B, T, heads, D]: the second term
    gates_g: Ref = None  # [B, chunks, heads, 64]: sums of log2 per-head gates within a chunk
    do_g: Ref = None  # [B, T, heads, D]: the gradient of the output
    scale_g: Ref = None  # [B], or [chunks] if packed
    before_g: Ref = None  # [B, runs, H, D, D]: the state before a run of chunks
    behind_g: Ref = None  # [B, chunks, H, D, D]: the gradient of the state behind a chunk
    tokens_g: Ref = None  # [64]: `vjp_tiles.tokens`
    marks_g: Ref = None  # [B, chunks, 64]: `vjp_tiles.marks`, of rows with resets
    places_g: Ref = None  # [chunks, 3]: the rows of each chunk, if packed; see `gradient_key`
    out_of_range_g: Ref = None  # [B, chunks, H]: whether the exact kernel computes a chunk
    any_out_of_range_g: Ref = None  # [programs]: whether any chunk of a program is out of range
    edges_g: Ref = None  # [chunks]: `rows.Edges.block`, if some chunks are read from copies; then the copies:
    q_edges_g: Ref = None  # [B, 192, HQ, D]
    k_edges_g: Ref = None  # [B, 192, HK, D]
    v_edges_g: Ref = None  # [B, 192, HV, D]
    do_edges_g: Ref = None  # [B, 192, heads, D]

    # Results.
    dq_g: Ref = None  # [B, T, H, D]
    dk_g: Ref = None  # [B, T, H, D]
    dv_g: Ref = None  # [B, T, H, D]
    dg_g: Ref = None  # [B, T, H, D]
    used_g: Ref = None  # q dq by token
    sums_g: Ref = None  # [B, chunks, H, 3, 2, 64]: what dg sums over tokens, in two terms

    # Tiles of tokens and of states.
    q: Ref = None
    k: Ref = None
    v: Ref = None
    g: Ref = None
    g_rest: Ref = None
    do: Ref = None
    S: Ref = None  # [teams, D, D]: the state before the chunk
    dS: Ref = None  # [teams, D, D]: the gradient of the state behind the chunk
    gates: Ref = None  # [2 teams, 64] float32
    A_T: Ref = None  # [teams, 64, 64]: scores of q and k, transposed
    dA_T: Ref = None  # [teams, 64, 64]: scores of do and v, transposed
    leaving: Ref = None  # [2, 64, 64]: k decayed to the end of the chunk
    vectors: Ref = None  # sums by token that warpgroups exchange
    order: Ref = None  # [2, 64]: each warpgroup's copy of `tokens_g`
    marks: Ref = (
        None  # [2 teams, 64] int32, or [64] in the exact kernel: the chunk's part of `marks_g`, in place of `order`
    )
    drawn: Ref = None  # [64, 64] float32: q dq / scale of every token, in the exact kernel

    # Barriers, each named by what it reports.
    full: Ref = None  # all tiles of the exact kernel are loaded
    tokens_full: Ref = None  # the tiles of a slot are loaded
    values_full: Ref = None  # v and do are loaded
    before_full: Ref = None  # S is loaded
    behind_full: Ref = None  # dS is loaded
    gates_read: Ref = None  # the second term of the gates is consumed
    states_free: Ref = None  # S and dS are consumed
    ready: Ref = None  # results are in shared memory
    sent: Ref = None  # results have left shared memory
    met: Ref = None  # all warpgroups of a chunk have arrived

    @property
    def in_global(self) -> Mapping[str, Ref]:
        """Return the operands and results that are read or written by tiles, by the name of the tile."""
        operands = dict(q=self.q_g, k=self.k_g, v=self.v_g, g=self.g_g, g_rest=self.g_rest_g, do=self.do_g)
        return operands | dict(dq=self.dq_g, dk=self.dk_g, dv=self.dv_g, dg=self.dg_g)

    @property
    def edge_copies(self) -> Mapping[str, Ref]:
        """Return the copies of operands that edges are read from, by the name of the tile."""
        return dict(q=self.q_edges_g, k=self.k_edges_g, v=self.v_edges_g, do=self.do_edges_g)

    @property
    def tiles(self) -> Mapping[str, Ref]:
        """Return the tiles of tokens in shared memory, by name."""
        return dict(q=self.q, k=self.k, v=self.v, g=self.g, g_rest=self.g_rest, do=self.do)


@dataclass(frozen=True)
class ChunkRefs:
    """Hold one chunk in work: its indices, its tiles, and of each tile the half that belongs to this warpgroup (_w)."""

    t: Any  # which of the program's chunks in work
    w: Any  # this warpgroup's number among those that share the chunk
    wg: Any  # this warpgroup's number in the program
    b: Any  # sequence
    c: Any  # chunk of the sequence
    h: Any  # head
    j: Any  # chunk of its run, from where the scan enters
    at: Any  # the chunk's slot
    other: Any  # the slot of the next chunk
    mine: Any  # the columns of this warpgroup's half
    scale: Any
    scan: ScanOrder
    vector: Ref  # [64]: this warpgroup's row of `vectors`
    again: Callable[[], "ChunkRefs"]  # forms these references again, so that none stays in registers meanwhile
    q: Ref
    k: Ref
    v: Ref
    do: Ref
    q_w: Ref
    k_w: Ref
    v_w: Ref
    do_w: Ref
    g: Ref = None
    g_w: Ref = None

    @property
    def tiles(self) -> Mapping[str, Ref]:
        """Return the tiles of tokens, by name."""
        return dict(q=self.q, k=self.k, v=self.v, g=self.g, do=self.do)


@dataclass(frozen=True)
class RestRefs:
    """Hold the tiles of what x = q e^M, y = k e^-M and dA lose in bfloat16, [64, 64] each or in halves."""

    x: Ref  # this warpgroup's half
    y: Ref  # this warpgroup's half
    xs: Ref  # both halves
    ys: Ref  # both halves
    dA_T: Ref
