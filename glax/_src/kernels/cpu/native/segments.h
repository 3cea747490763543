// Sequences, and the segments that they are cut into where they and their heads are so few that threads would idle.
//
// A segment is walked like a sequence of its own, once the states at its edges are known. Those come from walks of all segments at
// once that start at zeros and form no outputs: with F and D what these leave, and P the segment's decay,
//
//     S behind it = P S before it + F            dS before it = P dS behind it + D
//
// This is half of the forward's work again and a quarter of the gradient's, so it must buy much. Whether to cut, and where, follows
// from shapes and lengths alone: results do not depend on the number of threads.
#pragma once
#include <algorithm>
#include <vector>

#include "parallel_for.h"

namespace glax {

// Tokens of a segment, at most.
inline int64_t segment_length(const Problem& p) {
  constexpr int64_t few = 8, many = 64, shortest = 512;  // tasks, tasks, tokens
  const int64_t tasks = p.N * p.H * ((p.V + group - 1) / group);
  if (tasks == 0 || tasks >= few || p.T < 4 * shortest) return std::max<int64_t>(p.T, 1);
  const int64_t wanted = p.boundaries ? many * p.N / tasks : many / tasks;  // packed sequences share T
  return std::max(shortest, (p.T + wanted - 1) / wanted);
}

// The pieces of every sequence, in the order of the walk.
inline std::vector<Piece> pieces_of(const Problem& p) {
  const int64_t most = segment_length(p), state = p.H * p.K * p.V;
  std::vector<Piece> pieces;
  for (int64_t n = 0; n < p.N; ++n) {
    int64_t begin = 0, end = p.T;
    if (p.boundaries) {  // their values may be anything where the caller could not see them
      begin = std::clamp<int64_t>(p.boundaries[n], 0, p.T);
      end = std::clamp<int64_t>(p.boundaries[n + 1], begin, p.T);
    }
    const int64_t length = end - begin, count = std::max<int64_t>(1, (length + most - 1) / most);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = i * length / count, to = (i + 1) * length / count;
      Piece piece;
      piece.sequence = n, piece.example = p.boundaries ? 0 : n, piece.index = pieces.size();
      piece.first = p.reverse ? end - to : begin + from, piece.length = to - from;
      if (i == 0 && p.initial) piece.initial = p.initial + n * state;
      if (i == 0 && p.d_initial) piece.d_initial = p.d_initial + n * state;
      if (i == count - 1 && p.final_state) piece.final_state = p.final_state + n * state;
      if (i == count - 1 && p.d_final) piece.d_final = p.d_final + n * state;
      pieces.push_back(piece);
    }
  }
  return pieces;
}

// x [H, K, V] = decay y + x
inline void add_decayed(const Problem& p, const double* decay, const float* y, float* x) {
  for (int64_t h = 0; h < p.H; ++h, decay += p.K + p.V)
    for (int64_t r = 0; r < p.K; ++r)
      for (int64_t c = 0; c < p.V; ++c, ++x, ++y) *x = float(*x + decay[r] * *y * decay[p.K + c]);
}

// Gives the pieces of cut sequences the states at their inner edges, which lie in `memory`. Returns whether all stayed in range.
template <class Pool>
bool join(Pool& pool, const Problem& p, std::vector<Piece>& pieces, std::vector<float>& memory) {
  const int64_t state = p.H * p.K * p.V, decay = p.H * (p.K + p.V), count = pieces.size();
  memory.resize(count * 2 * state);
  std::vector<double> decays(count * decay);
  std::vector<Piece> apart = pieces;
  for (int64_t i = 0; i < count; ++i) {
    float* own = memory.data() + i * 2 * state;
    apart[i].final_state = own, apart[i].d_initial = p.d_final ? own + state : nullptr, apart[i].decay = decays.data() + i * decay;
  }
  const bool sound = run_tasks(pool, p, apart, {{kernels().edges, p.V}});
  for (int64_t i = 1; i < count; ++i) {
    if (pieces[i].sequence != pieces[i - 1].sequence) continue;
    if (pieces[i - 1].initial) add_decayed(p, apart[i - 1].decay, pieces[i - 1].initial, apart[i - 1].final_state);
    pieces[i].initial = apart[i - 1].final_state;
  }
  for (int64_t i = count - 1; i > 0 && p.d_final; --i) {
    if (pieces[i].sequence != pieces[i - 1].sequence) continue;
    add_decayed(p, apart[i].decay, pieces[i].d_final, apart[i].d_initial);
    pieces[i - 1].d_final = apart[i].d_initial;
  }
  return sound;
}

template <class Pool>
bool forward_in_pieces(Pool& pool, const Problem& p) {
  std::vector<Piece> pieces = pieces_of(p);
  std::vector<float> memory;
  const bool joined = int64_t(pieces.size()) == p.N || join(pool, p, pieces, memory);
  return run_tasks(pool, p, pieces, {{kernels().forward, p.V}}) && joined;
}

template <class Pool>
bool gradient_in_pieces(Pool& pool, Problem p) {
  std::vector<Piece> pieces = pieces_of(p);
  std::vector<float> memory;
  p.pieces = pieces.size();
  const std::initializer_list<Task> kinds{{kernels().gradient_of_keys, p.K}, {kernels().gradient_of_values, p.V}};
  if (p.pieces == p.N) return run_tasks(pool, p, pieces, kinds);

  const bool joined = join(pool, p, pieces, memory);
  const int64_t groups = (p.K + group - 1) / group;
  std::vector<float> sums(2 * groups * p.pieces * p.H);
  float *const d_constant = p.d_constant, *const d_scale = p.d_scale;
  p.d_scale = sums.data();
  if (d_constant) p.d_constant = sums.data() + groups * p.pieces * p.H;
  const bool sound = run_tasks(pool, p, pieces, kinds) && joined;
  // Those of a sequence are those of its pieces.
  const auto add_up = [&](const float* from, float* to) {
    std::fill(to, to + groups * p.N * p.H, 0.f);
    for (int64_t g = 0; g < groups; ++g)
      for (const Piece& piece : pieces)
        for (int64_t h = 0; h < p.H; ++h) to[(g * p.N + piece.sequence) * p.H + h] += from[(g * p.pieces + piece.index) * p.H + h];
  };
  add_up(p.d_scale, d_scale);
  if (d_constant) add_up(p.d_constant, d_constant);
  return sound;
}

// Runs a problem, and where inflated numbers passed float32's range, once more with as good as none. All of it: what is done again must
// not depend on how work was cut. Throws std::bad_alloc where memory is not to be had.
template <class Run>
void run_in_range(Problem p, const Run& run) {
  p.block = std::clamp<int64_t>(p.block, 1, std::max<int64_t>(p.T, 1));
  if (run(p)) return;
  p.limit = limits::narrow;
  run(p);
}

template <class Pool>
void run_forward(Pool& pool, const Problem& p) {
  run_in_range(p, [&](const Problem& p) { return forward_in_pieces(pool, p); });
}

template <class Pool>
void run_gradient(Pool& pool, const Problem& p) {
  run_in_range(p, [&](const Problem& p) { return gradient_in_pieces(pool, p); });
}

}  // namespace glax
