// One token: S' = diag(exp(rows)) S diag(exp(columns)) + k v^T, o = scale * S'^T q, S read and written once, where it lies. Included
// once by each instruction set's file.

constexpr int64_t ROWS_AT_A_TIME = 128;

template <Type TYPE>
inline vec state_load(const char* p, int64_t count) {
  if (TYPE == Type::f32 && count == LANES) return load(reinterpret_cast<const float*>(p));
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

template <Type TYPE>
inline void state_store(char* p, vec x, int64_t count) {
  if (TYPE == Type::f32 && count == LANES) return store(reinterpret_cast<float*>(p), x);
  float copy[LANES];
  store(copy, x);
  narrow(copy, p, TYPE, count == LANES ? LANES : count);
}

// `WIDTH` vectors of columns from `column`, the last of which holds `last` of them.
template <int WIDTH, Type TYPE>
inline void step_columns(const Step& p, const float* q, const float* k, const float* decay, int64_t rows, char* state,
                         const float* v, const float* column_decay, float* sums, int64_t last) {
  constexpr int64_t size = TYPE == Type::f32 ? 4 : 2;
  vec total[WIDTH];
#pragma GCC unroll 8
  for (int w = 0; w < WIDTH; ++w) total[w] = load(sums + w * LANES);
  for (int64_t r = 0; r < rows; ++r) {
    const vec in = all(k[r]), out = all(q[r]), keep = all(decay[r]);
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; ++w) {
      char* at = state + (r * p.V + w * LANES) * size;
      const int64_t count = w + 1 < WIDTH ? LANES : last;
      const vec s = state_load<TYPE>(at, count) * (keep * load(column_decay + w * LANES)) + in * load(v + w * LANES);
      state_store<TYPE>(at, s, count);
      total[w] += out * s;
    }
  }
#pragma GCC unroll 8
  for (int w = 0; w < WIDTH; ++w) store(sums + w * LANES, total[w]);
}

template <Type TYPE>
inline void step_head(const Step& p, int64_t b, int64_t h, int64_t slot) {
  constexpr int64_t size = TYPE == Type::f32 ? 4 : 2, most = 8 * LANES;
  const auto row = [&](const Tensor& x) {
    return x.data + (b * x.heads + h * x.heads / p.H) * x.width * x.bytes();
  };
  float head = 1, copy[LANES];
  if (p.head.data) {
    widen(row(p.head), p.head.type, 1, copy);
    head = exponential(all(copy[0]))[0];
  }
  if (p.constant) head = exponential(all(p.constant[b * p.H + h]))[0];
  const auto part = [](const Tensor& x, const char* from, int64_t first, int64_t count, float* to) {
    widen(from + first * x.bytes(), x.type, count, to);
  };
  for (int64_t c = 0; c < p.V; c += most) {
    const int64_t columns = p.V - c < most ? p.V - c : most, vectors = (columns + LANES - 1) / LANES;
    float v[most], column_decay[most], sums[most];
    part(p.v, row(p.v), c, columns, v);
    for (int64_t i = 0; i < vectors * LANES; ++i) sums[i] = 0, column_decay[i] = 1;
    if (p.value.data) {
      part(p.value, row(p.value), c, columns, column_decay);
      for (int64_t i = 0; i < vectors * LANES; i += LANES) store(column_decay + i, exponential(load(column_decay + i)));
    }
    for (int64_t r = 0; r < p.K; r += ROWS_AT_A_TIME) {
      const int64_t rows = p.K - r < ROWS_AT_A_TIME ? p.K - r : ROWS_AT_A_TIME;
      float q[ROWS_AT_A_TIME], k[ROWS_AT_A_TIME], decay[ROWS_AT_A_TIME];
      part(p.q, row(p.q), r, rows, q), part(p.k, row(p.k), r, rows, k);
      for (int64_t i = 0; i < rows; ++i) q[i] *= p.scale[b], decay[i] = head;
      if (p.key.data) {
        part(p.key, row(p.key), r, rows, decay);
        for (int64_t i = 0; i < padded(rows); i += LANES) store(decay + i, exponential(load(decay + i)) * all(head));
      }
      char* state = p.state.data + (((slot * p.H + h) * p.K + r) * p.V + c) * size;
      const int64_t last = columns - (vectors - 1) * LANES;
      const auto go = [&](auto width, int64_t w, int64_t count) {
        step_columns<decltype(width)::value, TYPE>(p, q, k, decay, rows, state + w * LANES * size, v + w * LANES,
                                                   column_decay + w * LANES, sums + w * LANES, count);
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
