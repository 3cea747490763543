// The matrix products of the delta rule, in register tiles. Each instruction set's file includes this one.
//
// Rows of tokens are padded to whole panels of TILE columns, with zeros. A state [K, V] is stored by panels: element (r, c) is at
// (c / TILE * rows + r) * TILE + c % TILE, where `rows` is K padded to a multiple of 4. A product then reads contiguous memory.

constexpr int64_t paneled(int64_t width) { return (width + TILE - 1) / TILE * TILE; }
constexpr int64_t padded_rows(int64_t rows) { return (rows + 3) / 4 * 4; }
constexpr int MOST_ROWS = LANES >= 16 ? 8 : 4;  // rows of a register tile with two vectors each

// The address of row r, panel c of a matrix: data + r * row + c * panel.
struct Panels {
  float* data;
  int64_t row, panel;

  float* at(int64_t r, int64_t c) const { return data + r * row + c * panel; }
};

// Rows [n, width padded] that lie one behind the other.
inline Panels rows_at(float* data, int64_t stride) { return {data, stride, TILE}; }
inline Panels state_at(float* data, int64_t K) { return {data, TILE, padded_rows(K) * TILE}; }

// y [ROWS, TILE] = x [ROWS, depth] s [depth, TILE].
template <int ROWS>
inline void multiply_panel(const float* x, int64_t stride, const float* s, int64_t s_row, int64_t depth, const Panels& y, int64_t r, int64_t c) {
  vec sums[ROWS][2];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) sums[i][0] = sums[i][1] = vec{};
  for (int64_t d = 0; d < depth; ++d, s += s_row) {
    const vec first = load(s), second = load(s + LANES);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const vec factor = broadcast(x[i * stride + d]);
      sums[i][0] += factor * first, sums[i][1] += factor * second;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) store(y.at(r + i, c), sums[i][0]), store(y.at(r + i, c) + LANES, sums[i][1]);
}

// y [rows, panels] = x [rows, depth] s [depth, panels].
inline void multiply(const float* x, int64_t stride, int64_t rows, const Panels& s, int64_t depth, int64_t panels, const Panels& y) {
  for (int64_t c = 0; c < panels; ++c) {
    int64_t r = 0;
    for (; r + MOST_ROWS <= rows; r += MOST_ROWS) multiply_panel<MOST_ROWS>(x + r * stride, stride, s.at(0, c), s.row, depth, y, r, c);
    if (r + 4 <= rows) multiply_panel<4>(x + r * stride, stride, s.at(0, c), s.row, depth, y, r, c), r += 4;
    for (; r < rows; ++r) multiply_panel<1>(x + r * stride, stride, s.at(0, c), s.row, depth, y, r, c);
  }
}

// S [ROWS, TILE] = whole * S + (rest * S + x^T y) for x [n, ROWS] and y [n, TILE].
template <int ROWS>
inline void add_outer_panel(float* s, const float* whole, const float* rest, const float* x, int64_t stride, const float* y, int64_t y_row,
                            int64_t n) {
  vec sums[ROWS][2];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) {
    const vec factor = broadcast(rest[i]);
    sums[i][0] = factor * load(s + i * TILE), sums[i][1] = factor * load(s + i * TILE + LANES);
  }
  for (int64_t j = 0; j < n; ++j, x += stride, y += y_row) {
    const vec first = load(y), second = load(y + LANES);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const vec factor = broadcast(x[i]);
      sums[i][0] += factor * first, sums[i][1] += factor * second;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) {
    const vec factor = broadcast(whole[i]);
    store(s + i * TILE, factor * load(s + i * TILE) + sums[i][0]);
    store(s + i * TILE + LANES, factor * load(s + i * TILE + LANES) + sums[i][1]);
  }
}

// The state S [rows, panels] = diag(whole) S + (diag(rest) S + x^T y) for x [n, rows] and y [n, panels].
inline void add_outer(const Panels& s, int64_t rows, int64_t panels, const float* whole, const float* rest, const float* x, int64_t stride,
                      const Panels& y, int64_t n) {
  for (int64_t c = 0; c < panels; ++c) {
    int64_t r = 0;
    for (; r + MOST_ROWS <= rows; r += MOST_ROWS)
      add_outer_panel<MOST_ROWS>(s.at(r, c), whole + r, rest + r, x + r, stride, y.at(0, c), y.row, n);
    for (; r + 4 <= rows; r += 4) add_outer_panel<4>(s.at(r, c), whole + r, rest + r, x + r, stride, y.at(0, c), y.row, n);
  }
}

// Lanes 0, 2, 4, ... of x and then of y, added to lanes 1, 3, 5, ...
inline vec sums_of_pairs(vec x, vec y) {
  vec even, odd;
#ifdef __clang__
  for (int i = 0; i < LANES / 2; ++i)
    even[i] = x[2 * i], odd[i] = x[2 * i + 1], even[LANES / 2 + i] = y[2 * i], odd[LANES / 2 + i] = y[2 * i + 1];
#else
  ivec from;
  for (int i = 0; i < LANES; ++i) from[i] = 2 * i;
  even = __builtin_shuffle(x, y, from), odd = __builtin_shuffle(x, y, from + 1);
#endif
  return even + odd;
}

// Lane i is the sum over the lanes of x[i].
inline vec sums_of_each(vec (&x)[LANES]) {
#pragma GCC unroll 4
  for (int n = LANES / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) x[i] = sums_of_pairs(x[2 * i], x[2 * i + 1]);
  return x[0];
}

// z [rows, columns] = x [rows, panels] y [columns, panels]^T. Computes whole tiles: up to 3 rows and columns more, whatever they hold.
inline void dots(const Panels& x, int64_t rows, const Panels& y, int64_t columns, int64_t panels, float* z, int64_t stride) {
  constexpr int ACROSS = LANES / 4;
  for (int64_t r = 0; r < rows; r += 4) {
    for (int64_t k = 0; k < columns; k += ACROSS) {
      vec sums[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) sums[i] = vec{};
      for (int64_t c = 0; c < panels; ++c) {
        const float *from_x = x.at(r, c), *from_y = y.at(k, c);
#pragma GCC unroll 2
        for (int w = 0; w < 2; ++w) {
          vec of_y[ACROSS];
#pragma GCC unroll 4
          for (int i = 0; i < ACROSS; ++i) of_y[i] = load(from_y + i * y.row + w * LANES);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            const vec of_x = load(from_x + i * x.row + w * LANES);
#pragma GCC unroll 4
            for (int j = 0; j < ACROSS; ++j) sums[i * ACROSS + j] += of_x * of_y[j];
          }
        }
      }
      float tile[LANES];
      store(tile, sums_of_each(sums));
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) __builtin_memcpy(z + (r + i) * stride + k, tile + i * ACROSS, ACROSS * 4);
    }
  }
}
