// One token of each sequence, from a stored state and the tokens since it was written, which lie in the slot's replay ring:
//
//     S_t = e^{G_t} S_0 + sum_{i < t} e^{G_t - G_i} k_i u_i^T + k_t u_t^T,     o_t = scale S_t^T q_t
//
// G is the sum of the log decays since S_0 was written. The ring holds k_i, u_i and the decays, and with ALONG the second term
// b_i y_i^T. The new token's u_t is v_t, or under the delta rule w_t * v_t - S_bar_t^T e_t; see scan.cu. Where the token is the
// `replay_length`-th since S_0 was written, S_t is written in the place of S_0, and the ring is empty then. The token is appended to
// the ring where that has a place for it. Nothing else of the state is written.
//
// Every exponent is a sum of the log decays that it spans, summed from the newest token on, so the form is exact for all gates.
//
// Roles: a block has one sequence, one head and COLUMNS columns of the state. Every thread first issues its loads, into
// registers: parts of the new token, of up to TOKENS tokens of the ring, and of S_0. A load that is issued behind those of S_0
// waits as long as these. The tokens go to shared memory, where their keys and values are decayed to the new token. Each warp then
// takes the products of some keys with q and e, and all threads read S_0 for q and e together.
//
// Memory: states stream past the caches. The ring is read once by each block of a head, and once more where it is longer than TOKENS
// and the state is written. Its new place is written by one block. The rests of states in 8 bits are loaded where they are needed.
//
// Who waits for whom: a block's stages wait for each other by __syncthreads. Blocks of a sequence do not wait. Each reads the length
// of its slot and then adds ARRIVED to it; the last to arrive knows that all have read, and stores the new length. A slot that two
// sequences of one call have is undefined, its length too, until the slot is flushed or prefilled.
//
// States in 8 bits have a scale for each SCALED rows: S_0 = scale (value + rest / FACTOR). Outputs read no rests, which are what
// values lost by rounding, so they are read where the state is written alone. A block then has all columns, of which a scale is.
//
// Constants that stand before this file: those of scan.cu, of which TOKENS counts tokens of the ring that are staged together; PLACES
// of a ring, at least 1; RING_KEY and RING_VALUE, the dtypes of k_i and u_i in the ring, whose other arrays are in float32; RESIDENT,
// the threads that share a multiprocessor, by which a thread's registers are bounded.

constexpr int TERMS = ALONG >= 0 ? 2 : 1;
constexpr int ARRIVED = 1 << 16;
constexpr bool COMPACT = STATE == INT8 || STATE == FLOAT8;
constexpr int SCALED = K % 32 == 0 ? 32 : K % 16 == 0 ? 16 : K % 8 == 0 ? 8 : K % 4 == 0 ? 4 : K % 2 == 0 ? 2 : 1;  // gcd(K, 32)
constexpr int SCALES = COMPACT ? K / SCALED : 1;
// As BLOCK and COMPACT of serving/stored_states.py.
constexpr float LARGEST = STATE == INT8 ? 127.0f : 448.0f;
constexpr float FACTOR = STATE == INT8 ? 254.0f : 28.0f;
constexpr float SMALLEST = 1.17549435e-38f;  // of a scale
static_assert(!COMPACT || BLOCKS == 1, "a scale is of all columns");

struct Tokens {
  const void *q, *k, *v, *head, *key, *value, *beta, *erase, *write;  // beta: also along
  const float *constant, *scale;
};

struct States {
  void *values, *rests;
  float* scale;
};

// The rings of a pool, or that of one slot, in which offsets have 32 bits.
struct Ring {
  void *key, *value;
  float *head, *row, *column, *along, *y;
};

template <int DTYPE>
__device__ inline void* moved(void* x, long long count) {
  return static_cast<typename Memory<DTYPE>::word*>(x) + count;
}

__device__ inline Ring at_slot(const Ring& of_pool, int slot) {
  constexpr int values = ERASES ? H : HV;
  const long long begin = static_cast<long long>(slot) * PLACES;
  return {moved<RING_KEY>(of_pool.key, begin * HK * K), moved<RING_VALUE>(of_pool.value, begin * values * V),
          of_pool.head + begin * H, of_pool.row + begin * H * K, of_pool.column + begin * H * V,
          of_pool.along + begin * H * K, of_pool.y + begin * H * V};
}

// Arrays by columns begin at multiples of 16 bytes, so that an access of 16 bytes to a thread's columns reaches no others.
struct Staged {
  // The new token, and what it reads S_0 with.
  float q[K], k[K], e[ERASES ? K : 1], along[ALONG >= 0 ? K : 1];
  float q_decayed[K], e_decayed[ERASES ? K : 1];
  float gate[K];  // its log decays
  alignas(16) float column_gate[COLUMNS];  // the same, by columns
  alignas(16) float v[COLUMNS], y[COLUMNS];  // u_t, and y_t
  // Tokens of the ring, decayed.
  float keys[TERMS][TOKENS][K];
  alignas(16) float values[TERMS][TOKENS][COLUMNS];
  float gates[BY_ROW ? TOKENS : 1][BY_ROW ? K : 1], heads[TOKENS];
  alignas(16) float column_gates[VALUE >= 0 ? TOKENS : 1][VALUE >= 0 ? COLUMNS : 1];
  float by_q[TERMS][TOKENS], by_e[TERMS][TOKENS];  // what q and e read of them
  float row_sum[K];  // log decays of the tokens that were staged so far
  alignas(16) float column_sum[COLUMNS];
  Factor rows[K];  // the decay of S_0 as a whole
  alignas(16) Factor columns[COLUMNS];
  alignas(16) float q_of_ring[COLUMNS], e_of_ring[COLUMNS];  // what q and e read of the ring's tokens
  alignas(16) float q_of_state[WARPS][COLUMNS], e_of_state[WARPS][ERASES ? COLUMNS : 1];  // the same of S_0, by each warp's rows
  float by_own[2];  // q k, and q b
  float output_scale;
  float scale[SCALES];
  unsigned int largest[SCALES];  // the bits of the largest |S_t|
};

struct Place {
  int n, h, column, slot;  // the sequence, the head, the block's first column, and the row of the pool
  int length;              // the tokens in its ring
};

__device__ constexpr int shares(int numbers) { return (numbers + THREADS - 1) / THREADS; }

// Calls body(i, share) for a thread's shares of i = 0 to COUNT - 1.
template <int COUNT, typename Body>
__device__ inline void each(Body body) {
#pragma unroll
  for (int share = 0; share < shares(COUNT); ++share) {
    const int i = share * THREADS + threadIdx.x;
    if (COUNT % THREADS == 0 || i < COUNT) body(i, share);
  }
}

// A thread's parts of the new token.
struct TokenLoads {
  float q[shares(K)], k[shares(K)], e[shares(K)], along[ALONG >= 0 ? shares(K) : 1], gate[shares(K)];
  float v[shares(COLUMNS)], gain[shares(COLUMNS)], column_gate[shares(COLUMNS)], output_scale;
  float scale[shares(SCALES)];  // of a state in 8 bits
};

// A thread's parts of tokens of the ring.
struct RingLoads {
  float keys[TERMS][shares(TOKENS * K)], gates[BY_ROW ? shares(TOKENS * K) : 1];
  float values[TERMS][shares(TOKENS * COLUMNS)], column_gates[VALUE >= 0 ? shares(TOKENS * COLUMNS) : 1];
  float head;
};

__device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int across = 1; across < 32; across *= 2) x += __shfl_xor_sync(0xffffffffu, x, across);
  return x;
}

__device__ inline void load_token(TokenLoads& loads, const Tokens& given, const Place& place) {
  constexpr int hq = H / HQ, hk = H / HK, hv = H / HV;
  const int at = place.n * H + place.h;
  const float head = BY_HEAD ? gate<HEAD>(given.head, at) + (CONSTANT >= 0 ? given.constant[at] : 0.0f) : 0.0f;
  const float beta = BETA >= 0 ? gate<BETA>(given.beta, at) : 1.0f;
  loads.output_scale = given.scale[place.n];
  each<K>([&](int row, int share) {
    loads.q[share] = load<DTYPE>(given.q, (place.n * HQ + place.h / hq) * K + row);
    loads.k[share] = load<DTYPE>(given.k, (place.n * HK + place.h / hk) * K + row);
    loads.e[share] = ERASE >= 0 ? gate<ERASE>(given.erase, at * K + row) : beta;
    if (ALONG >= 0) loads.along[share] = gate<ALONG>(given.beta, at * K + row);
    loads.gate[share] = BY_ROW ? gate<KEY>(given.key, at * K + row) : head;
  });
  each<COLUMNS>([&](int i, int share) {
    const int column = place.column + i;
    const bool inside = column < V;
    loads.v[share] = inside ? load<DTYPE>(given.v, (place.n * HV + place.h / hv) * V + column) : 0.0f;
    loads.gain[share] = WRITE >= 0 && inside ? gate<WRITE>(given.write, at * V + column) : beta;
    loads.column_gate[share] = VALUE >= 0 && inside ? gate<VALUE>(given.value, at * V + column) : 0.0f;
  });
}

__device__ inline void store_token(Staged& staged, const TokenLoads& loads) {
  if (threadIdx.x == 0) staged.output_scale = loads.output_scale;
  each<K>([&](int row, int share) {
    staged.q[row] = loads.q[share];
    staged.k[row] = loads.k[share];
    if (ERASES) staged.e[row] = ERASE >= 0 ? loads.e[share] : loads.e[share] * loads.k[share];
    if (ALONG >= 0) staged.along[row] = loads.along[share];
    staged.gate[row] = loads.gate[share];
    staged.row_sum[row] = BEFORE ? 0.0f : loads.gate[share];
  });
  each<COLUMNS>([&](int i, int share) {
    staged.v[i] = ERASES ? loads.v[share] * loads.gain[share] : loads.v[share];
    staged.column_gate[i] = loads.column_gate[share];
    staged.column_sum[i] = BEFORE ? 0.0f : loads.column_gate[share];
    staged.q_of_ring[i] = staged.e_of_ring[i] = 0.0f;
  });
}

// Calls body(token, i, share) for a thread's shares of i = 0 to WIDTH - 1 of `count` tokens, TOKENS at most.
template <int WIDTH, typename Body>
__device__ inline void each_of_tokens(int count, Body body) {
  each<TOKENS * WIDTH>([&](int i, int share) {
    if (i / WIDTH < count) body(i / WIDTH, i % WIDTH, share);
  });
}

// The ring's tokens `first` to `first + count`.
__device__ inline void load_ring(RingLoads& loads, const Ring& ring, const Place& place, int first, int count) {
  constexpr int hk = H / HK, hv = ERASES ? 1 : H / HV, values = H / hv;
  each_of_tokens<K>(count, [&](int token, int row, int share) {
    const int own = ((first + token) * H + place.h) * K + row;
    loads.keys[0][share] = load<RING_KEY>(ring.key, ((first + token) * HK + place.h / hk) * K + row);
    if (TERMS == 2) loads.keys[TERMS - 1][share] = ring.along[own];
    if (BY_ROW) loads.gates[share] = ring.row[own];
  });
  each_of_tokens<COLUMNS>(count, [&](int token, int i, int share) {
    const int column = place.column + i;
    const bool inside = column < V;
    const int own = ((first + token) * H + place.h) * V + column;
    const int shared = ((first + token) * values + place.h / hv) * V + column;
    loads.values[0][share] = inside ? load<RING_VALUE>(ring.value, shared) : 0.0f;
    if (TERMS == 2) loads.values[TERMS - 1][share] = inside ? ring.y[own] : 0.0f;
    if (VALUE >= 0) loads.column_gates[share] = inside ? ring.column[own] : 0.0f;
  });
  if (BY_HEAD && threadIdx.x < count) loads.head = ring.head[(first + static_cast<int>(threadIdx.x)) * H + place.h];
}

__device__ inline void store_ring(Staged& staged, const RingLoads& loads, int count) {
  each_of_tokens<K>(count, [&](int token, int row, int share) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) staged.keys[term][token][row] = loads.keys[term][share];
    if (BY_ROW) staged.gates[token][row] = loads.gates[share];
  });
  each_of_tokens<COLUMNS>(count, [&](int token, int i, int share) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) staged.values[term][token][i] = loads.values[term][share];
    if (VALUE >= 0) staged.column_gates[token][i] = loads.column_gates[share];
  });
  if (BY_HEAD && threadIdx.x < count) staged.heads[threadIdx.x] = loads.head;
}

// Keys and values times their decays up to where the new token reads.
__device__ inline void decay_ring(Staged& staged, int count) {
  if (BY_ROW || BY_HEAD) {
    each<K>([&](int row, int) {
      float sum = staged.row_sum[row];
#pragma unroll
      for (int token = TOKENS - 1; token >= 0; --token) {
        if (token >= count) continue;
        const float decay = expf(sum);
#pragma unroll
        for (int term = 0; term < TERMS; ++term) staged.keys[term][token][row] *= decay;
        sum += BY_ROW ? staged.gates[token][row] : staged.heads[token];
      }
      staged.row_sum[row] = sum;
    });
  }
  if (VALUE >= 0) {
    each<COLUMNS>([&](int column, int) {
      float sum = staged.column_sum[column];
      for (int token = count - 1; token >= 0; --token) {
        const float decay = expf(sum);
#pragma unroll
        for (int term = 0; term < TERMS; ++term) staged.values[term][token][column] *= decay;
        sum += staged.column_gates[token][column];
      }
      staged.column_sum[column] = sum;
    });
  }
}

// The new token's q, which with BEFORE reads behind one more decay than e.
__device__ inline float query_of(const Staged& staged, int row) {
  return BEFORE && (BY_ROW || BY_HEAD) ? staged.q[row] * expf(staged.gate[row]) : staged.q[row];
}

// What q and e read of the keys of the ring's tokens, and, with `own`, what q reads of the new token's k and b.
__device__ inline void read_keys(Staged& staged, int count, bool own) {
  for (int token = threadIdx.x / 32; token < count + own; token += WARPS) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
      float by_q = 0.0f, by_e = 0.0f;
      for (int row = threadIdx.x % 32; row < K; row += 32) {
        if (token == count) {
          by_q = fmaf(staged.q[row], term == 0 ? staged.k[row] : staged.along[ALONG >= 0 ? row : 0], by_q);
        } else {
          const float key = staged.keys[term][token][row];
          by_q = fmaf(query_of(staged, row), key, by_q);
          if (ERASES) by_e = fmaf(staged.e[row], key, by_e);
        }
      }
      by_q = sum_of_warp(by_q);
      if (ERASES) by_e = sum_of_warp(by_e);
      if (threadIdx.x % 32 != 0) continue;
      if (token == count) {
        staged.by_own[term] = by_q;
      } else {
        staged.by_q[term][token] = by_q;
        staged.by_e[term][token] = by_e;
      }
    }
  }
}

// What q and e read of the ring's tokens: by_q and by_e times their values, added to what was read of later tokens.
__device__ inline void read_values(Staged& staged, int count) {
  each<COLUMNS>([&](int column, int) {
    float q = staged.q_of_ring[column], e = staged.e_of_ring[column];
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
      if (token >= count) continue;
#pragma unroll
      for (int term = 0; term < TERMS; ++term) {
        const float value = staged.values[term][token][column];
        q = fmaf(staged.by_q[term][token], value, q);
        if (ERASES) e = fmaf(staged.by_e[term][token], value, e);
      }
    }
    staged.q_of_ring[column] = q;
    staged.e_of_ring[column] = e;
  });
}

// What q and e read S_0 with. A thread has the rows that it has in decay_ring.
__device__ inline void prepare_read(Staged& staged) {
  each<K>([&](int row, int) {
    float decay = BY_ROW || BY_HEAD ? expf(staged.row_sum[row]) : 1.0f;
    if (COMPACT) decay *= staged.scale[row / SCALED];
    staged.q_decayed[row] = query_of(staged, row) * decay;
    if (ERASES) staged.e_decayed[row] = staged.e[row] * decay;
  });
}

// The decay of S_0 as a whole, for a thread's rows and columns as above.
__device__ inline void prepare_fold(Staged& staged) {
  each<K>([&](int row, int) {
    if (BY_ROW || BY_HEAD) staged.rows[row] = factor_of(staged.row_sum[row] + (BEFORE ? staged.gate[row] : 0.0f));
  });
  each<COLUMNS>([&](int i, int) {
    if (VALUE >= 0) staged.columns[i] = factor_of(staged.column_sum[i] + (BEFORE ? staged.column_gate[i] : 0.0f));
  });
}

// u_t and y_t, the output, and the new token's values in the ring, of which `count` tokens are staged.
__device__ inline void finish(Staged& staged, const Ring& ring, const Place& place, void* o, int count) {
  read_values(staged, count);
  const bool appends = place.length < PLACES;
  const int at = place.length;
  each<COLUMNS>([&](int i, int) {
    const int column = place.column + i;
    const float decay = VALUE >= 0 ? expf(staged.column_sum[i]) : 1.0f;
    float q = 0.0f, e = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      q += staged.q_of_state[warp][i];
      if (ERASES) e += staged.e_of_state[warp][i];
    }
    q = fmaf(q, decay, staged.q_of_ring[i]);
    e = fmaf(e, decay, staged.e_of_ring[i]);
    if (BEFORE && VALUE >= 0) q *= expf(staged.column_gate[i]);
    float u = staged.v[i], y = 0.0f;
    if (ERASES) (ALONG >= 0 ? y : u) -= e;
    q = fmaf(staged.by_own[0], u, q);
    if (ALONG >= 0) q = fmaf(staged.by_own[1], y, q);
    staged.v[i] = u;
    staged.y[i] = y;
    if (column >= V) return;
    store<DTYPE>(o, (place.n * H + place.h) * V + column, q * staged.output_scale);
    if (!appends) return;
    if (ERASES) {
      store<RING_VALUE>(ring.value, (at * H + place.h) * V + column, u);
    } else if (place.h % (H / HV) == 0) {
      store<RING_VALUE>(ring.value, (at * HV + place.h / (H / HV)) * V + column, u);
    }
    if (ALONG >= 0) ring.y[(at * H + place.h) * V + column] = y;
    if (VALUE >= 0) ring.column[(at * H + place.h) * V + column] = staged.column_gate[i];
  });
}

// The new token's keys and decays in the ring: one block of a head writes them.
__device__ inline void append(const Staged& staged, const Ring& ring, const Place& place) {
  if (place.length >= PLACES || place.column != 0) return;
  const int at = place.length;
  each<K>([&](int row, int) {
    const int own = (at * H + place.h) * K + row;
    if (place.h % (H / HK) == 0) store<RING_KEY>(ring.key, (at * HK + place.h / (H / HK)) * K + row, staged.k[row]);
    if (BY_ROW) ring.row[own] = staged.gate[row];
    if (ALONG >= 0) ring.along[own] = staged.along[row];
  });
  if (BY_HEAD && threadIdx.x == 0) ring.head[at * H + place.h] = staged.gate[0];
}

using Held = Pack<STATE, VECTOR>;
constexpr int RESTS = COMPACT ? ROWS : 1;

// A thread's part of the rests of a state.
__device__ inline void load_rests(Held (&held)[RESTS], const void* stored, long long tile, bool inside) {
#pragma unroll
  for (int r = 0; r < RESTS; ++r) {
    const int row = r * LINES + static_cast<int>(threadIdx.x) / LANES;
    if (row < K && inside) load_pack(held[r], stored, tile + static_cast<long long>(row) * V);
  }
}

// One row of S_0, decayed, and the new token's part.
__device__ inline void behind_token(float (&s)[VECTOR], const Staged& staged, int row) {
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) {
    const int column = threadIdx.x % LANES * VECTOR + c;
    float added = staged.k[row] * staged.v[column];
    if (ALONG >= 0) added = fmaf(staged.along[row], staged.y[column], added);
    Factor f = {0.0f, 1.0f};
    if (BY_ROW || BY_HEAD) f = staged.rows[row];
    if (VALUE >= 0) f = both(f, staged.columns[column]);
    s[c] = decayed(s[c], f, added);
  }
}

// The same row, and the parts of the ring's tokens that are staged.
__device__ inline void behind_ring(float (&s)[VECTOR], const Staged& staged, int row, int count) {
  float added[VECTOR] = {};
#pragma unroll 1  // unrolled, it takes more registers than there are
  for (int token = 0; token < count; ++token) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
      const float key = staged.keys[term][token][row];
#pragma unroll
      for (int c = 0; c < VECTOR; ++c) {
        added[c] = fmaf(key, staged.values[term][token][threadIdx.x % LANES * VECTOR + c], added[c]);
      }
    }
  }
  const float up = BEFORE && (BY_ROW || BY_HEAD) ? expf(staged.gate[row]) : 1.0f;
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) {
    if (BEFORE && VALUE >= 0) added[c] *= expf(staged.column_gate[threadIdx.x % LANES * VECTOR + c]);
    s[c] = fmaf(up, added[c], s[c]);
  }
}

// S_t in the place of S_0, where the whole ring is staged.
__device__ inline void fold(const Staged& staged, const Place& place, const Held (&held)[ROWS], void* states, long long tile,
                            bool inside) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = r * LINES + static_cast<int>(threadIdx.x) / LANES;
    if (row >= K || !inside) continue;
    float s[VECTOR];
    unpack(held[r], s);
    behind_token(s, staged, row);
    behind_ring(s, staged, row, place.length);
    store_streaming<STATE>(states, tile + static_cast<long long>(row) * V, s);
  }
}

// S_t in registers, in float32, where the ring is longer than what is staged: tokens are then staged again, from the newest.
__device__ inline void fold_kept(float (&S)[ROWS][VECTOR], Staged& staged, const Ring& ring, const Place& place, bool inside) {
  const int line = threadIdx.x / LANES;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (r * LINES + line < K && inside) behind_token(S[r], staged, r * LINES + line);
  }
  const bool again = place.length > TOKENS;
  if (again) {
    each<K>([&](int row, int) { staged.row_sum[row] = BEFORE ? 0.0f : staged.gate[row]; });
    each<COLUMNS>([&](int i, int) { staged.column_sum[i] = BEFORE ? 0.0f : staged.column_gate[i]; });
  }
  for (int last = place.length; last > 0; last -= TOKENS) {
    const int first = max(0, last - TOKENS), count = last - first;
    if (again) {
      __syncthreads();
      RingLoads loads;
      load_ring(loads, ring, place, first, count);
      store_ring(staged, loads, count);
      __syncthreads();
      decay_ring(staged, count);
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r * LINES + line < K && inside) behind_ring(S[r], staged, r * LINES + line, count);
    }
  }
}

// S_t in the place of S_0, where the whole ring is not staged.
__device__ inline void fold_long(Staged& staged, const Ring& ring, const Place& place, const Held (&held)[ROWS], void* states,
                                 long long tile, bool inside) {
  const int line = threadIdx.x / LANES;
  float S[ROWS][VECTOR] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (r * LINES + line < K && inside) unpack(held[r], S[r]);
  }
  fold_kept(S, staged, ring, place, inside);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const long long row = r * LINES + line;
    if (row < K && inside) store_streaming<STATE>(states, tile + row * V, S[r]);
  }
}

__device__ inline float scale_of(unsigned int largest) {
  const float scale = __uint_as_float(largest) / LARGEST;
  return scale <= 3.4e38f ? max(scale, SMALLEST) : __uint_as_float(0x7fc00000u);  // NaN where a number is not finite
}

// States in 8 bits, with new scales. All numbers of SCALED rows are NaN if one is not finite. Where the whole ring is staged, the
// state is formed twice, which takes fewer registers than to hold it.
template <bool KEEPS>
__device__ inline void fold_compact(Staged& staged, const Ring& ring, const Place& place, const Held (&held)[ROWS],
                                    const Held (&held_rests)[RESTS], const States& states, long long tile, bool inside) {
  const int line = threadIdx.x / LANES;
  float S[KEEPS ? ROWS : 1][VECTOR] = {};
  const auto stored = [&](float (&s)[VECTOR], int r) {
    const int row = r * LINES + line;
    float rests[VECTOR];
    unpack(held_rests[COMPACT ? r : 0], rests);
    unpack(held[r], s);
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) s[c] = fmaf(rests[c], 1.0f / FACTOR, s[c]) * staged.scale[row / SCALED];
    if (KEEPS) return;
    behind_token(s, staged, row);
    behind_ring(s, staged, row, place.length);
  };
  if constexpr (KEEPS) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r * LINES + line < K && inside) stored(S[r], r);
    }
    fold_kept(S, staged, ring, place, inside);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const bool is_here = r * LINES + line < K && inside;
    if (!KEEPS && is_here) stored(S[0], r);
    unsigned int largest = 0;  // of the bits of |S_t|, which are ordered as the numbers, and NaN last
#pragma unroll
    for (int c = 0; c < VECTOR && is_here; ++c) largest = max(largest, __float_as_uint(S[KEEPS ? r : 0][c]) & 0x7fffffffu);
#pragma unroll
    for (int across = 1; across < LANES; across *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, __uint_as_float(largest), across);
      largest = max(largest, __float_as_uint(other));
    }
    if (is_here && threadIdx.x % LANES == 0) atomicMax(&staged.largest[(r * LINES + line) / SCALED], largest);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = r * LINES + line;
    if (row >= K || !inside) continue;
    if (!KEEPS) stored(S[0], r);
    const float scale = scale_of(staged.largest[row / SCALED]), inverse = 1.0f / scale;
    float values[VECTOR], rests[VECTOR];
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) {
      const float x = scale == scale ? S[KEEPS ? r : 0][c] * inverse : 0.0f;
      values[c] = to_float<STATE>(to_bits<STATE>(x));
      rests[c] = (x - values[c]) * FACTOR;
    }
    store_streaming<STATE>(states.values, tile + static_cast<long long>(row) * V, values);
    store_streaming<STATE>(states.rests, tile + static_cast<long long>(row) * V, rests);
  }
  each<SCALES>([&](int i, int) {
    states.scale[(static_cast<long long>(place.slot) * H + place.h) * SCALES + i] = scale_of(staged.largest[i]);
  });
}

// The results lie where the operands of the same names do.
// The registers of a thread are such that RESIDENT threads share a multiprocessor.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS < RESIDENT ? RESIDENT / THREADS : 1) replay(
    const void* q, const void* k, const void* v, const void* head, const void* key, const void* value,
    const float* constant, const float* scale, const void* beta, const void* erase, const void* write,
    const int* slots, void* values, void* rests, float* scales, void* ring_key, void* ring_value, float* ring_head,
    float* ring_row, float* ring_column, float* ring_along, float* ring_y, int* length, int* drafted,
    void* o, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, int P, int replay_length) {
  __shared__ Staged staged;
  const Tokens given = {q, k, v, head, key, value, beta, erase, write, constant, scale};
  const int lane = threadIdx.x % LANES, line = threadIdx.x / LANES;
  Place place;
  place.column = blockIdx.x % BLOCKS * COLUMNS;
  place.h = blockIdx.x / BLOCKS % H;
  place.n = blockIdx.x / (BLOCKS * H);
  place.slot = slots == nullptr ? place.n : slots[place.n];
  const bool inside = place.column + lane * VECTOR < V;
  if (place.slot < 0 || place.slot >= P) {  // no sequence
    each<COLUMNS>([&](int i, int) {
      if (place.column + i < V) store<DTYPE>(o, (place.n * H + place.h) * V + place.column + i, 0.0f);
    });
    return;
  }
  const Ring of_pool = {ring_key, ring_value, ring_head, ring_row, ring_column, ring_along, ring_y};
  const Ring ring = at_slot(of_pool, place.slot);
  const long long tile = (static_cast<long long>(place.slot) * H + place.h) * K * V + place.column + lane * VECTOR;
  place.length = min(length[place.slot] % ARRIVED, PLACES);
  int first = max(0, place.length - TOKENS), count = place.length - first;
  TokenLoads token;
  RingLoads loads;
  Held held[ROWS];
  load_token(token, given, place);
  load_ring(loads, ring, place, first, count);
  const long long scaled = (static_cast<long long>(place.slot) * H + place.h) * SCALES;
  each<SCALES>([&](int i, int share) {
    if (COMPACT) token.scale[share] = scales[scaled + i];
  });
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = r * LINES + line;
    if (row < K && inside) load_pack(held[r], values, tile + static_cast<long long>(row) * V);
  }
  store_token(staged, token);
  store_ring(staged, loads, count);
  each<SCALES>([&](int i, int share) {
    if (!COMPACT) return;
    staged.scale[i] = token.scale[share];
    staged.largest[i] = 0;
  });
  __syncthreads();
  const int arrived = threadIdx.x == 0 ? atomicAdd(&length[place.slot], ARRIVED) / ARRIVED : 0;
  while (PLACES > TOKENS && first > 0) {
    decay_ring(staged, count);
    __syncthreads();
    read_keys(staged, count, false);
    __syncthreads();
    read_values(staged, count);
    __syncthreads();
    count = min(TOKENS, first);
    first -= count;
    load_ring(loads, ring, place, first, count);
    store_ring(staged, loads, count);
    __syncthreads();
  }
  decay_ring(staged, count);
  prepare_read(staged);
  __syncthreads();
  read_keys(staged, count, true);
  float by_q[VECTOR] = {}, by_e[VECTOR] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = r * LINES + line;
    if (row >= K || !inside) continue;
    float s[VECTOR];
    unpack(held[r], s);
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) {
      by_q[c] = fmaf(s[c], staged.q_decayed[row], by_q[c]);
      if (ERASES) by_e[c] = fmaf(s[c], staged.e_decayed[row], by_e[c]);
    }
  }
  const bool full = place.length + 1 >= replay_length;
  Held held_rests[RESTS];
  if (COMPACT && full) load_rests(held_rests, rests, tile, inside);
  sum_over_rows(by_q, staged.q_of_state);
  if (ERASES) sum_over_rows(by_e, staged.e_of_state);
  __syncthreads();
  finish(staged, ring, place, o, count);
  append(staged, ring, place);
  if (threadIdx.x == 0 && arrived == H * BLOCKS - 1) {
    length[place.slot] = full ? 0 : place.length + 1;
    drafted[place.slot] = 0;
  }
  if (!full) return;
  prepare_fold(staged);
  __syncthreads();
  if (COMPACT) {
    fold_compact<(PLACES > TOKENS)>(staged, ring, place, held, held_rests, {values, rests, scales}, tile, inside);
  } else if (PLACES <= TOKENS) {
    fold(staged, place, held, values, tile, inside);
  } else {
    fold_long(staged, ring, place, held, values, tile, inside);
  }
}
