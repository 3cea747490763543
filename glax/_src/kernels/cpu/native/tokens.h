// A few tokens of each sequence on a state in a pool, without an erasure. Each instruction set's file includes this one.
//
// With E_t and F_t, the decays of rows and columns from the first token to t, and E_tm and F_tm, those after token m up to t,
//
//     o_t = scale (F_t (S_0^T E_t q_t) + sum over m <= t of (q_t^T E_tm k_m) F_tm v_m)
//     S_T = E_T S_0 F_T + sum over m of (E_Tm k_m) (F_Tm v_m)^T
//
// The state is read once for the outputs of all tokens, where it fits into a cache, and written once. A token without a query has no
// output, as those of a replay ring: it is 0, and costs nothing.

constexpr int64_t TILE_VECTORS = 4;  // of columns
constexpr int64_t TILE_COLUMNS = TILE_VECTORS * LANES;

// The arrays of a head: tokens in order, in rows of padded widths. Columns are padded to whole tiles.
struct HeadTokens {
  int64_t rows, columns;
  float *k, *v, *row_decay, *column_decay, *row_log, *column_log;  // logs: sums over tokens
  float *read, *base, *output, *factors;  // the vectors that read the state, what they read, and the decays of columns up to their tokens
  float *factor, *rest;
  int64_t token[Step::most_tokens];  // of each vector

  HeadTokens(Scratch& scratch, const Step& p) : rows(padded(p.K)), columns((p.V + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS) {
    k = scratch.floats(p.T * rows), v = scratch.floats(p.T * columns);
    row_decay = scratch.floats(p.T * rows), column_decay = scratch.floats(p.T * columns);
    row_log = scratch.floats(rows), column_log = scratch.floats(columns);
    read = scratch.floats(p.T * rows), base = scratch.floats(p.T * columns);
    output = scratch.floats(p.T * columns), factors = scratch.floats(p.T * columns);
    factor = scratch.floats(columns > rows ? columns : rows), rest = scratch.floats(columns > rows ? columns : rows);
  }
};

inline int64_t tokens_bytes(const Step& p) {
  Scratch scratch{nullptr};
  HeadTokens tokens(scratch, p);
  return scratch.used;
}

inline void read_row(const Step& p, const Tensor& x, int64_t b, int64_t t, int64_t h, float* to, int64_t across) {
  widen(x.data + (((b * p.T + t) * x.heads + h * x.heads / p.H) * x.width) * x.bytes(), x.type, x.width, to);
  for (int64_t c = padded(x.width); c < across; ++c) to[c] = 0;
}

// Reads keys, values and decays of a head.
inline void read_tokens(const Step& p, int64_t b, int64_t h, HeadTokens& x) {
  for (int64_t c = 0; c < x.rows; ++c) x.row_log[c] = 0;
  for (int64_t c = 0; c < x.columns; ++c) x.column_log[c] = 0;
  for (int64_t t = 0; t < p.T; ++t) {
    read_row(p, p.k, b, t, h, x.k + t * x.rows, x.rows), read_row(p, p.v, b, t, h, x.v + t * x.columns, x.columns);
    float heads[LANES] = {};
    if (p.head.data) read_row(p, p.head, b, t, h, heads, LANES);
    const float head = p.constant ? p.constant[b * p.H + h] : heads[0];
    float *const log = x.row_decay + t * x.rows, *const column_log = x.column_decay + t * x.columns;
    for (int64_t c = 0; c < x.rows; ++c) log[c] = 0;
    for (int64_t c = 0; c < x.columns; ++c) column_log[c] = 0;
    if (p.key.data) read_row(p, p.key, b, t, h, log, x.rows);
    if (p.value.data) read_row(p, p.value, b, t, h, column_log, x.columns);
    for (int64_t c = 0; c < p.K; ++c) log[c] += head, x.row_log[c] += log[c];
    for (int64_t c = 0; c < p.V; ++c) x.column_log[c] += column_log[c];
    for (int64_t c = 0; c < x.rows; c += LANES) store(log + c, exponential(load(log + c)));
    for (int64_t c = 0; c < x.columns && p.value.data; c += LANES) store(column_log + c, exponential(load(column_log + c)));
  }
}

// Reads the keys with the query of token t, which becomes the vector that reads the state, in `read`. Sums what it reads of values to
// `output`, and sets `factor` to the decays of the columns. Returns whether there is a query.
inline bool read_keys(const Step& p, int64_t b, int64_t t, int64_t h, const HeadTokens& x, float* read, float* output) {
  read_row(p, p.q, b, t, h, read, x.rows);
  bool is_zero = true;
  for (int64_t c = 0; c < p.K; ++c) is_zero &= read[c] == 0, read[c] *= p.scale[b];
  if (is_zero) return false;
  for (int64_t c = 0; c < x.columns; ++c) output[c] = 0, x.factor[c] = 1;
  for (int64_t m = t; m >= 0; --m) {
    const float *const k = x.k + m * x.rows, *const decay = x.row_decay + m * x.rows;
    vec sums = {};
    for (int64_t c = 0; c < x.rows; c += LANES) {
      const vec q = load(read + c);
      sums += q * load(k + c);
      store(read + c, q * load(decay + c));
    }
    const vec weight = broadcast(sum(sums));
    const float *const v = x.v + m * x.columns, *const column_decay = x.column_decay + m * x.columns;
    for (int64_t c = 0; c < x.columns; c += LANES) {
      const vec factor = load(x.factor + c);
      store(output + c, load(output + c) + weight * (p.value.data ? factor * load(v + c) : load(v + c)));
      if (p.value.data) store(x.factor + c, factor * load(column_decay + c));
    }
  }
  return true;
}

// Reads WIDTH whole vectors of columns of the state with COUNT vectors [COUNT, rows].
template <int COUNT, Type TYPE, int WIDTH = TILE_VECTORS>
inline void read_tile(const char* state, int64_t K, int64_t V, const float* read, int64_t rows, float* base, int64_t columns) {
  constexpr int64_t size = size_of(TYPE);
  vec sums[COUNT][WIDTH];
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; ++w) sums[i][w] = vec{};
  for (int64_t r = 0; r < K; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; ++w) {
      const vec s = state_load<TYPE>(state + (r * V + w * LANES) * size, LANES);
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; ++i) sums[i][w] += broadcast(read[i * rows + r]) * s;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; ++w) store(base + i * columns + w * LANES, sums[i][w]);
}

// Reads one vector of columns of the state, of which `width` are there, with COUNT vectors.
template <int COUNT, Type TYPE>
inline void read_vector(const char* state, int64_t K, int64_t V, int64_t width, const float* read, int64_t rows, float* base, int64_t columns) {
  constexpr int64_t size = size_of(TYPE);
  vec sums[COUNT] = {};
  for (int64_t r = 0; r < K; ++r) {
    const vec s = state_load<TYPE>(state + r * V * size, width);
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; ++i) sums[i] += broadcast(read[i * rows + r]) * s;
  }
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; ++i) store(base + i * columns, sums[i]);
}

// The vectors that read a state, [count, rows], and what they read, [count, columns].
struct Reads {
  const float* vectors;
  float* found;
  int64_t count, rows, columns;
};

template <Type TYPE>
inline void read_state(const Step& p, const char* state, const Reads& x) {
  constexpr int64_t size = size_of(TYPE);
  const auto go = [&](auto many, int64_t i, int64_t c) {
    constexpr int COUNT = decltype(many)::value;
    const float* const read = x.vectors + i * x.rows;
    float* const found = x.found + i * x.columns + c;
    if (c + TILE_COLUMNS <= p.V) return read_tile<COUNT, TYPE>(state + c * size, p.K, p.V, read, x.rows, found, x.columns);
    for (int64_t w = 0; c + w < p.V; w += LANES) {
      const int64_t width = p.V - c - w < LANES ? p.V - c - w : LANES;
      read_vector<COUNT, TYPE>(state + (c + w) * size, p.K, p.V, width, read, x.rows, found + w, x.columns);
    }
  };
  int64_t c = 0;
  // One or two vectors read two tiles of columns together where 32 registers hold their sums: rows of 128 columns are then read in
  // the order of memory.
  for (; LANES == 16 && x.count <= 2 && c + 2 * TILE_COLUMNS <= p.V; c += 2 * TILE_COLUMNS) {
    const auto read = x.count == 1 ? read_tile<1, TYPE, 2 * TILE_VECTORS> : read_tile<2, TYPE, 2 * TILE_VECTORS>;
    read(state + c * size, p.K, p.V, x.vectors, x.rows, x.found + c, x.columns);
  }
  for (; c < p.V; c += TILE_COLUMNS) {
    int64_t i = 0;
    for (; i + 4 <= x.count; i += 4) go(Count<4>{}, i, c);
    for (; i + 2 <= x.count; i += 2) go(Count<2>{}, i, c);
    if (i < x.count) go(Count<1>{}, i, c);
  }
}

// The terms k v^T that are added to a state, decayed: keys [count, rows] and values [count, columns].
struct Terms {
  const float *keys, *values;
  int64_t count, rows, columns;
};

// Decays ROWS rows of the state from r on, in WIDTH vectors of `count` columns each from c on, and adds the terms.
template <int ROWS, int WIDTH, Type TYPE>
inline void write_tile(const Step& p, const Terms& x, Decays of_rows, Decays of_columns, char* state, int64_t r, int64_t c, int64_t count) {
  constexpr int64_t size = size_of(TYPE);
  vec added[ROWS][WIDTH];
#pragma GCC unroll 4
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; ++w) added[i][w] = vec{};
  for (int64_t m = 0; m < x.count; ++m) {
    const float *const keys = x.keys + m * x.rows + r, *const values = x.values + m * x.columns + c;
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; ++w) {
      const vec v = load(values + w * LANES);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; ++i) added[i][w] += broadcast(keys[i]) * v;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < ROWS; ++i) {
    const vec whole = broadcast(of_rows.whole[r + i]), rest = broadcast(of_rows.rest[r + i]);
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; ++w) {
      char* const at = state + ((r + i) * p.V + c + w * LANES) * size;
      vec s = state_load<TYPE>(at, count);
      // The rest joins what the tokens add before the sum with the state: see step.h.
      if (p.value.data) {
        s = s * whole + s * rest;
        s = s * load(of_columns.whole + c + w * LANES) + (s * load(of_columns.rest + c + w * LANES) + added[i][w]);
      } else {
        s = s * whole + (s * rest + added[i][w]);
      }
      state_store<TYPE>(at, s, count);
    }
  }
}

// Decays a state and adds the terms.
template <Type TYPE>
inline void add_terms(const Step& p, const Terms& x, Decays of_rows, Decays of_columns, char* state) {
  constexpr int ROWS = LANES == 16 ? 4 : 2;  // whose sums fit into registers
  const auto columns = [&](auto rows, int64_t r) {
    constexpr int COUNT = decltype(rows)::value;
    int64_t c = 0;
    for (; c + TILE_COLUMNS <= p.V; c += TILE_COLUMNS) write_tile<COUNT, TILE_VECTORS, TYPE>(p, x, of_rows, of_columns, state, r, c, LANES);
    for (; c < p.V; c += LANES) write_tile<COUNT, 1, TYPE>(p, x, of_rows, of_columns, state, r, c, p.V - c < LANES ? p.V - c : LANES);
  };
  int64_t r = 0;
  for (; r + ROWS <= p.K; r += ROWS) columns(Count<ROWS>{}, r);
  for (; r < p.K; ++r) columns(Count<1>{}, r);
}

// Advances the state by all tokens. Their keys and values are decayed in place.
template <Type TYPE>
inline void write_state(const Step& p, char* state, HeadTokens& x) {
  const auto decay_rows = [&](float* rows, const float* decay, int64_t width) {
    for (int64_t c = 0; c < width; ++c) x.factor[c] = 1;
    for (int64_t m = p.T - 1; m >= 0; --m) {
      for (int64_t c = 0; c < width; ++c) {
        rows[m * width + c] *= x.factor[c];
        x.factor[c] *= decay[m * width + c];
      }
    }
  };
  decay_rows(x.k, x.row_decay, x.rows);
  if (p.value.data) decay_rows(x.v, x.column_decay, x.columns);
  // x.read, x.base and x.output are free again. They hold the decays of all tokens together.
  float *const row_whole = x.read, *const row_rest = x.rest, *const column_whole = x.base, *const column_rest = x.output;
  for (int64_t c = 0; c < x.rows; c += LANES) split_decay(load(x.row_log + c), row_whole + c, row_rest + c);
  for (int64_t c = 0; c < x.columns; c += LANES) split_decay(load(x.column_log + c), column_whole + c, column_rest + c);
  add_terms<TYPE>(p, {x.k, x.v, p.T, x.rows, x.columns}, {row_whole, row_rest}, {column_whole, column_rest}, state);
}

template <Type TYPE>
inline void tokens_of(const Step& p, int64_t b, int64_t h, int64_t slot, HeadTokens& x) {
  char* const state = p.state.data + (slot * p.H + h) * p.K * p.V * size_of(TYPE);
  read_tokens(p, b, h, x);
  const auto row = [&](int64_t t) { return p.output.data + ((b * p.T + t) * p.H + h) * p.V * p.output.bytes(); };
  int64_t count = 0;
  for (int64_t t = 0; t < p.T; ++t) {
    float* const output = x.output + count * x.columns;
    if (read_keys(p, b, t, h, x, x.read + count * x.rows, output)) {
      for (int64_t c = 0; c < x.columns; ++c) x.factors[count * x.columns + c] = x.factor[c];
      x.token[count++] = t;
    } else {
      __builtin_memset(row(t), 0, p.V * p.output.bytes());
    }
  }
  read_state<TYPE>(p, state, {x.read, x.base, count, x.rows, x.columns});
  for (int64_t i = 0; i < count; ++i) {
    float *const output = x.output + i * x.columns, *const base = x.base + i * x.columns;
    for (int64_t c = 0; c < x.columns; ++c) output[c] += base[c] * x.factors[i * x.columns + c];
    narrow(output, row(x.token[i]), p.output.type, p.V);
  }
  if (p.writes) write_state<TYPE>(p, state, x);
}

// Computes head h of sequence b; an absent sequence has output 0.
inline void tokens(const Step& p, int64_t b, int64_t h, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  HeadTokens x(scratch, p);
  const int64_t slot = p.slots ? p.slots[b] : b;
  if (slot < 0 || slot >= p.P) {
    for (int64_t t = 0; t < p.T; ++t) {
      __builtin_memset(p.output.data + ((b * p.T + t) * p.H + h) * p.V * p.output.bytes(), 0, p.V * p.output.bytes());
    }
  } else if (p.state.type == Type::f32) {
    tokens_of<Type::f32>(p, b, h, slot, x);
  } else if (p.state.type == Type::bf16) {
    tokens_of<Type::bf16>(p, b, h, slot, x);
  } else {
    tokens_of<Type::f16>(p, b, h, slot, x);
  }
}
