"""Compute the sizes of a step's blocks. This module does not load Pallas, so that a kernel can refuse a call without it."""

LANES = 128
VMEM_BYTES = 8 * 2**20  # for the blocks of a step, of 16 MiB; the rest is for intermediate values
SMEM_BYTES = 2**19  # for the table of steps, of 1 MiB


def unit_bytes(chunk: int, K: int, V: int, itemsize: int) -> int:
    """Return the VMEM bytes of a unit of the gradient, which is the larger kernel.

    It has nine blocks of rows and three of states, each with two buffers, and the state itself.
    """
    return 2 * chunk * (6 * K + 3 * V) * itemsize + 7 * K * V * 4


def packing(heads: tuple[int, int, int], K: int, V: int) -> tuple[int, int, int]:
    """Return (heads of a unit, padded K, padded V). Two heads of 64 lanes fill a tile; others are padded to whole tiles."""

    def padded(lanes: int) -> tuple[int, int]:
        return -(-K // lanes) * lanes, -(-V // lanes) * lanes

    half, whole = padded(LANES // 2), padded(LANES)
    paired = half != whole and len(set(heads)) == 1 and heads[0] % 2 == 0
    return (2, *half) if paired else (1, *whole)
