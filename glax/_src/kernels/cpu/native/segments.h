// Runs a problem by segments. A segment is a sequence, or a part of one where sequences and heads are too few to keep threads busy.
//
// A part of a sequence is scanned like a sequence, once the states at its boundaries are known. A first scan of all segments in parallel
// starts from zeros and computes no outputs. With F its final state, D the same for dS against time, and P the segment's decay,
//
//     S after = P S before + F            dS before = P dS after + D
//
// The first scan adds half of the forward's work and a quarter of the gradient's, so only long sequences are cut. Shapes and lengths
// alone decide whether and where to cut: results do not depend on the number of threads.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "parallel_for.h"

namespace glax {

// The largest number of tokens of a segment.
inline int64_t segment_length(const Problem& p) {
  constexpr int64_t few = 8, many = 64, shortest = 512;  // tasks, tasks, tokens
  const int64_t tasks = p.N * p.H * ((p.V + group - 1) / group);
  if (tasks == 0 || tasks >= few || p.T < 4 * shortest) return std::max<int64_t>(p.T, 1);
  const int64_t wanted = p.boundaries ? many * p.N / tasks : many / tasks;  // packed sequences share T
  return std::max(shortest, (p.T + wanted - 1) / wanted);
}

// Lists the segments of every sequence, of at most `most` tokens, in the order of the scan.
inline std::vector<Segment> segments_of(const Problem& p, int64_t most) {
  const int64_t state = p.H * p.K * p.V;
  std::vector<Segment> segments;
  for (int64_t n = 0; n < p.N; ++n) {
    int64_t begin = 0, end = p.T;
    if (p.boundaries) {  // a traced caller cannot check their values
      begin = std::clamp<int64_t>(p.boundaries[n], 0, p.T);
      end = std::clamp<int64_t>(p.boundaries[n + 1], begin, p.T);
    }
    const int64_t length = end - begin, count = std::max<int64_t>(1, (length + most - 1) / most);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = i * length / count, to = (i + 1) * length / count;
      Segment segment;
      segment.sequence = n, segment.example = p.boundaries ? 0 : n, segment.index = segments.size();
      segment.first = p.reverse ? end - to : begin + from, segment.length = to - from;
      if (i == 0 && p.initial) segment.initial = p.initial + n * state;
      if (i == 0 && p.d_initial) segment.d_initial = p.d_initial + n * state;
      if (i == count - 1 && p.final_state) segment.final_state = p.final_state + n * state;
      if (i == count - 1 && p.d_final) segment.d_final = p.d_final + n * state;
      segments.push_back(segment);
    }
  }
  return segments;
}

// x += decay y, for x and y [H, K, V] and decay [H, K + V].
inline void add_decayed(const Problem& p, const double* decay, const float* y, float* x) {
  for (int64_t h = 0; h < p.H; ++h, decay += p.K + p.V)
    for (int64_t r = 0; r < p.K; ++r)
      for (int64_t c = 0; c < p.V; ++c, ++x, ++y) *x = float(*x + decay[r] * *y * decay[p.K + c]);
}

// Computes the states at the inner boundaries of cut sequences, in `memory`, and sets the segments' pointers to them.
// Returns whether all stayed in range.
template <class Pool>
bool join_segments(Pool& pool, const Problem& p, std::vector<Segment>& segments, std::vector<float>& memory) {
  const int64_t state = p.H * p.K * p.V, decay = p.H * (p.K + p.V), count = segments.size();
  memory.resize(count * 2 * state);
  std::vector<double> decays(count * decay);
  std::vector<Segment> isolated = segments;
  for (int64_t i = 0; i < count; ++i) {
    float* own = memory.data() + i * 2 * state;
    isolated[i].final_state = own, isolated[i].d_initial = p.d_final ? own + state : nullptr, isolated[i].decay = decays.data() + i * decay;
  }
  const bool in_range = run_tasks(pool, p, isolated, {{kernels().boundary_states, p.V}});
  for (int64_t i = 1; i < count; ++i) {
    if (segments[i].sequence != segments[i - 1].sequence) continue;
    if (segments[i - 1].initial) add_decayed(p, isolated[i - 1].decay, segments[i - 1].initial, isolated[i - 1].final_state);
    segments[i].initial = isolated[i - 1].final_state;
  }
  for (int64_t i = count - 1; i > 0 && p.d_final; --i) {
    if (segments[i].sequence != segments[i - 1].sequence) continue;
    add_decayed(p, isolated[i].decay, segments[i].d_final, isolated[i].d_initial);
    segments[i - 1].d_final = isolated[i].d_initial;
  }
  return in_range;
}

// Runs the forward. Returns whether all stayed in range.
template <class Pool>
bool forward_by_segment(Pool& pool, const Problem& p) {
  std::vector<Segment> segments = segments_of(p, segment_length(p));
  std::vector<float> memory;
  const bool joined = int64_t(segments.size()) == p.N || join_segments(pool, p, segments, memory);
  return run_tasks(pool, p, segments, {{kernels().forward, p.V}}) && joined;
}

// Runs the gradient. Returns whether all stayed in range.
template <class Pool>
bool gradient_by_segment(Pool& pool, Problem p) {
  std::vector<Segment> segments = segments_of(p, segment_length(p));
  std::vector<float> memory;
  p.segments = segments.size();
  const auto sharing = [&](const Tensor& x) { return x.heads > 0 ? p.H / x.heads : 1; };
  const std::initializer_list<Task> kinds{{kernels().gradient_of_keys, p.K, std::lcm(sharing(p.dq), sharing(p.dk))},
                                          {kernels().gradient_of_values, p.V, sharing(p.dv)}};
  if (p.segments == p.N) return run_tasks(pool, p, segments, kinds);

  const bool joined = join_segments(pool, p, segments, memory);
  const int64_t groups = (p.K + group - 1) / group;
  std::vector<float> sums(2 * groups * p.segments * p.H);
  float *const d_constant = p.d_constant, *const d_scale = p.d_scale;
  p.d_scale = sums.data();
  if (d_constant) p.d_constant = sums.data() + groups * p.segments * p.H;
  const bool in_range = run_tasks(pool, p, segments, kinds) && joined;
  // The gradients of a sequence's scale and constant are the sums over its segments.
  const auto add_up = [&](const float* from, float* to) {
    std::fill(to, to + groups * p.N * p.H, 0.f);
    for (int64_t g = 0; g < groups; ++g)
      for (const Segment& segment : segments)
        for (int64_t h = 0; h < p.H; ++h) to[(g * p.N + segment.sequence) * p.H + h] += from[(g * p.segments + segment.index) * p.H + h];
  };
  add_up(p.d_scale, d_scale);
  if (d_constant) add_up(p.d_constant, d_constant);
  return in_range;
}

// Runs a problem. If a value divided by its decay overflowed float32, runs the whole problem again with the narrow limit: a partial rerun
// would depend on the number of threads. Throws std::bad_alloc without memory.
template <class Run>
void run_in_range(Problem p, const Run& run) {
  p.block = std::clamp<int64_t>(p.block, 1, std::max<int64_t>(p.T, 1));
  if (run(p)) return;
  p.limit = limits::narrow;
  run(p);
}

template <class Pool>
void run_forward(Pool& pool, const Problem& p) {
  run_in_range(p, [&](const Problem& p) { return forward_by_segment(pool, p); });
}

template <class Pool>
void run_gradient(Pool& pool, const Problem& p) {
  run_in_range(p, [&](const Problem& p) { return gradient_by_segment(pool, p); });
}

}  // namespace glax
