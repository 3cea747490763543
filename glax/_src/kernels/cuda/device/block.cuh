// How the threads of a block share a head's state, for scan.cu and replay.cu: LANES threads have a row, each of them VECTOR
// neighbouring columns, and LINES rows are read at a time, so that a thread holds ROWS rows.

constexpr bool ERASES = BETA >= 0 || ERASE >= 0;
constexpr int COLUMNS = LANES * VECTOR;
constexpr int BLOCKS = (V + COLUMNS - 1) / COLUMNS;
constexpr int LINES = THREADS / LANES;
constexpr int ROWS = (K + LINES - 1) / LINES;
constexpr int WARPS = (THREADS + 31) / 32;
constexpr bool BY_ROW = KEY >= 0;
constexpr bool BY_HEAD = KEY < 0 && (HEAD >= 0 || CONSTANT >= 0);

template <int DTYPE>
__device__ inline float gate(const void* x, long long i) {
  return DTYPE < 0 ? 0.0f : load<DTYPE < 0 ? 0 : DTYPE>(x, i);
}

// The sum of `x` over the rows of a warp goes to `sums`. WIDTH is COLUMNS where anything is summed.
template <int WIDTH>
__device__ inline void sum_over_rows(float (&x)[VECTOR], float (&sums)[WARPS][WIDTH]) {
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) {
#pragma unroll
    for (int across = LANES; across < 32; across *= 2) x[c] += __shfl_xor_sync(0xffffffffu, x[c], across);
    if (threadIdx.x % 32 < LANES) sums[threadIdx.x / 32][threadIdx.x % LANES * VECTOR + c] = x[c];
  }
}
