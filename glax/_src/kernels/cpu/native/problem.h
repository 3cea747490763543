// The interface of the kernels: their arguments, and the table of functions that each instruction set provides.
#pragma once
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)
#error "glax's kernels compare with infinities and order their sums: compile without -ffast-math"
#endif

#include <cstdint>

namespace glax {

// Two of 8 bits, of stored states alone: int8, and float8 with 4 bits of exponent and 3 of fraction.
enum class Type : int { f32, bf16, f16, i8, f8 };

constexpr int64_t size_of(Type type) {
  if (type == Type::f32) return 4;
  return type == Type::bf16 || type == Type::f16 ? 2 : 1;
}

// An array [B, T, heads, width]. `data` is null where the recurrence has no such array.
struct Tensor {
  char* data = nullptr;
  Type type = Type::f32;
  int64_t heads = 1, width = 0;

  int64_t bytes() const { return size_of(type); }
};

// Bounds of |G|, the sum of log decays since the state was last scaled, over rows and columns together.
// glax/_src/kernels/common/limits.py derives them.
namespace limits {
constexpr float wide = 40;
constexpr float narrow = 1;     // used instead where e^wide overflows float32 or e^-wide underflows
constexpr float faint = 1e-13;  // rows whose largest element is smaller lose digits to e^-wide
}  // namespace limits

// The tokens of rows that are divided further: what each does to the state before it.
enum Mark : int32_t { continues = 0, resets = 1, padding = 2 };

// S_t = exp(head_t) diag(exp(key_t)) S_{t-1} diag(exp(value_t)) + k_t v_t^T,   o_t = scale * S_t^T q_t,   and its gradient.
struct Problem {
  int64_t B, T, N, H, K, V;
  bool reverse;
  int64_t block;  // tokens between two rescalings of the state, at most
  float limit = limits::wide;
  const int32_t* boundaries = nullptr;  // [N + 1], or N = B sequences lie side by side
  const int32_t* marks = nullptr;       // [B, T], not with boundaries: see Mark; null: every row is one run of tokens
  Tensor q, k, v, head, key, value;
  Tensor beta, erase, write;        // the delta rule: beta [B, T, H], or erase [B, T, H, K] and write [B, T, H, V] or none
  const float* constant = nullptr;  // [N, H]
  const float* initial = nullptr;   // [N, H, K, V]
  const float* scale = nullptr;     // [N]

  // Forward.
  Tensor output;
  float* final_state = nullptr;  // [N, H, K, V]

  // Gradient. dq, dk and dv have H heads, or fewer that divide H: each is then the sum over consecutive heads, in their order, in float32.
  // Arrays [groups, ...] hold one partial sum for each `group` of the K columns; the caller adds them up.
  Tensor d_output, dq, dk, dv;
  const float* d_final = nullptr;                       // [N, H, K, V]
  // [groups, B, T, H], [B, T, H, K], [B, T, H, V]. A constant gate needs d_head too: d_constant is its sum over tokens.
  float *d_head = nullptr, *d_key = nullptr, *d_value = nullptr;
  float* d_initial = nullptr;                       // [N, H, K, V]
  float *d_constant = nullptr, *d_scale = nullptr;  // [groups, segments, H]
  int64_t segments;
  // The delta rule alone: [B, T, H], [B, T, H, K], [B, T, H, V]. It has one partial sum.
  float *d_beta = nullptr, *d_erase = nullptr, *d_write = nullptr;
};

// The tokens of one scan: a sequence, or a part of one where sequences and heads are few (segments.h).
struct Segment {
  int64_t sequence = 0, example = 0, index = 0;  // row of constant; row of the [B, ...] arrays; row of d_constant and d_scale
  int64_t first = 0, length = 0;                 // tokens
  const float *initial = nullptr, *d_final = nullptr;  // [H, K, V]; a null initial state is zero
  float *final_state = nullptr, *d_initial = nullptr;  // [H, K, V]; null: not computed
  double* decay = nullptr;                             // [H, K + V]
  int64_t run = 0;     // segments with the same number are parts of one run of tokens
  bool fresh = false;  // its first token resets the state: that token's gates have no effect and no gradient
};

// Heads [first, last), scanned by one task.
struct Heads {
  static constexpr int64_t most = 8;
  int64_t first, last;

  int64_t count() const { return last - first; }
};

// The smallest number of state columns of a task, and the number of columns of a partial sum. It is constant, so that results do not
// depend on the number of threads.
constexpr int64_t group = 32;

// One token of each of B sequences: state row slots[b] of [P, H, K, V] becomes S', output = scale * S'^T q. Without an
// erasure, also T tokens of each, in order; then the states stay as they are unless `writes`.
struct Step {
  static constexpr int64_t most_tokens = 64;

  int64_t B, H, K, V, P, T = 1;
  bool writes = true;
  const int32_t* slots = nullptr;  // [B]; an absent sequence has a slot outside [0, P) and output 0
  Tensor q, k, v, head, key, value;
  Tensor beta, erase, write;        // the delta rule
  const float* constant = nullptr;  // [B, H]
  const float* scale = nullptr;     // [B]
  Tensor state;                     // updated in place
  Tensor output;
};

// One token of each of B sequences, from a stored state and the tokens since it was written, which lie in the slot's replay ring; see
// replay.h. State row slots[b] of [P, H, K, V] is written where the token is the `replay`-th since it was.
struct Replay : Step {
  Tensor along;  // of the token, [B, H, K]
  bool before_decay;
  int64_t places, replay;
  int32_t *length, *drafted;  // [P]: the tokens of each ring, which the kernels read, and the drafts behind them
  // [P, places, heads, width]: k_i, u_i, the log decays, b_i and y_i.
  Tensor ring_key, ring_value, ring_head, ring_row, ring_column, ring_along, ring_erased;
  // Of states of 8 bits: [P, H, K, V] of the same type, and [P, H, scales].
  char* rests = nullptr;
  float* scale_of_rows = nullptr;
  int64_t scales = 0;
};

// The selective scan of Mamba-1, in which every entry of the state has a decay of its own:
//
//     h_t[n] = exp(dt_t A[n]) h_{t-1}[n] + dt_t x_t B_t[n]        y_t = sum over n of C_t[n] h_t[n]        for every channel d
//
// and its gradient. A chunk is `chunk` consecutive tokens of a sequence in the order of the scan, from its first token on.
struct SelectiveScan {
  static constexpr int64_t chunk = 32;

  int64_t rows, T, D, N, sequences;
  bool reverse;
  const int32_t* boundaries = nullptr;  // [sequences + 1], in one row; if null, each row is a sequence
  const int32_t* resets = nullptr;      // [rows, T]: 1 where a token starts from a state of zeros
  Tensor x, dt, B, C;                   // [rows, T, 1, D] and [rows, T, 1, N]
  const float *A = nullptr, *initial = nullptr;  // [D, N], [sequences, D, N]
  float* starts = nullptr;  // [chunks, D, N], the states before chunks: a result of the forward if not null, and an operand of the gradient

  // Forward.
  float *y = nullptr, *final_state = nullptr;  // [rows, T, D], [sequences, D, N]

  // Gradient. A group is `group_channels` channels, a multiple of `selective_alignment`. It has a partial sum of dB and dC of its own.
  const float *d_y = nullptr, *d_final = nullptr;
  Tensor dx, ddt;
  float *dA = nullptr, *dB = nullptr, *dC = nullptr, *d_initial = nullptr;  // [sequences, D, N], twice [groups, rows, T, N], [sequences, D, N]
  int64_t group_channels = 0;

  // The tokens [begin, end) of a sequence.
  int64_t begin(int64_t sequence) const { return boundaries ? clamped(boundaries[sequence], 0) : 0; }
  int64_t end(int64_t sequence) const { return boundaries ? clamped(boundaries[sequence + 1], begin(sequence)) : T; }
  int64_t row(int64_t sequence) const { return boundaries ? 0 : sequence; }
  // The place of a sequence's first chunk among all chunks; those of the sequence before end there or earlier.
  int64_t first_chunk(int64_t sequence) const {
    return boundaries ? begin(sequence) / chunk + sequence : sequence * ((T + chunk - 1) / chunk);
  }

 private:
  // A traced caller cannot check the values of boundaries.
  int64_t clamped(int64_t t, int64_t least) const { return t < least ? least : t > T ? T : t; }
};

// The channels of a group are a multiple of this, for every instruction set.
constexpr int64_t selective_alignment = 64;

// One token of the selective scan for each of B sequences. state: [P, D, N], updated in place.
struct SelectiveStep {
  int64_t B, D, N, P;
  const int32_t* slots = nullptr;  // [B]; an absent sequence has a slot outside [0, P) and y of 0
  Tensor x, dt, in, out;           // [B, 1, D]; B_t and C_t, [B, 1, N]
  const float* A = nullptr;        // [D, N]
  Tensor state;
  float* y = nullptr;  // [B, D]
};

// Computes a range of columns for a segment and its heads. Returns false if a value divided by its decay overflowed float32.
typedef bool Kernel(const Problem&, const Segment&, Heads, int64_t first_column, int64_t last_column, void* scratch);

// The kernels of one instruction set.
struct Kernels {
  int64_t (*scratch_bytes)(const Problem&, int64_t heads, int64_t longest);  // longest: tokens of the longest segment
  Kernel *forward, *boundary_states, *gradient_of_keys, *gradient_of_values;
  void (*step)(const Step&, int64_t b, int64_t h);
  int64_t (*tokens_bytes)(const Step&);
  void (*tokens)(const Step&, int64_t b, int64_t h, void* scratch);
  int64_t (*replay_bytes)(const Replay&);
  void (*replay)(const Replay&, int64_t b, int64_t h, void* scratch);
  // The delta rule. The gradient takes whole heads: all columns at a time.
  int64_t (*delta_scratch_bytes)(const Problem&, int64_t longest, bool gradient);
  Kernel *delta_forward, *delta_gradient;
  int64_t (*delta_step_bytes)(const Step&);
  void (*delta_step)(const Step&, int64_t b, int64_t h, void* scratch);
  // The selective scan, for channels [first, last) of a sequence, and its step, for channels of sequences [begin, end).
  int64_t (*selective_bytes)(const SelectiveScan&, bool gradient);
  void (*selective_forward)(const SelectiveScan&, int64_t sequence, int64_t first, int64_t last, void* scratch);
  void (*selective_gradient)(const SelectiveScan&, int64_t sequence, int64_t first, int64_t last, void* scratch);
  void (*selective_step)(const SelectiveStep&, int64_t begin, int64_t end, int64_t first, int64_t last, void* scratch);
  void (*exponential)(const float* x, float* y, int64_t count);
  const char* name;
};

extern const Kernels baseline, avx2, avx512;

}  // namespace glax
