"""Provide what every Hopper kernel uses: the launch, its pipeline, tiles in shared memory, and the cache of lowered kernels."""
