"""What every kernel here stands on: the launch, its pipeline, tiles in shared memory, and the cache of lowered kernels."""
