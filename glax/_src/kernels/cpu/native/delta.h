// The delta rule's forward and its step: one token in place in a pool. delta_block.h has the formulas.

struct DeltaScan {
  DeltaBlock block;
  float *state, *y, *u;

  void allocate(Scratch& scratch, int64_t K, int64_t V) {
    block.allocate(scratch, K, V);
    state = scratch.floats(state_size()), y = scratch.floats((2 * BLOCK_TOKENS + 3) * block.value_width);
    u = scratch.floats((BLOCK_TOKENS + 3) * block.value_width);
  }
  int64_t panels() const { return block.value_width / TILE; }
  int64_t state_size() const { return panels() * padded_rows(block.K) * TILE; }
  Panels states() const { return state_at(state, block.K); }
};

inline bool delta_forward(const Problem& p, const Segment& n, Heads heads, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first;
  DeltaScan scan;
  scan.allocate(scratch, p.K, width);
  DeltaBlock& block = scan.block;
  const Order order = order_of(p, n);
  for (int64_t h = heads.first; h < heads.last; ++h) {
    const int64_t state = h * p.K * p.V + first;
    const RowView output = written_rows_of(p, p.output, n, h, first, width);
    block.begin(p, n, h, first);
    load_state(n.initial ? n.initial + state : nullptr, p.V, p.K, width, scan.states());
    for (int64_t from = 0; from < order.length; from += block.tokens) {
      block.measure(order, from, order.length - from);
      block.fill(order, from);
      block.enter(scan.states(), scan.panels());
      const int64_t tokens = block.tokens, stride = block.value_width;
      multiply(block.reads, block.key_width, 2 * tokens, scan.states(), p.K, scan.panels(), rows_at(scan.y, stride));
      block.solve(scan.y, scan.u);
      for (int64_t i = 0; i < tokens; ++i) {
        float* row = scan.y + (tokens + i) * stride;
        for (int64_t c = 0; c < stride; c += LANES) {
          vec sum = load(row + c);
          for (int64_t j = 0; j <= i; ++j) sum += broadcast(block.shown(i, j)) * load(scan.u + j * stride + c);
          store(row + c, sum);
        }
        output.write(row, order.at(from + i));
      }
      block.advance(scan.states(), scan.u);
    }
    if (n.final_state) save_state(scan.states(), p.V, p.K, width, n.final_state + state);
  }
  streams_end();
  return true;
}

// ---- one token ---------------------------------------------------------------------------------------------------------

// Rows of one token for the step: the reads of the decayed state by e and by q, then the state's update.
struct DeltaToken {
  const float *q, *k, *e, *whole, *rest;  // [K]
  float own;                              // k . q
};

// Updates WIDTH vectors of columns, of which the last holds `last`, and writes o [WIDTH * LANES].
template <int WIDTH, Type TYPE>
inline void delta_step_columns(const Step& p, const DeltaToken& t, char* state, const float* values, const float* column_whole,
                               const float* column_rest, float* o, int64_t last) {
  constexpr int64_t size = TYPE == Type::f32 ? 4 : 2;
  vec by_e[WIDTH], by_q[WIDTH], u[WIDTH];
  for (int w = 0; w < WIDTH; ++w) by_e[w] = by_q[w] = vec{};
  for (int64_t r = 0; r < p.K; ++r) {
    const float decay = t.whole[r] + t.rest[r];
    const vec of_e = broadcast(t.e[r] * decay), of_q = broadcast(t.q[r] * decay);
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; ++w) {
      const vec s = state_load<TYPE>(state + (r * p.V + w * LANES) * size, w + 1 < WIDTH ? LANES : last);
      by_e[w] += of_e * s, by_q[w] += of_q * s;
    }
  }
#pragma GCC unroll 4
  for (int w = 0; w < WIDTH; ++w) {
    const vec decay = load(column_whole + w * LANES) + load(column_rest + w * LANES);
    u[w] = load(values + w * LANES) - decay * by_e[w];
    store(o + w * LANES, decay * by_q[w] + broadcast(t.own) * u[w]);
  }
  for (int64_t r = 0; r < p.K; ++r) {
    const vec whole = broadcast(t.whole[r]), rest = broadcast(t.rest[r]), in = broadcast(t.k[r]);
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; ++w) {
      char* at = state + (r * p.V + w * LANES) * size;
      const int64_t count = w + 1 < WIDTH ? LANES : last;
      vec s = state_load<TYPE>(at, count);
      s = s * whole + s * rest;
      s = s * load(column_whole + w * LANES) + (s * load(column_rest + w * LANES) + in * u[w]);
      state_store<TYPE>(at, s, count);
    }
  }
}

// The rows of head h of sequence b, as float32.
struct DeltaStepRows {
  float *q, *k, *e, *whole, *rest, *v, *w, *column_whole, *column_rest, *o;

  explicit DeltaStepRows(Scratch& scratch, int64_t K, int64_t V) {
    for (float** row : {&q, &k, &e, &whole, &rest}) *row = scratch.floats(padded(K));
    for (float** row : {&v, &w, &column_whole, &column_rest, &o}) *row = scratch.floats(padded(V));
  }
};

template <Type TYPE>
inline void delta_step_head(const Step& p, int64_t b, int64_t h, int64_t slot, const DeltaStepRows& rows) {
  constexpr int64_t size = TYPE == Type::f32 ? 4 : 2;
  const auto row = [&](const Tensor& x) { return x.data + (b * x.heads + h * x.heads / p.H) * x.width * x.bytes(); };
  const auto read = [&](const Tensor& x, float* to) { widen(row(x), x.type, x.width, to); };
  float scalar[LANES] = {};
  if (p.head.data) read(p.head, scalar);
  const float head = p.constant ? p.constant[b * p.H + h] : scalar[0];
  read(p.q, rows.q), read(p.k, rows.k), read(p.v, rows.v);
  if (p.beta.data) {
    read(p.beta, scalar);
    for (int64_t r = 0; r < p.K; ++r) rows.e[r] = scalar[0] * rows.k[r];
    for (int64_t c = 0; c < p.V; ++c) rows.v[c] *= scalar[0];
  } else {
    read(p.erase, rows.e);
    if (p.write.data) read(p.write, rows.w);
    for (int64_t c = 0; c < p.V && p.write.data; ++c) rows.v[c] *= rows.w[c];
  }
  for (int64_t r = 0; r < padded(p.K); ++r) rows.whole[r] = 0;
  if (p.key.data) read(p.key, rows.whole);
  float own = 0;
  for (int64_t r = 0; r < p.K; ++r) rows.q[r] *= p.scale[b], rows.whole[r] += head, own += rows.q[r] * rows.k[r];
  for (int64_t r = 0; r < padded(p.K); r += LANES) split_decay(load(rows.whole + r), rows.whole + r, rows.rest + r);
  for (int64_t c = 0; c < padded(p.V); ++c) rows.column_whole[c] = 0;
  if (p.value.data) read(p.value, rows.column_whole);
  for (int64_t c = 0; c < padded(p.V); c += LANES) split_decay(load(rows.column_whole + c), rows.column_whole + c, rows.column_rest + c);

  const DeltaToken token{rows.q, rows.k, rows.e, rows.whole, rows.rest, own};
  char* state = p.state.data + (slot * p.H + h) * p.K * p.V * size;
  const int64_t vectors = (p.V + LANES - 1) / LANES, last = p.V - (vectors - 1) * LANES;
  const auto go = [&](auto width, int64_t w) {
    constexpr int WIDTH = decltype(width)::value;
    const int64_t c = w * LANES;
    delta_step_columns<WIDTH, TYPE>(p, token, state + c * size, rows.v + c, rows.column_whole + c, rows.column_rest + c, rows.o + c,
                                    w + WIDTH == vectors ? last : LANES);
  };
  int64_t w = 0;
  for (; w + 4 <= vectors; w += 4) go(Count<4>{}, w);
  for (; w < vectors; ++w) go(Count<1>{}, w);
  narrow(rows.o, row(p.output), p.output.type, p.V);
}

inline int64_t delta_step_bytes(const Step& p) {
  Scratch scratch{nullptr};
  DeltaStepRows(scratch, p.K, p.V);
  return scratch.used;
}

// Computes head h of sequence b; an absent sequence has output 0.
inline void delta_step(const Step& p, int64_t b, int64_t h, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const DeltaStepRows rows(scratch, p.K, p.V);
  const int64_t slot = p.slots ? p.slots[b] : b;
  if (slot < 0 || slot >= p.P) {
    __builtin_memset(p.output.data + (b * p.H + h) * p.V * p.output.bytes(), 0, p.V * p.output.bytes());
  } else if (p.state.type == Type::f32) {
    delta_step_head<Type::f32>(p, b, h, slot, rows);
  } else if (p.state.type == Type::bf16) {
    delta_step_head<Type::bf16>(p, b, h, slot, rows);
  } else {
    delta_step_head<Type::f16>(p, b, h, slot, rows);
  }
}
