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

// Rows [begin, end) of a sequence that share a state, which no token before or behind them reads.
struct Run {
  int64_t begin, end;
};

// The runs of a row with marks, in the order of the scan. A row of padding alone is one run without tokens.
inline std::vector<Run> runs_of(const Problem& p, int64_t row) {
  const int32_t* marks = p.marks + row * p.T;
  std::vector<Run> runs;
  bool open = false;
  for (int64_t i = 0; i < p.T; ++i) {
    const int64_t t = p.reverse ? p.T - 1 - i : i;
    if (marks[t] == Mark::padding) {
      open = false;
      continue;
    }
    if (!open || marks[t] == Mark::resets) runs.push_back({t, t + 1});
    Run& last = runs.back();
    last = {std::min(last.begin, t), std::max(last.end, t + 1)}, open = true;
  }
  if (runs.empty()) runs.push_back({0, 0});
  return runs;
}

// The runs of sequence n. Without marks there is one.
inline std::vector<Run> runs_of_sequence(const Problem& p, int64_t n) {
  if (p.marks) return runs_of(p, n);
  if (!p.boundaries) return {{0, p.T}};
  // A traced caller cannot check the values of boundaries.
  const int64_t begin = std::clamp<int64_t>(p.boundaries[n], 0, p.T);
  return {{begin, std::clamp<int64_t>(p.boundaries[n + 1], begin, p.T)}};
}

// Lists the segments of every sequence, of at most `most` tokens, in the order of the scan.
inline std::vector<Segment> segments_of(const Problem& p, int64_t most) {
  const int64_t state = p.H * p.K * p.V;
  std::vector<Segment> segments;
  int64_t number = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const std::vector<Run> runs = runs_of_sequence(p, n);
    for (size_t run = 0; run < runs.size(); ++run, ++number) {
      const auto [begin, end] = runs[run];
      const int64_t length = end - begin, count = std::max<int64_t>(1, (length + most - 1) / most);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t from = i * length / count, to = (i + 1) * length / count;
        const bool starts = run == 0 && i == 0, ends = run + 1 == runs.size() && i + 1 == count;
        Segment segment;
        segment.sequence = n, segment.example = p.boundaries ? 0 : n, segment.index = segments.size(), segment.run = number;
        segment.first = p.reverse ? end - to : begin + from, segment.length = to - from, segment.fresh = run > 0 && i == 0;
        if (starts && p.initial) segment.initial = p.initial + n * state;
        if (starts && p.d_initial) segment.d_initial = p.d_initial + n * state;
        if (ends && p.final_state) segment.final_state = p.final_state + n * state;
        if (ends && p.d_final) segment.d_final = p.d_final + n * state;
        segments.push_back(segment);
      }
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

// Computes the states at the inner boundaries of cut runs, in `memory`, and sets the segments' pointers to them.
// Returns whether all stayed in range.
template <class Pool>
bool join_segments(Pool& pool, const Problem& p, std::vector<Segment>& segments, std::vector<float>& memory) {
  const int64_t state = p.H * p.K * p.V, decay = p.H * (p.K + p.V), last = int64_t(segments.size()) - 1;
  std::vector<Segment*> parts;  // of runs that are cut; most runs are not, and need no memory
  for (int64_t i = 0; i <= last; ++i) {
    const int64_t run = segments[i].run;
    if ((i > 0 && segments[i - 1].run == run) || (i < last && segments[i + 1].run == run)) parts.push_back(&segments[i]);
  }
  const int64_t count = parts.size();
  if (count == 0) return true;
  memory.resize(count * 2 * state);
  std::vector<double> decays(count * decay);
  std::vector<Segment> isolated;
  for (int64_t i = 0; i < count; ++i) {
    float* own = memory.data() + i * 2 * state;
    isolated.push_back(*parts[i]);
    isolated[i].final_state = own, isolated[i].d_initial = p.d_final ? own + state : nullptr, isolated[i].decay = decays.data() + i * decay;
  }
  const bool in_range = run_tasks(pool, p, isolated, {{kernels().boundary_states, p.V}});
  for (int64_t i = 1; i < count; ++i) {
    if (parts[i]->run != parts[i - 1]->run) continue;
    if (parts[i - 1]->initial) add_decayed(p, isolated[i - 1].decay, parts[i - 1]->initial, isolated[i - 1].final_state);
    parts[i]->initial = isolated[i - 1].final_state;
  }
  for (int64_t i = count - 1; i > 0 && p.d_final; --i) {
    if (parts[i]->run != parts[i - 1]->run) continue;
    if (parts[i]->d_final) add_decayed(p, isolated[i].decay, parts[i]->d_final, isolated[i].d_initial);
    parts[i - 1]->d_final = isolated[i].d_initial;
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

// Sums the gradients of a sequence's scale or constant over its segments: `from` [groups, segments, H], `to` [groups, N, H].
inline void sum_segments(const Problem& p, const std::vector<Segment>& segments, int64_t groups, const float* from, float* to) {
  std::fill(to, to + groups * p.N * p.H, 0.f);
  for (int64_t g = 0; g < groups; ++g)
    for (const Segment& segment : segments)
      for (int64_t h = 0; h < p.H; ++h) to[(g * p.N + segment.sequence) * p.H + h] += from[(g * p.segments + segment.index) * p.H + h];
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
  sum_segments(p, segments, groups, p.d_scale, d_scale);
  if (d_constant) sum_segments(p, segments, groups, p.d_constant, d_constant);
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

// Runs a few tokens of each sequence, whose states lie in a pool. Throws std::bad_alloc if no thread gets its scratch.
template <class Pool>
void run_tokens(Pool& pool, const Step& p) {
  // Small heads share a task: waking a thread costs more than one of them.
  const int64_t heads = p.B * p.H, heads_per_task = std::max<int64_t>(1, (int64_t(1) << 16) / std::max<int64_t>(1, p.K * p.V));
  const int64_t tasks = (heads + heads_per_task - 1) / heads_per_task, bytes = kernels().tokens_bytes(p);
  const bool done = parallel_for(pool, tasks, std::max<int64_t>(1, pool.num_threads()), [&](std::atomic<int64_t>& next, int64_t tasks) {
    const ThreadScratch scratch(bytes);
    if (!scratch.block) return;
    for (int64_t i; (i = next.fetch_add(1)) < tasks;)
      for (int64_t head = i * heads_per_task; head < std::min((i + 1) * heads_per_task, heads); ++head)
        kernels().tokens(p, head / p.H, head % p.H, scratch.aligned());
  });
  if (!done) throw std::bad_alloc();
}

}  // namespace glax
