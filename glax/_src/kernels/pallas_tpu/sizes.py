"""How large the blocks of a step are. Apart from `plan`, so that a kernel can refuse a call without loading Pallas."""

LANES = 128
VMEM_BYTES = 8 * 2**20  # what the blocks of a step may take, of 16 MiB; the rest is for values between
SMEM_BYTES = 2**19  # of 1 MiB, for the table of steps


def unit_bytes(chunk: int, K: int, V: int, itemsize: int) -> int:
    """VMEM of a unit of the gradient, the larger kernel: nine blocks of rows and three of states in two buffers, and a state."""
    return 2 * chunk * (6 * K + 3 * V) * itemsize + 7 * K * V * 4


def packing(heads: tuple[int, int, int], K: int, V: int) -> tuple[int, int, int]:
    """(heads a unit, padded K, padded V): two heads of 64 lanes fill a tile; other widths fill whole tiles alone."""
    half, whole = (tuple(-(-width // lanes) * lanes for width in (K, V)) for lanes in (LANES // 2, LANES))
    paired = half != whole and len(set(heads)) == 1 and heads[0] % 2 == 0
    return (2, *half) if paired else (1, *whole)
