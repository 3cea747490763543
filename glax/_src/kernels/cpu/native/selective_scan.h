// The selective scan, its gradient and its step. Each instruction set's file includes this one.
//
// The lanes are channels. A block is WIDTH channels, whose states [N, WIDTH] stay in the first-level cache. A task goes token by token,
// and reads and writes the rows of a chunk of tokens together, as float32. Channels past the last are zeros.
//
// The gradient goes from the last chunk to the first. It computes the states of a chunk again from the state before it, then with
// G_t = C_t dy_t + exp(dt_{t+1} A) G_{t+1}, the cotangent of h_t,
//
//     dC_t = sum over d of dy_t h_t        dB_t = sum over d of dt_t x_t G_t        dA = sum over t of dt_t exp(dt_t A) G_t h_{t-1}
//     dx_t = dt_t sum over n of B_t G_t    ddt_t = x_t sum over n of B_t G_t + sum over n of A exp(dt_t A) G_t h_{t-1}

constexpr int64_t VECTORS = LANES >= 16 ? 4 : 2;  // of channels in a block: as many as leave registers for an exponential
constexpr int64_t WIDTH = VECTORS * LANES;
static_assert(selective_alignment % WIDTH == 0, "a group has whole blocks");
constexpr float most_small = 80;  // see decayed_by_small

inline vec magnitude(vec x) { return choose(x < vec{}, -x, x); }

// Reads the states [count, N] of a block's channels to [N, WIDTH], or zeros if `from` is null.
inline void read_states(const float* from, int64_t count, int64_t N, float* to) {
  for (int64_t i = 0; i < N * WIDTH; ++i) to[i] = 0;
  for (int64_t d = 0; d < count && from; ++d)
    for (int64_t n = 0; n < N; ++n) to[n * WIDTH + d] = from[d * N + n];
}

inline void write_states(const float* from, int64_t count, int64_t N, float* to) {
  for (int64_t d = 0; d < count; ++d)
    for (int64_t n = 0; n < N; ++n) to[d * N + n] = from[n * WIDTH + d];
}

// The tokens of a sequence in the order of the scan.
struct SelectiveOrder {
  const SelectiveScan& p;
  int64_t row, begin, end;

  SelectiveOrder(const SelectiveScan& p, int64_t sequence) : p(p), row(p.row(sequence)), begin(p.begin(sequence)), end(p.end(sequence)) {}
  int64_t length() const { return end - begin; }
  int64_t chunks() const { return (length() + p.chunk - 1) / p.chunk; }
  int64_t tokens(int64_t chunk) const { return length() - chunk * p.chunk < p.chunk ? length() - chunk * p.chunk : p.chunk; }
  // The place in [rows, T] of token i of a chunk.
  int64_t at(int64_t chunk, int64_t i) const {
    const int64_t place = chunk * p.chunk + i;
    return row * p.T + (p.reverse ? end - 1 - place : begin + place);
  }
  bool resets(int64_t chunk, int64_t i) const { return p.resets && p.resets[at(chunk, i)]; }

  // Reads columns [first, first + count) of a chunk's rows to [chunk, across], with zeros behind them.
  void read(const Tensor& x, int64_t chunk, int64_t first, int64_t count, float* to, int64_t across) const {
    for (int64_t i = 0; i < tokens(chunk); ++i, to += across) {
      widen(x.data + (at(chunk, i) * x.width + first) * x.bytes(), x.type, count, to);
      for (int64_t c = padded(count); c < across; ++c) to[c] = 0;
    }
  }
  void write(const float* from, int64_t chunk, int64_t first, int64_t count, const Tensor& x) const {
    for (int64_t i = 0; i < tokens(chunk); ++i, from += WIDTH)
      narrow(from, x.data + (at(chunk, i) * x.width + first) * x.bytes(), x.type, count);
  }
};

// A block of channels: A, the largest |A| of a channel, and the rows of a chunk.
struct SelectiveBlock {
  int64_t N, first = 0, count = 0;
  float *A, *largest, *x, *dt, *B, *C;

  SelectiveBlock(Scratch& scratch, const SelectiveScan& p) : N(p.N) {
    A = scratch.floats(N * WIDTH), largest = scratch.floats(WIDTH);
    x = scratch.floats(p.chunk * WIDTH), dt = scratch.floats(p.chunk * WIDTH);
    B = scratch.floats(p.chunk * padded(N)), C = scratch.floats(p.chunk * padded(N));
  }

  void begin(const SelectiveScan& p, int64_t from, int64_t last) {
    first = from, count = last - from < WIDTH ? last - from : WIDTH;
    read_states(p.A + first * N, count, N, A);
    for (int64_t w = 0; w < WIDTH; w += LANES) {
      vec most = {};
      for (int64_t n = 0; n < N; ++n) {
        const vec x = magnitude(load(A + n * WIDTH + w));
        most = choose(x > most, x, most);
      }
      store(largest + w, most);
    }
  }

  void read(const SelectiveScan& p, const SelectiveOrder& order, int64_t chunk) {
    order.read(p.x, chunk, first, count, x, WIDTH), order.read(p.dt, chunk, first, count, dt, WIDTH);
    order.read(p.B, chunk, 0, N, B, padded(N)), order.read(p.C, chunk, 0, N, C, padded(N));
  }

  // Whether every |dt A| of token i is at most `most_small`; A may hold NaN.
  bool is_small(int64_t i) const {
    ivec outside = {};
    for (int64_t w = 0; w < WIDTH; w += LANES) outside |= ~(magnitude(load(dt + i * WIDTH + w)) * load(largest + w) <= broadcast(most_small));
    return !any(outside);
  }
};

template <bool SMALL>
inline vec decayed(vec log, vec s, vec added) {
  return SMALL ? decayed_by_small(log, s, added) : exponential(log) * s + added;
}

// Advances the states [N, WIDTH] of a block by token i, from `before` to `after`, and sums y [WIDTH] if it is not null.
template <bool SMALL, bool RESETS>
inline void selective_token(const SelectiveBlock& block, int64_t i, const float* before, float* after, float* y) {
  const float *const B = block.B + i * padded(block.N), *const C = block.C + i * padded(block.N);
  vec dt[VECTORS], added[VECTORS], sums[VECTORS];
#pragma GCC unroll 4
  for (int w = 0; w < VECTORS; ++w) {
    dt[w] = load(block.dt + i * WIDTH + w * LANES), added[w] = dt[w] * load(block.x + i * WIDTH + w * LANES);
    sums[w] = vec{};
  }
  for (int64_t n = 0; n < block.N; ++n) {
    const vec in = broadcast(B[n]), out = broadcast(C[n]);
#pragma GCC unroll 4
    for (int w = 0; w < VECTORS; ++w) {
      const int64_t at = n * WIDTH + w * LANES;
      const vec own = in * added[w], s = RESETS ? own : decayed<SMALL>(dt[w] * load(block.A + at), load(before + at), own);
      store(after + at, s);
      sums[w] += out * s;
    }
  }
#pragma GCC unroll 4
  for (int w = 0; w < VECTORS; ++w)
    if (y) store(y + w * LANES, sums[w]);
}

inline void advance(const SelectiveBlock& block, int64_t i, bool resets, const float* before, float* after, float* y) {
  const auto run = resets ? selective_token<true, true> : block.is_small(i) ? selective_token<true, false> : selective_token<false, false>;
  run(block, i, before, after, y);
}

// The forward of channels [first, last).
inline void selective_forward(const SelectiveScan& p, int64_t sequence, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  SelectiveBlock block(scratch, p);
  float *const h = scratch.floats(p.N * WIDTH), *const y = scratch.floats(p.chunk * WIDTH);
  const SelectiveOrder order(p, sequence);
  const int64_t size = p.D * p.N;
  const Tensor rows{reinterpret_cast<char*>(p.y), Type::f32, 1, p.D};
  for (; first < last; first += WIDTH) {
    block.begin(p, first, last);
    read_states(p.initial + sequence * size + first * p.N, block.count, p.N, h);
    for (int64_t chunk = 0; chunk < order.chunks(); ++chunk) {
      if (p.starts) write_states(h, block.count, p.N, p.starts + (p.first_chunk(sequence) + chunk) * size + first * p.N);
      block.read(p, order, chunk);
      for (int64_t i = 0; i < order.tokens(chunk); ++i) advance(block, i, order.resets(chunk, i), h, h, y + i * WIDTH);
      order.write(y, chunk, first, block.count, rows);
    }
    write_states(h, block.count, p.N, p.final_state + sequence * size + first * p.N);
  }
}

// The arrays of a gradient's task. d_in and d_out are sums over the channels of a group, in LANES parts.
struct SelectiveGradient {
  float *states, *d_y, *d_in, *d_out, *dA, *dx, *ddt;

  SelectiveGradient(Scratch& scratch, const SelectiveScan& p) {
    states = scratch.floats((p.chunk + 1) * p.N * WIDTH), d_y = scratch.floats(p.chunk * WIDTH);
    d_in = scratch.floats(p.chunk * p.N * LANES), d_out = scratch.floats(p.chunk * p.N * LANES);
    dA = scratch.floats(p.N * WIDTH), dx = scratch.floats(p.chunk * WIDTH), ddt = scratch.floats(p.chunk * WIDTH);
  }
};

// Takes token i back. G [N, WIDTH] is the cotangent of the state behind it, without the share of the token's own y, and becomes the
// cotangent of the state before it.
template <bool SMALL, bool RESETS>
inline void selective_token_back(const SelectiveBlock& block, const SelectiveGradient& d, int64_t i, float* G) {
  const int64_t N = block.N;
  const float *const B = block.B + i * padded(N), *const C = block.C + i * padded(N);
  const float *const before = d.states + i * N * WIDTH, *const after = before + N * WIDTH;
  vec dt[VECTORS], added[VECTORS], d_y[VECTORS], through[VECTORS], by_decay[VECTORS];
#pragma GCC unroll 4
  for (int w = 0; w < VECTORS; ++w) {
    const int64_t at = i * WIDTH + w * LANES;
    dt[w] = load(block.dt + at), added[w] = dt[w] * load(block.x + at), d_y[w] = load(d.d_y + at);
    through[w] = by_decay[w] = vec{};
  }
  for (int64_t n = 0; n < N; ++n) {
    const vec in = broadcast(B[n]), out = broadcast(C[n]);
    vec d_in = load(d.d_in + (i * N + n) * LANES), d_out = load(d.d_out + (i * N + n) * LANES);
#pragma GCC unroll 4
    for (int w = 0; w < VECTORS; ++w) {
      const int64_t at = n * WIDTH + w * LANES;
      const vec g = load(G + at) + out * d_y[w], A = load(block.A + at);
      d_out += d_y[w] * load(after + at);
      d_in += added[w] * g;
      through[w] += in * g;
      const vec back = RESETS ? vec{} : decayed<SMALL>(dt[w] * A, g, vec{});
      if (!RESETS) {
        const vec slope = back * load(before + at);
        by_decay[w] += slope * A;
        store(d.dA + at, load(d.dA + at) + slope * dt[w]);
      }
      store(G + at, back);
    }
    store(d.d_in + (i * N + n) * LANES, d_in), store(d.d_out + (i * N + n) * LANES, d_out);
  }
#pragma GCC unroll 4
  for (int w = 0; w < VECTORS; ++w) {
    const int64_t at = i * WIDTH + w * LANES;
    store(d.dx + at, dt[w] * through[w]), store(d.ddt + at, load(block.x + at) * through[w] + by_decay[w]);
  }
}

inline void take_back(const SelectiveBlock& block, const SelectiveGradient& d, int64_t i, bool resets, float* G) {
  const auto run = resets ? selective_token_back<true, true> : block.is_small(i) ? selective_token_back<true, false> : selective_token_back<false, false>;
  run(block, d, i, G);
}

// The gradient of a chunk in a block's channels. total [N, WIDTH]: the sum of dA, to which the chunk's own is added, so that few summands
// are added to a large sum.
inline void selective_chunk_back(const SelectiveScan& p, const SelectiveOrder& order, int64_t chunk, const float* start,
                                 SelectiveBlock& block, const SelectiveGradient& d, float* G, float* total) {
  const int64_t size = p.N * WIDTH;
  block.read(p, order, chunk);
  order.read({reinterpret_cast<char*>(const_cast<float*>(p.d_y)), Type::f32, 1, p.D}, chunk, block.first, block.count, d.d_y, WIDTH);
  read_states(start + block.first * p.N, block.count, p.N, d.states);
  for (int64_t i = 0; i < order.tokens(chunk); ++i)
    advance(block, i, order.resets(chunk, i), d.states + i * size, d.states + (i + 1) * size, nullptr);
  for (int64_t i = 0; i < size; ++i) d.dA[i] = 0;
  for (int64_t i = order.tokens(chunk) - 1; i >= 0; --i) take_back(block, d, i, order.resets(chunk, i), G);
  for (int64_t i = 0; i < size; ++i) total[i] += d.dA[i];
  order.write(d.dx, chunk, block.first, block.count, p.dx), order.write(d.ddt, chunk, block.first, block.count, p.ddt);
}

// The gradient of channels [first, last), a group.
inline void selective_gradient(const SelectiveScan& p, int64_t sequence, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  SelectiveBlock block(scratch, p);
  const SelectiveGradient d(scratch, p);
  const SelectiveOrder order(p, sequence);
  const int64_t N = p.N, blocks = (last - first + WIDTH - 1) / WIDTH, size = p.D * N, group = first / p.group_channels;
  float *const G = scratch.floats(blocks * N * WIDTH), *const dA = scratch.floats(blocks * N * WIDTH);
  const auto count = [&](int64_t b) { return last - first - b * WIDTH < WIDTH ? last - first - b * WIDTH : WIDTH; };
  for (int64_t b = 0; b < blocks; ++b)
    read_states(p.d_final + sequence * size + (first + b * WIDTH) * N, count(b), N, G + b * N * WIDTH);
  for (int64_t i = 0; i < blocks * N * WIDTH; ++i) dA[i] = 0;
  for (int64_t chunk = order.chunks() - 1; chunk >= 0; --chunk) {
    for (int64_t i = 0; i < order.tokens(chunk) * N * LANES; ++i) d.d_in[i] = d.d_out[i] = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      block.begin(p, first + b * WIDTH, last);
      const float* const start = p.starts + (p.first_chunk(sequence) + chunk) * size;
      selective_chunk_back(p, order, chunk, start, block, d, G + b * N * WIDTH, dA + b * N * WIDTH);
    }
    for (int64_t i = 0; i < order.tokens(chunk); ++i) {
      const int64_t at = (group * p.rows * p.T + order.at(chunk, i)) * N;
      for (int64_t n = 0; n < N; ++n)
        p.dB[at + n] = sum(load(d.d_in + (i * N + n) * LANES)), p.dC[at + n] = sum(load(d.d_out + (i * N + n) * LANES));
    }
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = sequence * size + (first + b * WIDTH) * N;
    write_states(G + b * N * WIDTH, count(b), N, p.d_initial + at), write_states(dA + b * N * WIDTH, count(b), N, p.dA + at);
  }
}

// The scratch of a task, in bytes.
inline int64_t selective_bytes(const SelectiveScan& p, bool gradient) {
  Scratch scratch{nullptr};
  SelectiveBlock block(scratch, p);
  scratch.floats(p.N * WIDTH), scratch.floats(p.chunk * WIDTH);
  if (gradient) {
    SelectiveGradient d(scratch, p);
    for (int i = 0; i < 2; ++i) scratch.floats((p.group_channels / WIDTH) * p.N * WIDTH);
  }
  return scratch.used;
}

// One token of sequence b, channels [first, last). The lanes are the N numbers of a channel's state.
template <Type TYPE, bool SMALL>
inline void selective_step_of(const SelectiveStep& p, int64_t slot, int64_t b, int64_t first, const float* x, const float* dt,
                              int64_t channels, const float* in, const float* out) {
  for (int64_t d = 0; d < channels; ++d) {
    char* state = p.state.data + (slot * p.D + first + d) * p.N * p.state.bytes();
    const float* const A = p.A + (first + d) * p.N;
    const vec step = broadcast(dt[d]), added = broadcast(dt[d] * x[d]);
    vec total = {};
    for (int64_t n = 0; n < p.N; n += LANES) {
      const int64_t count = p.N - n < LANES ? p.N - n : LANES;
      char* const at = state + n * p.state.bytes();
      const vec log = step * state_load<Type::f32>(reinterpret_cast<const char*>(A + n), count);
      const vec s = decayed<SMALL>(log, state_load<TYPE>(at, count), added * load(in + n));
      state_store<TYPE>(at, s, count);
      total += load(out + n) * s;
    }
    p.y[b * p.D + first + d] = sum(total);
  }
}

// One token of sequences [begin, end), channels [first, last), at most selective_alignment of them.
inline void selective_step(const SelectiveStep& p, int64_t begin, int64_t end, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  float *const in = scratch.floats(padded(p.N)), *const out = scratch.floats(padded(p.N));
  float x[selective_alignment], dt[selective_alignment];
  const int64_t channels = last - first;
  float largest = 0;
  for (int64_t i = first * p.N; i < last * p.N; ++i) largest = p.A[i] > largest || -p.A[i] > largest ? __builtin_fabsf(p.A[i]) : largest;
  const auto row = [&](const Tensor& x, int64_t b, int64_t from, int64_t count, float* to) {
    widen(x.data + (b * x.width + from) * x.bytes(), x.type, count, to);
  };
  for (int64_t b = begin; b < end; ++b) {
    const int64_t slot = p.slots ? p.slots[b] : b;
    if (slot < 0 || slot >= p.P) {
      for (int64_t d = first; d < last; ++d) p.y[b * p.D + d] = 0;
      continue;
    }
    row(p.x, b, first, channels, x), row(p.dt, b, first, channels, dt), row(p.in, b, 0, p.N, in), row(p.out, b, 0, p.N, out);
    float longest = 0;
    for (int64_t d = 0; d < channels; ++d) longest = dt[d] > longest || -dt[d] > longest ? __builtin_fabsf(dt[d]) : longest;
    const auto go = [&](auto type) {
      constexpr Type TYPE = static_cast<Type>(decltype(type)::value);
      const auto run = longest * largest <= most_small ? selective_step_of<TYPE, true> : selective_step_of<TYPE, false>;
      run(p, slot, b, first, x, dt, channels, in, out);
    };
    if (p.state.type == Type::f32) {
      go(Count<int(Type::f32)>{});
    } else if (p.state.type == Type::bf16) {
      go(Count<int(Type::bf16)>{});
    } else {
      go(Count<int(Type::f16)>{});
    }
  }
}
