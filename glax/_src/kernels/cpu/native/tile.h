// The innermost multiplication of a scan (scan.h): some tokens with a tile of the state, in registers.

constexpr int64_t DEPTH = 256;          // rows of the state in one pass of the tile multiplication
constexpr int64_t STRIDE = DEPTH + 16;  // floats between tokens of a and b in scratch: a constant, and no multiple of a page

// The state that y_i reads: S_i (after), S_i without its own a_i x_i^T (before), or none where only the final state is needed.
enum class Sums { after, before, none };

// Multiplies COUNT tokens with `depth` rows of WIDTH vectors of columns, in registers: two multiply-adds for each element and token.
// The state is read and written once for all tokens. Several rows run between two branches for the prefetcher: a branch at every row
// slows the loop (experiments/cpu.md).
//   state: [depth, WIDTH vectors]   a, b: [COUNT, STRIDE]   x: [COUNT, TILE]   y: [COUNT, across]
template <int COUNT, int WIDTH, Sums SUMS, int SCALED>
inline void multiply_tile(float* state, int64_t depth, const float* a, const float* b, const float* x, float* y, int64_t across,
                 bool more, const float* row_entry, int64_t row_step, const float* column_entry, Prefetcher& prefetcher) {
  vec sums[COUNT][WIDTH];
#pragma GCC unroll 8
  for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 2
    for (int w = 0; w < WIDTH; ++w) sums[t][w] = more ? load(y + t * across + w * LANES) : vec{};
  vec added[COUNT][WIDTH];
#pragma GCC unroll 8
  for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 2
    for (int w = 0; w < WIDTH; ++w) added[t][w] = load(x + t * TILE + w * LANES);

  const auto row = [&](int64_t r) __attribute__((always_inline)) {
    vec s[WIDTH];
#pragma GCC unroll 2
    for (int w = 0; w < WIDTH; ++w) {
      s[w] = load(state + (r * WIDTH + w) * LANES);
      if (SCALED >= 1) s[w] *= broadcast(row_entry[r * row_step]);
      if (SCALED >= 2) s[w] *= load(column_entry + w * LANES);
    }
#pragma GCC unroll 8
    for (int t = 0; t < COUNT; ++t) {
      const vec in = broadcast(a[t * STRIDE + r]), out = broadcast(b[t * STRIDE + r]);
#pragma GCC unroll 2
      for (int w = 0; w < WIDTH; ++w) {
        if (SUMS == Sums::before) sums[t][w] += out * s[w];
        s[w] += in * added[t][w];
        if (SUMS == Sums::after) sums[t][w] += out * s[w];
      }
    }
#pragma GCC unroll 2
    for (int w = 0; w < WIDTH; ++w) store(state + (r * WIDTH + w) * LANES, s[w]);
  };
  int64_t r = 0;
  for (; r + Prefetcher::rows <= depth; r += Prefetcher::rows) {
    prefetcher.fetch();
#pragma GCC unroll 4
    for (int64_t i = 0; i < Prefetcher::rows; ++i) row(r + i);
  }
  for (; r < depth; ++r) row(r);

#pragma GCC unroll 8
  for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 2
    for (int w = 0; w < WIDTH; ++w) store(y + t * across + w * LANES, sums[t][w]);
}
