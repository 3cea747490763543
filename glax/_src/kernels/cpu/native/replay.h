// One token of a sequence, from a stored state and the tokens since it was written, which lie in the slot's replay ring:
//
//     S_t = e^{G_t} S_0 + sum over i < t of e^{G_t - G_i} k_i u_i^T + k_t u_t^T        o_t = scale S_t^T q_t
//
// G is the sum of the log decays since S_0 was written. The ring holds k_i, u_i and the decays, and with `along` also b_i and y_i of a
// second term b_i y_i^T. The new token's u_t is v_t, or under the delta rule w_t * v_t - S_bar^T e_t; with `along` y_t is -S_bar^T e_t.
// S_bar is S_t without the terms of t, or with `before_decay` S_{t-1}.
//
// The ring is read once, from its newest token on, and every exponent is a sum of the log decays that it spans. Each token's key is decayed
// and multiplied with q and e, and these products weigh its value. S_0 is read once for q and e together. Where the token is the
// `replay`-th since S_0 was written, the state is decayed and all terms are added to it. Else the token is put into the ring.
//
// States of 8 bits are scale (value + rest / factor), with a scale for some rows. Outputs read no rests.

// The arrays of a head, in rows of padded widths. Terms of tokens lie from the newest token on: k and u, and with `along` b and y.
struct ReplayRows {
  int64_t rows, columns, terms;  // terms of one token
  float *keys, *values;          // [terms * (places + 1), rows or columns]
  float *by_q, *by_e;            // the products of the keys with q and e
  const float** value_rows;      // the values, in `values` or in the ring
  float *reads, *base;           // q and e, [2, rows], and what they read of the state, [2, columns]
  float *gate, *column_gate;     // the token's log decays
  float *sum, *recent, *column_sum, *column_recent;  // those of the tokens that were read so far, in two parts
  float *whole, *rest, *column_whole, *column_rest;
  float *row, *column;  // rows of other types, widened
  float* state;         // [K, V], for one of 8 bits
  float head_gate = 0;  // the token's log decay of all rows

  ReplayRows(Scratch& scratch, const Replay& p) : rows(padded(p.K)), columns(padded(p.V)), terms(p.along.data ? 2 : 1) {
    const int64_t all = terms * (p.places + 1);
    keys = scratch.floats(all * rows), values = scratch.floats(all * columns);
    by_q = scratch.floats(all), by_e = scratch.floats(all);
    value_rows = reinterpret_cast<const float**>(scratch.floats(all * 2));  // a pointer occupies two floats
    reads = scratch.floats(2 * rows), base = scratch.floats(2 * columns);
    for (float** x : {&gate, &sum, &recent, &whole, &rest, &row}) *x = scratch.floats(rows);
    for (float** x : {&column_gate, &column_sum, &column_recent, &column_whole, &column_rest, &column}) *x = scratch.floats(columns);
    state = p.rests ? scratch.floats(p.K * p.V) : nullptr;
  }
  float* key(int64_t token, int64_t term = 0) const { return keys + (token * terms + term) * rows; }  // token 0 is the newest
  float* value(int64_t token, int64_t term = 0) const { return values + (token * terms + term) * columns; }
};

inline int64_t replay_bytes(const Replay& p) {
  Scratch scratch{nullptr};
  ReplayRows(scratch, p);
  return scratch.used;
}

inline bool erases(const Replay& p) { return p.beta.data || p.erase.data; }
inline bool decays_rows(const Replay& p) { return p.key.data || p.head.data || p.constant; }

// Row h of x [.., heads, width], of which `at` rows of all heads lie before.
inline char* row_of(const Replay& p, const Tensor& x, int64_t at, int64_t h) {
  return x.data + (at * x.heads + h * x.heads / p.H) * x.width * x.bytes();
}

// x [width] times e^log, or times `factor` without a log.
inline void decay_row(float* x, const float* log, float factor, int64_t width) {
  for (int64_t c = 0; c < width; c += LANES) store(x + c, load(x + c) * (log ? exponential(load(log + c)) : broadcast(factor)));
}

inline float exponential_of(float x) { return exponential(broadcast(x))[0]; }

// Reads the new token, whose terms are the first: w * v in the place of u, and zeros in the place of y.
inline void read_token(const Replay& p, int64_t b, int64_t h, ReplayRows& x) {
  const auto read = [&](const Tensor& from, float* to) { widen(row_of(p, from, b, h), from.type, from.width, to); };
  float scalar[LANES] = {};
  if (p.head.data) read(p.head, scalar);
  x.head_gate = p.constant ? p.constant[b * p.H + h] : scalar[0];
  if (p.key.data) read(p.key, x.gate);
  if (p.value.data) read(p.value, x.column_gate);
  float *const q = x.reads, *const e = x.reads + x.rows, *const v = x.value(0);
  read(p.q, q), read(p.k, x.key(0)), read(p.v, v);
  if (p.beta.data) {
    read(p.beta, scalar);
    for (int64_t c = 0; c < x.rows; ++c) e[c] = scalar[0] * x.key(0)[c];
    for (int64_t c = 0; c < x.columns; ++c) v[c] *= scalar[0];
  } else if (p.erase.data) {
    read(p.erase, e);
    if (p.write.data) read(p.write, x.column);
    for (int64_t c = 0; c < x.columns && p.write.data; ++c) v[c] *= x.column[c];
  }
  if (p.along.data) read(p.along, x.key(0, 1));
  for (int64_t c = 0; c < x.rows; ++c) q[c] *= p.scale[b];
  for (int64_t term = 0; term < x.terms; ++term) {
    vec sums = {};
    for (int64_t c = 0; c < x.rows; c += LANES) sums += load(q + c) * load(x.key(0, term) + c);
    x.by_q[term] = sum(sums);
  }
  // Of the tokens before, q reads behind the token's decay, and with `before_decay` e does not.
  if (p.before_decay && decays_rows(p)) decay_row(q, p.key.data ? x.gate : nullptr, exponential_of(x.head_gate), x.rows);
}

// A row as float32: where it lies, or widened to `copy`.
inline const float* row_or_copy(const Replay& p, const Tensor& x, int64_t at, int64_t h, float* copy) {
  const char* const row = row_of(p, x, at, h);
  if (x.type == Type::f32 && x.width % LANES == 0) return reinterpret_cast<const float*>(row);
  widen(row, x.type, x.width, copy);
  return copy;
}

inline void add_row(float* x, const float* y, int64_t width) {
  for (int64_t c = 0; c < width; c += LANES) store(x + c, load(x + c) + load(y + c));
}

// The roundings of a long sum of equal logs add up. So these many tokens are summed apart, and their sum is then added to the total.
constexpr int64_t RECENT = 64;

inline void join_recent(float* sum, float* recent, int64_t width) {
  for (int64_t c = 0; c < width; c += LANES) store(sum + c, load(sum + c) + load(recent + c)), store(recent + c, vec{});
}

// The key of a term in the ring, and how it is decayed: by the sums of log decays if `by_row`, to which `gate` is then added, or by one
// factor.
struct RingKey {
  const float *key, *gate;
  bool by_row;
  float factor;
};

// Multiplies q and e with the decayed key of term i, which it also stores with KEEPS.
template <bool ERASES, bool KEEPS>
inline void read_key(const ReplayRows& x, const RingKey& k, int64_t i) {
  vec by_q = {}, by_e = {};
  for (int64_t c = 0; c < x.rows; c += LANES) {
    vec key = load(k.key + c);
    if (k.by_row) {
      const vec recent = load(x.recent + c);
      key *= exponential(load(x.sum + c) + recent);
      if (k.gate) store(x.recent + c, recent + load(k.gate + c));
    } else {
      key *= broadcast(k.factor);
    }
    if (KEEPS) store(x.keys + i * x.rows + c, key);
    by_q += load(x.reads + c) * key;
    if (ERASES) by_e += load(x.reads + x.rows + c) * key;
  }
  x.by_q[i] = sum(by_q);
  if (ERASES) x.by_e[i] = sum(by_e);
}

// Reads the `count` tokens of the ring, and decays their terms to where e reads. Sums the log decays up to there.
// KEEPS: whether the state is to be written, for which keys and values are stored as they are decayed.
template <bool ERASES, bool KEEPS>
inline void read_ring(const Replay& p, int64_t slot, int64_t h, int64_t count, ReplayRows& x) {
  const bool by_row = p.key.data, by_column = p.value.data;
  float head_sum = p.before_decay ? 0 : x.head_gate, head_recent = 0;
  for (int64_t c = 0; c < x.rows && by_row; ++c) x.sum[c] = p.before_decay ? 0 : x.gate[c], x.recent[c] = 0;
  for (int64_t c = 0; c < x.columns && by_column; ++c) x.column_sum[c] = p.before_decay ? 0 : x.column_gate[c], x.column_recent[c] = 0;
  const auto join = [&] {
    if (by_row) join_recent(x.sum, x.recent, x.rows);
    if (by_column) join_recent(x.column_sum, x.column_recent, x.columns);
    head_sum += head_recent, head_recent = 0;
  };
  for (int64_t token = 1; token <= count; ++token) {
    const int64_t at = slot * p.places + count - token;
    const float factor = by_row || !decays_rows(p) ? 1 : exponential_of(head_sum + head_recent);
    for (int64_t term = x.terms - 1; term >= 0; --term) {
      const Tensor &keys = term ? p.ring_along : p.ring_key, &values = term ? p.ring_erased : p.ring_value;
      const int64_t i = token * x.terms + term;
      const float* const gate = term || !by_row ? nullptr : row_or_copy(p, p.ring_row, at, h, x.whole);
      read_key<ERASES, KEEPS>(x, {row_or_copy(p, keys, at, h, x.row), gate, by_row, factor}, i);
      float* const to = x.value(token, term);
      const float* const value = x.value_rows[i] = row_or_copy(p, values, at, h, to);
      if (by_column) {
        for (int64_t c = 0; c < x.columns; c += LANES)
          store(to + c, load(value + c) * exponential(load(x.column_sum + c) + load(x.column_recent + c)));
        x.value_rows[i] = to;
      } else if (KEEPS && value != to) {
        for (int64_t c = 0; c < x.columns; c += LANES) store(to + c, load(value + c));
      }
    }
    if (by_column) add_row(x.column_recent, row_or_copy(p, p.ring_column, at, h, x.column), x.columns);
    if (p.ring_head.data) head_recent += row_or_copy(p, p.ring_head, at, h, x.row)[0];
    if (token % RECENT == 0) join();
  }
  join();
  for (int64_t c = 0; c < x.rows && !by_row; ++c) x.sum[c] = head_sum;
}

// Prefetches the ring of a head, whose rows are all heads' width apart, so that the hardware does not prefetch them.
inline void prefetch_ring(const Replay& p, int64_t slot, int64_t h, int64_t count) {
  for (const Tensor* x : {&p.ring_key, &p.ring_value, &p.ring_row, &p.ring_column, &p.ring_along, &p.ring_erased}) {
    for (int64_t token = 0; token < count && x->data; ++token) {
      const char* const row = row_of(p, *x, slot * p.places + token, h);
      for (int64_t byte = 0; byte < x->width * x->bytes(); byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }
  }
}

// Reads S_0 for q and e, whose decays then include those of the ring.
template <Type TYPE>
inline void read_stored(const Replay& p, const char* state, const float* scales, ReplayRows& x) {
  const int64_t count = 1 + erases(p);
  for (int64_t i = 0; i < count && decays_rows(p); ++i) decay_row(x.reads + i * x.rows, x.sum, 1, x.rows);
  for (int64_t i = 0; i < count && scales; ++i)
    for (int64_t r = 0; r < p.K; ++r) x.reads[i * x.rows + r] *= scales[r * p.scales / p.K];
  read_state<TYPE>(p, state, {x.reads, x.base, count, x.rows, x.columns});
}

// Sets u and y of the token, and writes its output.
template <bool ERASES>
inline void finish_token(const Replay& p, int64_t b, int64_t h, int64_t count, ReplayRows& x) {
  const bool along = p.along.data;
  for (int64_t c = 0; c < x.columns; c += LANES) {
    vec q = load(x.base + c), e = {}, u = load(x.value(0) + c);
    if (ERASES) e = load(x.base + x.columns + c);
    if (p.value.data) {
      const vec decay = exponential(load(x.column_sum + c));
      q *= decay, e *= decay;
    }
    for (int64_t i = x.terms; i < x.terms * (count + 1); ++i) {
      const vec value = load(x.value_rows[i] + c);
      q += broadcast(x.by_q[i]) * value;
      if (ERASES) e += broadcast(x.by_e[i]) * value;
    }
    if (p.before_decay && p.value.data) q *= exponential(load(x.column_gate + c));
    if (ERASES && along) {
      q -= broadcast(x.by_q[1]) * e;
      store(x.value(0, 1) + c, -e);
    } else if (ERASES) {
      u -= e;
      store(x.value(0) + c, u);
    }
    store(x.column + c, q + broadcast(x.by_q[0]) * u);
  }
  narrow(x.column, row_of(p, p.output, b, h), p.output.type, p.V);
}

// Puts the token into the ring, at place `at` of all. A row that heads share is put by the first of them.
inline void put_token(const Replay& p, int64_t at, int64_t h, const ReplayRows& x) {
  const auto put = [&](const Tensor& ring, const float* row) {
    if (ring.data && h % (p.H / ring.heads) == 0) narrow(row, row_of(p, ring, at, h), ring.type, ring.width);
  };
  put(p.ring_key, x.key(0)), put(p.ring_value, x.value(0)), put(p.ring_head, &x.head_gate);
  put(p.ring_row, x.gate), put(p.ring_column, x.column_gate);
  if (p.along.data) put(p.ring_along, x.key(0, 1)), put(p.ring_erased, x.value(0, 1));
}

// The bits of the largest |x|, which are ordered as the numbers, and NaN last.
inline int32_t largest_of(const float* x, int64_t count) {
  ivec most = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const vec number = state_load<Type::f32>(reinterpret_cast<const char*>(x + i), count - i < LANES ? count - i : LANES);
    const ivec bits = reinterpret_cast<ivec>(number) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found = most[i] > found ? most[i] : found;
  return found;
}

// The largest number of a type of 8 bits, and the factor of rests: COMPACT of serving/stored_states.py.
template <Type TYPE>
constexpr float LARGEST = TYPE == Type::i8 ? 127 : 448;
template <Type TYPE>
constexpr float REST_FACTOR = TYPE == Type::i8 ? 254 : 28;

// Stores a state [K, V] in 8 bits, with the scales of its rows. All numbers of a scale are NaN if one is not finite.
template <Type TYPE>
inline void store_in_8_bits(const Replay& p, const float* state, char* values, char* rests, float* scales) {
  const int64_t numbers = p.K / p.scales * p.V;
  for (int64_t s = 0; s < p.scales; ++s, state += numbers, values += numbers, rests += numbers) {
    const int32_t most = largest_of(state, numbers);
    float scale;
    __builtin_memcpy(&scale, &most, 4);
    scale /= LARGEST<TYPE>;
    const bool finite = scale <= 3.4e38f;
    if (scale < 1.17549435e-38f) scale = 1.17549435e-38f;
    scales[s] = finite ? scale : __builtin_nanf("");
    const vec inverse = broadcast(1 / scale);
    for (int64_t i = 0; i < numbers; i += LANES) {
      const int64_t count = numbers - i < LANES ? numbers - i : LANES;
      const vec x = finite ? state_load<Type::f32>(reinterpret_cast<const char*>(state + i), count) * inverse : vec{};
      const uvec value = TYPE == Type::i8 ? to_i8(x) : to_f8(x);
      const vec number = TYPE == Type::i8 ? from_i8(value) : from_f8(value);
      const vec rest = (x - number) * broadcast(REST_FACTOR<TYPE>);
      store_bytes(values + i, value, count), store_bytes(rests + i, TYPE == Type::i8 ? to_i8(rest) : to_f8(rest), count);
    }
  }
}

// Reads a state of 8 bits with its rests.
template <Type TYPE>
inline void load_of_8_bits(const Replay& p, const char* values, const char* rests, const float* scales, float* state) {
  const vec share = broadcast(1 / REST_FACTOR<TYPE>);
  for (int64_t r = 0; r < p.K; ++r) {
    for (int64_t c = 0; c < p.V; c += LANES) {
      const int64_t count = p.V - c < LANES ? p.V - c : LANES, i = r * p.V + c;
      const vec x = state_load<TYPE>(values + i, count) + state_load<TYPE>(rests + i, count) * share;
      state_store<Type::f32>(reinterpret_cast<char*>(state + i), x * broadcast(scales[r * p.scales / p.K]), count);
    }
  }
}

// Writes S_t in the place of S_0, behind `count` tokens of the ring. index: of the state among those of all slots and heads.
template <Type TYPE>
inline void write_stored(const Replay& p, char* state, int64_t index, int64_t count, ReplayRows& x) {
  const int64_t ring = x.terms * count;
  for (int64_t i = x.terms; i < x.terms + ring && p.before_decay; ++i) {  // decayed to where q reads
    if (decays_rows(p)) decay_row(x.keys + i * x.rows, p.key.data ? x.gate : nullptr, exponential_of(x.head_gate), x.rows);
    if (p.value.data) decay_row(x.values + i * x.columns, x.column_gate, 1, x.columns);
  }
  for (int64_t c = 0; c < x.rows && p.before_decay; ++c) x.sum[c] += p.key.data ? x.gate[c] : x.head_gate;
  if (p.before_decay && p.value.data) add_row(x.column_sum, x.column_gate, x.columns);
  for (int64_t c = 0; c < x.rows; c += LANES) split_decay(load(x.sum + c), x.whole + c, x.rest + c);
  for (int64_t c = 0; c < x.columns && p.value.data; c += LANES) split_decay(load(x.column_sum + c), x.column_whole + c, x.column_rest + c);
  const Terms terms{x.keys, x.values, x.terms + ring, x.rows, x.columns};
  const Decays of_rows{x.whole, x.rest}, of_columns{x.column_whole, x.column_rest};
  if constexpr (TYPE == Type::i8 || TYPE == Type::f8) {
    char* const rests = p.rests + index * p.K * p.V;
    float* const scales = p.scale_of_rows + index * p.scales;
    load_of_8_bits<TYPE>(p, state, rests, scales, x.state);
    add_terms<Type::f32>(p, terms, of_rows, of_columns, reinterpret_cast<char*>(x.state));
    store_in_8_bits<TYPE>(p, x.state, state, rests, scales);
  } else {
    add_terms<TYPE>(p, terms, of_rows, of_columns, state);
  }
}

template <Type TYPE>
inline void replay_head(const Replay& p, int64_t b, int64_t h, int64_t slot, ReplayRows& x) {
  const int64_t length = p.length[slot], index = slot * p.H + h;
  const int64_t count = length < 0 ? 0 : length < p.places ? length : p.places;
  char* const state = p.state.data + index * p.K * p.V * size_of(TYPE);
  const bool is_full = count + 1 >= p.replay;
  read_token(p, b, h, x);
  const auto run = [&](auto erasing) {
    constexpr bool ERASES = decltype(erasing)::value;
    const auto read = is_full ? read_ring<ERASES, true> : read_ring<ERASES, false>;
    read(p, slot, h, count, x);
    if (h + 1 < p.H) prefetch_ring(p, slot, h + 1, count);
    read_stored<TYPE>(p, state, p.rests ? p.scale_of_rows + index * p.scales : nullptr, x);
    finish_token<ERASES>(p, b, h, count, x);
  };
  erases(p) ? run(Count<1>{}) : run(Count<0>{});
  if (is_full) {
    write_stored<TYPE>(p, state, index, count, x);
  } else if (count < p.places) {
    put_token(p, slot * p.places + count, h, x);
  }
}

// Computes head h of sequence b; an absent sequence has output 0.
inline void replay(const Replay& p, int64_t b, int64_t h, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  ReplayRows x(scratch, p);
  const int64_t slot = p.slots ? p.slots[b] : b;
  if (slot < 0 || slot >= p.P) {
    __builtin_memset(row_of(p, p.output, b, h), 0, p.V * p.output.bytes());
    return;
  }
  switch (p.state.type) {
    case Type::f32: return replay_head<Type::f32>(p, b, h, slot, x);
    case Type::bf16: return replay_head<Type::bf16>(p, b, h, slot, x);
    case Type::f16: return replay_head<Type::f16>(p, b, h, slot, x);
    case Type::i8: return replay_head<Type::i8>(p, b, h, slot, x);
    case Type::f8: return replay_head<Type::f8>(p, b, h, slot, x);
  }
}
