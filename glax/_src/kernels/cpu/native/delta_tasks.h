// Runs a problem of the delta rule: a task for each segment and head, whose transition is a dense matrix and so is not cut along T. The
// forward also cuts the value columns, which do not depend on each other, where heads are fewer than threads. Results do not depend on the
// number of threads.
#pragma once
#include "segments.h"

namespace glax {

// Throws std::bad_alloc if no thread gets its scratch.
template <class Pool>
void run_delta(Pool& pool, Problem p, bool gradient) {
  struct Item {
    const Segment* segment;
    int64_t head;
    Range columns;
  };
  const std::vector<Segment> segments = segments_of(p, std::max<int64_t>(p.T, 1));
  p.segments = segments.size();
  float *const d_constant = p.d_constant, *const d_scale = p.d_scale;
  const bool several = gradient && p.segments != p.N;
  std::vector<float> sums(several ? 2 * p.segments * p.H : 0);
  if (several) {
    p.d_scale = sums.data();
    if (d_constant) p.d_constant = sums.data() + p.segments * p.H;
  }
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), heads = segments.size() * p.H;
  const int64_t cut = gradient ? 1 : ranges(heads, p.V, threads);
  std::vector<Item> items;
  for (const Segment& segment : segments)
    for (int64_t h = 0; h < p.H; ++h)
      for (int64_t i = 0; i < cut; ++i) items.push_back({&segment, h, range(i, cut, p.V)});
  // Longest first, so that few threads wait for the last one.
  std::stable_sort(items.begin(), items.end(), [](const Item& x, const Item& y) { return x.segment->length > y.segment->length; });
  const int64_t bytes = items.empty() ? 0 : kernels().delta_scratch_bytes(p, items[0].segment->length, gradient);
  Kernel* const run = gradient ? kernels().delta_gradient : kernels().delta_forward;
  const bool done = parallel_for(pool, items.size(), threads, [&](std::atomic<int64_t>& next, int64_t tasks) {
    const ThreadScratch scratch(bytes);
    if (!scratch.block) return;
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
      const Item& item = items[i];
      run(p, *item.segment, {item.head, item.head + 1}, item.columns.first, item.columns.last, scratch.aligned());
    }
  });
  if (!done) throw std::bad_alloc();
  if (several) sum_segments(p, segments, 1, p.d_scale, d_scale);
  if (several && d_constant) sum_segments(p, segments, 1, p.d_constant, d_constant);
}

// Runs one token of each sequence.
template <class Pool>
void run_delta_step(Pool& pool, const Step& p) {
  // Small heads share a task: waking a thread costs more than one of them.
  const int64_t heads = p.B * p.H, heads_per_task = std::max<int64_t>(1, (int64_t(1) << 16) / std::max<int64_t>(1, p.K * p.V));
  const int64_t tasks = (heads + heads_per_task - 1) / heads_per_task, bytes = kernels().delta_step_bytes(p) + 256;
  const bool done = parallel_for(pool, tasks, std::max<int64_t>(1, pool.num_threads()), [&](std::atomic<int64_t>& next, int64_t tasks) {
    const ThreadScratch scratch(bytes);
    if (!scratch.block) return;
    for (int64_t i; (i = next.fetch_add(1)) < tasks;)
      for (int64_t head = i * heads_per_task; head < std::min((i + 1) * heads_per_task, heads); ++head)
        kernels().delta_step(p, head / p.H, head % p.H, scratch.aligned());
  });
  if (!done) throw std::bad_alloc();
}

}  // namespace glax
