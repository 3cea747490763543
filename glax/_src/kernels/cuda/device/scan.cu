// The recurrence token by token, the state in registers:
//
//     S_t = diag(e^{rows_t}) S_{t-1} diag(e^{value_t}) + k_t v_t^T,     o_t = scale S_t^T q_t
//
// rows_t is key_t, head_t or the constant: a call has at most one of them. The delta rule erases before it writes:
//
//     S_bar_t = diag(e^{rows_t}) S_{t-1} diag(e^{value_t}),     S_t = S_bar_t + k_t (w_t * v_t - S_bar_t^T e_t)^T
//
// with e = beta k and w = beta, or with e and w given (w = 1 if absent). With BEFORE, e reads S_{t-1} in the place of S_bar_t. With
// ALONG, what e reads is taken from the state along a key b of its own: S_t = S_bar_t + k_t (w_t * v_t)^T - b_t (S_bar_t^T e_t)^T.
// A block has one sequence, one head and COLUMNS columns of the state. A thread holds VECTOR neighbouring columns of every
// LINES-th row, ROWS rows in all. In a pool, a negative slot is no sequence, and its outputs are 0.
//
// Constants that stand before this file: H, HQ, HK, HV heads; K, V; THREADS, LANES, VECTOR; TOKENS staged in shared memory at a time;
// DTYPE of q, k, v and o; CONSTANT, HEAD, KEY, VALUE, BETA, ERASE, WRITE, ALONG: -1 for an absent array, else its dtype (float32
// for CONSTANT; ALONG lies in the operand of BETA, which then is absent); BEFORE; STATE the dtype of initial states, or -1; STATES where they lie; SINGLE, PACKED, REVERSE: 0 or 1. With SINGLE, a
// sequence is one token.

// Initial states of sequence n lie in row n, and final states go to another array, in float32; or both are the rows of a pool;
// or initial states are the rows of a pool, and there are no final states.
enum States { APART = 0, POOL_UPDATED = 1, POOL_READ = 2 };

constexpr bool STORES = STATES != POOL_READ;
constexpr int STORED = STATES == APART ? FLOAT32 : (STATE < 0 ? 0 : STATE);

// What the threads of a block share of TOKENS tokens. `erased` comes first, at a multiple of 16 bytes, because the compiler reads a
// thread's columns 16 bytes at a time: at another offset such an access reached beyond them, into those of the next token, which a
// warp that is ahead may be writing.
struct Staged {
  float erased[ERASES ? 2 : 1][WARPS][ERASES ? COLUMNS : 1];  // of S_bar^T e over the rows of each warp, for even and odd tokens
  float q[TOKENS][K];
  float k[TOKENS][K];
  Factor rows[BY_ROW ? TOKENS : 1][BY_ROW ? K : 1];
  Factor columns[VALUE >= 0 ? TOKENS : 1][VALUE >= 0 ? COLUMNS : 1];
  Factor head[TOKENS];
  float v[TOKENS][COLUMNS];
  float sums[TOKENS][WARPS][COLUMNS];  // of S^T q over the rows of each warp
  float e[ERASES ? TOKENS : 1][ERASES ? K : 1];
  float along[ALONG >= 0 ? TOKENS : 1][ALONG >= 0 ? K : 1];
};

struct Operands {
  const void *q, *k, *v, *head, *key, *value, *beta, *erase, *write;  // beta: also along
  const float *constant, *scale;
};

struct Place {
  int n, h, column;   // the sequence, the head, and the block's first column
  int begin, count;   // its rows of q, k and v
  int slot;           // the row of its state
  __device__ long long tile() const { return (static_cast<long long>(slot) * H + h) * K * V; }
  __device__ int row(int token) const { return REVERSE ? begin + count - 1 - token : begin + token; }
};

__device__ inline void stage(Staged& staged, const Operands& given, const Place& place, int first, int count) {
  constexpr int hq = H / HQ, hk = H / HK, hv = H / HV;
  for (int i = threadIdx.x; i < count * K; i += THREADS) {
    const int token = i / K, row = i % K;
    const long long at = place.row(first + token);
    staged.q[token][row] = load<DTYPE>(given.q, (at * HQ + place.h / hq) * K + row);
    staged.k[token][row] = load<DTYPE>(given.k, (at * HK + place.h / hk) * K + row);
    if (BY_ROW) staged.rows[token][row] = factor_of(gate<KEY>(given.key, (at * H + place.h) * K + row));
    if (BETA >= 0) staged.e[token][row] = gate<BETA>(given.beta, at * H + place.h) * staged.k[token][row];
    if (ERASE >= 0) staged.e[token][row] = gate<ERASE>(given.erase, (at * H + place.h) * K + row);
    if (ALONG >= 0) staged.along[token][row] = gate<ALONG>(given.beta, (at * H + place.h) * K + row);
  }
  for (int i = threadIdx.x; i < count * COLUMNS; i += THREADS) {
    const int token = i / COLUMNS, column = place.column + i % COLUMNS;
    const long long at = place.row(first + token);
    const bool inside = column < V;
    float v = inside ? load<DTYPE>(given.v, (at * HV + place.h / hv) * V + column) : 0.0f;
    if (BETA >= 0) v *= gate<BETA>(given.beta, at * H + place.h);
    if (WRITE >= 0 && inside) v *= gate<WRITE>(given.write, (at * H + place.h) * V + column);
    staged.v[token][i % COLUMNS] = v;
    if (VALUE >= 0) {
      const float g = inside ? gate<VALUE>(given.value, (at * H + place.h) * V + column) : 0.0f;
      staged.columns[token][i % COLUMNS] = factor_of(g);
    }
  }
  if (BY_HEAD) {
    for (int token = threadIdx.x; token < count; token += THREADS) {
      const long long at = place.row(first + token);
      const float constant = CONSTANT >= 0 ? given.constant[place.n * H + place.h] : 0.0f;
      staged.head[token] = factor_of(constant + gate<HEAD>(given.head, at * H + place.h));
    }
  }
}

// The decay of one row of the state in column c of the thread.
__device__ inline Factor decay_of(const Staged& staged, int token, int row, int c) {
  const Factor column = VALUE >= 0 ? staged.columns[token][threadIdx.x % LANES * VECTOR + c] : Factor{0.0f, 1.0f};
  Factor f = column;
  if (BY_HEAD) f = staged.head[token];
  if (BY_ROW) f = VALUE >= 0 ? both(staged.rows[token][row], column) : staged.rows[token][row];
  return f;
}

// S decayed, and `added`.
__device__ inline float advanced(float S, const Staged& staged, int token, int row, int c, float added) {
  return BY_ROW || BY_HEAD || VALUE >= 0 ? decayed(S, decay_of(staged, token, row, c), added) : S + added;
}

// One row of the state, VECTOR columns, behind one more token; its part of S^T q is added to `out`. y is what is written along.
__device__ inline void advance_row(float (&s)[VECTOR], float (&out)[VECTOR], const float (&v)[VECTOR], const float (&y)[VECTOR],
                                   const Staged& staged, int token, int row) {
  const float k = staged.k[token][row], q = staged.q[token][row];
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) {
    float added = k * v[c];
    if (ALONG >= 0) added = fmaf(staged.along[token][row], y[c], added);
    s[c] = advanced(s[c], staged, token, row, c, added);
    out[c] = fmaf(s[c], q, out[c]);
  }
}

// One row's part of S_bar^T e, or with BEFORE of S^T e, is added to `sum`.
__device__ inline void read_row(float (&sum)[VECTOR], const float (&s)[VECTOR], const Staged& staged, int token, int row) {
  const float e = staged.e[token][row];
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) sum[c] = fmaf(BEFORE ? s[c] : advanced(s[c], staged, token, row, c, 0.0f), e, sum[c]);
}

__device__ inline void values_of(float (&v)[VECTOR], const Staged& staged, int token) {
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) v[c] = staged.v[token][threadIdx.x % LANES * VECTOR + c];
}

// v becomes v - S_bar^T e, or with ALONG y becomes -S_bar^T e, with the sums of all warps. A block that is two tokens ahead
// overwrites them, so none waits behind it.
__device__ inline void erase(float (&v)[VECTOR], float (&y)[VECTOR], float (&sum)[VECTOR], Staged& staged, int token) {
  auto& sums = staged.erased[token % 2];
  sum_over_rows(sum, sums);
  __syncthreads();
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) {
    float whole = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) whole += sums[warp][threadIdx.x % LANES * VECTOR + c];
    (ALONG >= 0 ? y : v)[c] -= whole;
  }
}

__device__ inline void emit(const Staged& staged, void* o, const Place& place, float scale, int first, int count) {
  for (int i = threadIdx.x; i < count * COLUMNS; i += THREADS) {
    const int token = i / COLUMNS, column = place.column + i % COLUMNS;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += staged.sums[token][warp][i % COLUMNS];
    if (column < V) store<DTYPE>(o, (static_cast<long long>(place.row(first + token)) * H + place.h) * V + column, sum * scale);
  }
}

// Zeros at rows that hold no token of any sequence, or tokens of a sequence without a slot.
__device__ inline void emit_zeros(void* o, const Place& place, int begin, int end) {
  for (int i = threadIdx.x; i < (end - begin) * COLUMNS; i += THREADS) {
    const int row = begin + i / COLUMNS, column = place.column + i % COLUMNS;
    if (column < V) store<DTYPE>(o, (static_cast<long long>(row) * H + place.h) * V + column, 0.0f);
  }
}

// One token, the state from its place and back. Each thread holds its part as it is stored until it is used: states in
// 16 bits then take half the registers.
__device__ inline void step(Staged& staged, const Operands& given, const Place& place, const void* pool, void* after, void* o,
                            long long tile) {
  using Held = Pack<(STATE < 0 ? 0 : STATE), VECTOR>;
  const int lane = threadIdx.x % LANES, line = threadIdx.x / LANES;
  const bool inside = place.column + lane * VECTOR < V;
  Held held[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = r * LINES + line;
    if (row < K && inside) load_pack(held[r], pool, tile + row * V);
  }
  stage(staged, given, place, 0, 1);
  __syncthreads();
  float v[VECTOR], y[VECTOR] = {}, out[VECTOR] = {};
  values_of(v, staged, 0);
  if (ERASES) {
    float sum[VECTOR] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = r * LINES + line;
      if (row < K && inside) {
        float s[VECTOR];
        unpack(held[r], s);
        read_row(sum, s, staged, 0, row);
      }
    }
    erase(v, y, sum, staged, 0);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = r * LINES + line;
    if (row < K && inside) {
      float s[VECTOR];
      unpack(held[r], s);
      advance_row(s, out, v, y, staged, 0, row);
      if (STORES) store_streaming<STORED>(after, tile + row * V, s);
    }
  }
  sum_over_rows(out, staged.sums[0]);
  __syncthreads();
  emit(staged, o, place, given.scale[place.n], 0, 1);
}

// `count` tokens, the state in registers.
__device__ inline void tokens(Staged& staged, const Operands& given, const Place& place, const void* initial, void* final, void* o,
                              long long tile) {
  const int lane = threadIdx.x % LANES, line = threadIdx.x / LANES;
  const int column = place.column + lane * VECTOR;
  float S[ROWS][VECTOR] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = r * LINES + line;
    if (STATE >= 0 && row < K && column < V) load_streaming<(STATE < 0 ? 0 : STATE)>(initial, tile + row * V, S[r]);
  }
  for (int first = 0; first < place.count; first += TOKENS) {
    const int count = min(TOKENS, place.count - first);
    stage(staged, given, place, first, count);
    __syncthreads();
    for (int token = 0; token < count; ++token) {
      float v[VECTOR], y[VECTOR] = {}, out[VECTOR] = {};
      values_of(v, staged, token);
      if (ERASES) {
        float sum[VECTOR] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const int row = r * LINES + line;
          if (row < K) read_row(sum, S[r], staged, token, row);
        }
        erase(v, y, sum, staged, token);
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = r * LINES + line;
        if (row < K) advance_row(S[r], out, v, y, staged, token, row);
      }
      sum_over_rows(out, staged.sums[token]);
    }
    __syncthreads();
    emit(staged, o, place, given.scale[place.n], first, count);
  }
  if (!STORES) return;
  const long long last = place.tile() + column;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = r * LINES + line;
    if (row < K && column < V) store_streaming<STORED>(final, last + row * V, S[r]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) scan(
    const void* q, const void* k, const void* v, const void* head, const void* key, const void* value,
    const float* constant, const float* scale, const void* beta, const void* erase, const void* write,
    const int* boundaries, const int* slots, const void* initial, void* o, void* final, int T, int N) {
  __shared__ Staged staged;
  const Operands given = {q, k, v, head, key, value, beta, erase, write, constant, scale};
  const int block = blockIdx.x % BLOCKS;
  Place place;
  place.h = blockIdx.x / BLOCKS % H;
  place.n = blockIdx.x / (BLOCKS * H);
  place.column = block * COLUMNS;
  if (PACKED) {
    const int begin = min(max(boundaries[place.n], 0), T), end = min(max(boundaries[place.n + 1], 0), T);
    place.begin = begin;
    place.count = max(end - begin, 0);
    if (place.n == 0) emit_zeros(o, place, 0, begin);
    if (place.n == N - 1) emit_zeros(o, place, max(begin, end), T);
  } else {
    place.begin = place.n * T;
    place.count = T;
  }
  place.slot = STATES == APART ? place.n : slots[place.n];
  if (place.slot < 0) {
    emit_zeros(o, place, place.begin, place.begin + place.count);
    return;
  }
  const long long tile = place.tile() + place.column + threadIdx.x % LANES * VECTOR;
  if (SINGLE) {
    step(staged, given, place, initial, final, o, tile);
  } else {
    tokens(staged, given, place, initial, final, o, tile);
  }
}
