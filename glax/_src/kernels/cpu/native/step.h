// One token of the recurrence, in place:
//
//     S' = diag(exp(rows)) S diag(exp(columns)) + k v^T        o = scale * S'^T q
//
// The state is read once and written once. Each instruction set's file includes this one.

constexpr int64_t ROWS_AT_A_TIME = 128;

// Loads `count` elements, at most LANES, as float32; the other lanes are 0.
template <Type TYPE>
inline vec state_load(const char* p, int64_t count) {
  if (TYPE == Type::f32 && count == LANES) return load(reinterpret_cast<const float*>(p));
  if (TYPE == Type::i8 || TYPE == Type::f8) {
    char part[LANES] = {};
    if (count < LANES) __builtin_memcpy(part, p, count);
    const char* const from = count < LANES ? part : p;
    return TYPE == Type::i8 ? from_i8(load_bytes(from)) : from_f8(load_bytes(from));
  }
  float copy[LANES];
  for (int i = 0; i < LANES; ++i) copy[i] = 0;
  if (count == LANES) {  // a constant count becomes vector instructions
    widen(p, TYPE, LANES, copy);
  } else if (TYPE == Type::f32) {
    __builtin_memcpy(copy, p, count * 4);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t x = reinterpret_cast<const uint16_t*>(p)[i];
      copy[i] = TYPE == Type::bf16 ? from_bf16(x) : from_f16(x);
    }
  }
  return load(copy);
}

// Stores the first `count` lanes.
template <Type TYPE>
inline void state_store(char* p, vec x, int64_t count) {
  if (TYPE == Type::f32 && count == LANES) return store(reinterpret_cast<float*>(p), x);
  float copy[LANES];
  store(copy, x);
  narrow(copy, p, TYPE, count == LANES ? LANES : count);
}

// Splits e^log into whole + rest. Where |log| < 1/64, whole is 1 and rest is e^log - 1 to 1e-11; elsewhere rest is 0.
// A single factor next to 1 has the same rounding error at every token, and the errors add up: 1e5 tokens of -9e-6 are 3e-3 off.
// The rounding of s * whole + s * rest depends on s.
inline void split_decay(vec log, float* whole, float* rest) {
  const vec exact = exponential(log), one = broadcast(1);
  const vec small = log * (one + log * (broadcast(1.f / 2) + log * (broadcast(1.f / 6) + log * broadcast(1.f / 24))));
  for (int i = 0; i < LANES; ++i) {
    const bool mild = log[i] < 1.f / 64 && log[i] > -1.f / 64;
    whole[i] = mild ? 1 : exact[i];
    rest[i] = mild ? small[i] : 0;
  }
}

// The split decays of rows or columns.
struct Decays {
  const float *whole, *rest;
};

// Updates WIDTH vectors of columns in `rows` rows and adds q^T S' to sums. The last vector holds `last` columns.
template <int WIDTH, Type TYPE, bool COLUMNS>
inline void step_columns(const Step& p, const float* q, const float* k, Decays of_rows, int64_t rows, char* state,
                         const float* v, Decays of_columns, float* sums, int64_t last) {
  constexpr int64_t size = TYPE == Type::f32 ? 4 : 2;
  vec total[WIDTH];
#pragma GCC unroll 8
  for (int w = 0; w < WIDTH; ++w) total[w] = load(sums + w * LANES);
  for (int64_t r = 0; r < rows; ++r) {
    const vec in = broadcast(k[r]), out = broadcast(q[r]), whole = broadcast(of_rows.whole[r]), rest = broadcast(of_rows.rest[r]);
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; ++w) {
      char* at = state + (r * p.V + w * LANES) * size;
      const int64_t count = w + 1 < WIDTH ? LANES : last;
      vec s = state_load<TYPE>(at, count);
      // The rest joins the token's k v^T before the sum with the state: alone it may be less than half a unit in the last place of
      // the state, and would round to nothing at every token.
      if (COLUMNS) {
        s = s * whole + s * rest;
        s = s * load(of_columns.whole + w * LANES) + (s * load(of_columns.rest + w * LANES) + in * load(v + w * LANES));
      } else {
        s = s * whole + (s * rest + in * load(v + w * LANES));
      }
      state_store<TYPE>(at, s, count);
      total[w] += out * s;
    }
  }
#pragma GCC unroll 8
  for (int w = 0; w < WIDTH; ++w) store(sums + w * LANES, total[w]);
}

// Computes head h of sequence b, whose state is row `slot` of the pool.
template <Type TYPE>
inline void step_head(const Step& p, int64_t b, int64_t h, int64_t slot) {
  constexpr int64_t size = TYPE == Type::f32 ? 4 : 2, most = 8 * LANES;
  const auto row = [&](const Tensor& x) {
    return x.data + (b * x.heads + h * x.heads / p.H) * x.width * x.bytes();
  };
  float heads[LANES] = {};  // widen() pads a row to a whole vector
  if (p.head.data) widen(row(p.head), p.head.type, 1, heads);
  const float head = p.constant ? p.constant[b * p.H + h] : heads[0];
  const auto part = [](const Tensor& x, const char* from, int64_t first, int64_t count, float* to) {
    widen(from + first * x.bytes(), x.type, count, to);
  };
  for (int64_t c = 0; c < p.V; c += most) {
    const int64_t columns = p.V - c < most ? p.V - c : most, vectors = (columns + LANES - 1) / LANES;
    float v[most], column_whole[most], column_rest[most], sums[most];
    part(p.v, row(p.v), c, columns, v);
    for (int64_t i = 0; i < vectors * LANES; ++i) sums[i] = 0, column_whole[i] = 0;
    if (p.value.data) {
      part(p.value, row(p.value), c, columns, column_whole);
      for (int64_t i = 0; i < vectors * LANES; i += LANES) split_decay(load(column_whole + i), column_whole + i, column_rest + i);
    }
    for (int64_t r = 0; r < p.K; r += ROWS_AT_A_TIME) {
      const int64_t rows = p.K - r < ROWS_AT_A_TIME ? p.K - r : ROWS_AT_A_TIME;
      float q[ROWS_AT_A_TIME], k[ROWS_AT_A_TIME], whole[ROWS_AT_A_TIME], rest[ROWS_AT_A_TIME];
      part(p.q, row(p.q), r, rows, q), part(p.k, row(p.k), r, rows, k);
      for (int64_t i = 0; i < padded(rows); ++i) whole[i] = 0;
      if (p.key.data) part(p.key, row(p.key), r, rows, whole);
      for (int64_t i = 0; i < rows; ++i) q[i] *= p.scale[b], whole[i] += head;
      for (int64_t i = 0; i < padded(rows); i += LANES) split_decay(load(whole + i), whole + i, rest + i);
      char* state = p.state.data + (((slot * p.H + h) * p.K + r) * p.V + c) * size;
      const int64_t last = columns - (vectors - 1) * LANES;
      const auto go = [&](auto width, int64_t w, int64_t count) {
        const Decays of_rows{whole, rest}, of_columns{column_whole + w * LANES, column_rest + w * LANES};
        constexpr int WIDTH = decltype(width)::value;
        const auto columns_of = p.value.data ? step_columns<WIDTH, TYPE, true> : step_columns<WIDTH, TYPE, false>;
        columns_of(p, q, k, of_rows, rows, state + w * LANES * size, v + w * LANES, of_columns, sums + w * LANES, count);
      };
      if (vectors == 8) {
        go(Count<8>{}, 0, last);
      } else {
        int64_t w = 0;
        for (; w + 4 <= vectors; w += 4) go(Count<4>{}, w, w + 4 == vectors ? last : LANES);
        for (; w < vectors; ++w) go(Count<1>{}, w, w + 1 == vectors ? last : LANES);
      }
    }
    narrow(sums, row(p.output) + c * p.output.bytes(), p.output.type, columns);
  }
}

// Computes head h of sequence b; an absent sequence has output 0.
inline void step(const Step& p, int64_t b, int64_t h) {
  const int64_t slot = p.slots ? p.slots[b] : b;
  if (slot < 0 || slot >= p.P) {
    char* output = p.output.data + (b * p.H + h) * p.V * p.output.bytes();
    for (int64_t i = 0; i < p.V * p.output.bytes(); ++i) output[i] = 0;
  } else if (p.state.type == Type::f32) {
    step_head<Type::f32>(p, b, h, slot);
  } else if (p.state.type == Type::bf16) {
    step_head<Type::bf16>(p, b, h, slot);
  } else {
    step_head<Type::f16>(p, b, h, slot);
  }
}
