// What a kernel is told: arrays as they lie in memory, and the table of functions that each instruction set provides.
#pragma once
#include <cstdint>

namespace glax {

enum class Type : int { f32, bf16, f16 };

// [B, T, heads, width]; without data where a recurrence has no such array.
struct Tensor {
  char* data = nullptr;
  Type type = Type::f32;
  int64_t heads = 1, width = 0;

  int64_t bytes() const { return type == Type::f32 ? 4 : 2; }
};

// Of |G|, rows' and columns' together, since a state was last scaled. The bounds stand in glax/_src/kernels/common/limits.py.
namespace limits {
constexpr float wide = 40;
constexpr float narrow = 1;     // where e^wide passed float32's range, or e^-wide would
constexpr float faint = 1e-13;  // the largest of a row that e^-wide would rob of digits
}  // namespace limits

// S_t = exp(head_t) diag(exp(key_t)) S_{t-1} diag(exp(value_t)) + k_t v_t^T,   o_t = scale * S_t^T q_t,   and its gradient.
struct Problem {
  int64_t B, T, N, H, K, V;
  bool reverse;
  int64_t block;  // tokens between two rescalings of the state, at most
  float limit = limits::wide;
  const int32_t* boundaries = nullptr;  // [N + 1], or N = B sequences lie side by side
  Tensor q, k, v, head, key, value;
  const float* constant = nullptr;  // [N, H]
  const float* initial = nullptr;   // [N, H, K, V]
  const float* scale = nullptr;     // [N]

  // Forward.
  Tensor output;
  float* final_state = nullptr;  // [N, H, K, V]

  // Gradient. Every array has H heads: heads that share a query, key or value are summed by the caller.
  // [groups, ...] holds partial sums over `group` of the K columns, for the caller to add up.
  Tensor d_output, dq, dk, dv;
  const float* d_final = nullptr;                       // [N, H, K, V]
  // [groups, B, T, H], [B, T, H, K], [B, T, H, V]. A constant gate needs d_head too, whose sum d_constant is.
  float *d_head = nullptr, *d_key = nullptr, *d_value = nullptr;
  float* d_initial = nullptr;                       // [N, H, K, V]
  float *d_constant = nullptr, *d_scale = nullptr;  // [groups, pieces, H]
  int64_t pieces;
};

// Tokens that are walked in one go: a sequence, or where sequences and heads are few a segment of one. See segments.h.
struct Piece {
  int64_t sequence = 0, example = 0, index = 0;  // whose constants, whose rows; which row of d_constant and d_scale
  int64_t first = 0, length = 0;                 // tokens
  const float *initial = nullptr, *d_final = nullptr;  // [H, K, V]; no initial state: zeros
  float *final_state = nullptr, *d_initial = nullptr;  // [H, K, V]; none: nobody asks
  double* decay = nullptr;                             // [H, K + V]
};

// Heads [first, last) of those that lie side by side, walked by one task.
struct Heads {
  static constexpr int64_t most = 8;
  int64_t first, last;

  int64_t count() const { return last - first; }
};

// Columns of the state that one task owns at least, and over which partial sums run. Fixed, so that results do not depend
// on how the work is shared out.
constexpr int64_t group = 32;

// One token of each of B sequences: state row slots[b] of [P, H, K, V] becomes S', output = scale * S'^T q.
struct Step {
  int64_t B, H, K, V, P;
  const int32_t* slots = nullptr;  // [B]; outside [0, P): the sequence is not there, output 0
  Tensor q, k, v, head, key, value;
  const float* constant = nullptr;  // [B, H]
  const float* scale = nullptr;     // [B]
  Tensor state;                     // updated in place
  Tensor output;
};

// Computes a piece and heads over a range of columns. Returns whether all that it inflated stayed in float32's range.
typedef bool Kernel(const Problem&, const Piece&, Heads, int64_t first_column, int64_t last_column, void* scratch);

// The kernels of one instruction set.
struct Kernels {
  int64_t (*scratch_bytes)(const Problem&, int64_t heads, int64_t longest);  // the tokens of the longest piece
  Kernel *forward, *edges, *gradient_of_keys, *gradient_of_values;
  void (*step)(const Step&, int64_t b, int64_t h);
  void (*exponential)(const float* x, float* y, int64_t count);
  const char* name;
};

extern const Kernels baseline, avx2, avx512;

}  // namespace glax
