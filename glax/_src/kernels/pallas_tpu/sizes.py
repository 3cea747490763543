"""Compute the sizes of a step's blocks. This module does not load Pallas, so that a kernel can refuse a call without it."""

LANES = 128
VMEM_BYTES = 8 * 2**20  # for the blocks of a step, of 16 MiB; the rest is for intermediate values
POOL_BYTES = 12 * 2**20  # for the blocks of a step on a pool of states, whose intermediate values are small
SMEM_BYTES = 2**19  # for the table of steps, of 1 MiB


def unit_bytes(chunk: int, K: int, V: int, itemsize: int, erases: bool, gradient: bool) -> int:
    """Return the bytes of VMEM that a unit takes. chunk: the tokens of a chunk. K, V: the unit's padded widths, of both heads
    if it has two. itemsize: the bytes of one number of q. erases: whether the call has an erasure. gradient: whether the kernel
    is the gradient.

    The gradient has nine blocks of rows and three of states, each with two buffers, and the state itself. With an erasure it
    has eight more blocks of rows: erase, write and their gradients, and four for inverses and intermediate values. The forward
    is counted as the gradient if nothing is erased. Otherwise it has eleven blocks of rows, four of them for intermediate
    values, and two of states.
    """
    keys, values, states = 6, 3, 7
    if erases:
        keys, values, states = (10, 7, 7) if gradient else (6, 5, 5)
    return 2 * chunk * (keys * K + values * V) * itemsize + states * K * V * 4


def packing(heads: tuple[int, int, int], K: int, V: int) -> tuple[int, int, int]:
    """Return (heads of a unit, padded K, padded V). Two heads of 64 lanes fill a tile; others are padded to whole tiles. heads:
    the numbers of heads of q, k and v."""

    def padded(lanes: int) -> tuple[int, int]:
        return -(-K // lanes) * lanes, -(-V // lanes) * lanes

    half, whole = padded(LANES // 2), padded(LANES)
    paired = half != whole and len(set(heads)) == 1 and heads[0] % 2 == 0
    return (2, *half) if paired else (1, *whole)


def pool_block(H: int, K: int, V: int, T: int, by_key: int, by_value: int) -> tuple[int, int] | None:
    """Return (heads, columns of their states) of a program on a pool of states; None if nothing fits.

    H, K, V: the heads and the shape of a state. T: the tokens of a sequence. by_key, by_value: how many arrays of width K, and
    of width V with the output, a token has. Every block has two buffers, and the state's has two for each of its copies, in and
    out. States between several tokens have one buffer more. All are counted in float32. Fewer heads than eight take as many
    rows of tokens as eight.
    """
    rows, keys, buffers = -(-K // 8) * 8, -(-K // LANES), 4 + (T > 1)
    for heads in (n for n in range(min(H, 8), 0, -1) if H % n == 0):
        for columns in (V, *range(V - V % LANES, 0, -LANES)):
            values = -(-columns // LANES)
            tokens = 2 * T * 8 * (by_key * keys + by_value * values)
            if V % columns == 0 and (buffers * heads * rows * values + tokens) * LANES * 4 <= POOL_BYTES:
                return heads, columns
    return None
