// Runs a selective scan: a task for each sequence and some of its channels. Results do not depend on the number of threads.
#pragma once
#include <numeric>

#include "parallel_for.h"

namespace glax {

// The number of threads that have enough to do: waking one costs more than a few tokens.
template <class Pool>
int64_t selective_threads(Pool& pool, int64_t elements) {
  return std::clamp<int64_t>(elements >> 15, 1, std::max<int64_t>(1, pool.num_threads()));
}

// Runs work(task, scratch) for all tasks. Throws std::bad_alloc if no thread gets its scratch.
template <class Pool, class Work>
void run_selective_tasks(Pool& pool, int64_t tasks, int64_t threads, int64_t bytes, const Work& work) {
  const bool done = parallel_for(pool, tasks, threads, [&](std::atomic<int64_t>& next, int64_t tasks) {
    const ThreadScratch scratch(bytes);
    if (!scratch.block) return;
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) work(i, scratch.aligned());
  });
  if (!done) throw std::bad_alloc();
}

template <class Pool>
void run_selective(Pool& pool, const SelectiveScan& p, bool gradient) {
  const int64_t channels = gradient ? p.group_channels : selective_alignment, parts = (p.D + channels - 1) / channels;
  std::vector<int64_t> order(p.sequences);
  std::iota(order.begin(), order.end(), 0);
  // Longest first, so that few threads wait for the last one.
  const auto length = [&](int64_t n) { return p.end(n) - p.begin(n); };
  std::stable_sort(order.begin(), order.end(), [&](int64_t m, int64_t n) { return length(m) > length(n); });
  const int64_t threads = selective_threads(pool, p.rows * p.T * p.D * p.N);
  const auto run = gradient ? kernels().selective_gradient : kernels().selective_forward;
  run_selective_tasks(pool, p.sequences * parts, threads, kernels().selective_bytes(p, gradient), [&](int64_t i, void* scratch) {
    const int64_t first = i % parts * channels;
    run(p, order[size_t(i / parts)], first, std::min(first + channels, p.D), scratch);
  });
}

// Runs one token of each sequence.
template <class Pool>
void run_selective_step(Pool& pool, const SelectiveStep& p) {
  constexpr int64_t channels = selective_alignment, together = 16;  // sequences of a task: its part of A stays in the cache
  const int64_t parts = (p.D + channels - 1) / channels, tasks = parts * ((p.B + together - 1) / together);
  const int64_t threads = selective_threads(pool, p.B * p.D * p.N);
  // Scratch enough for B and C of a token, each padded to whole vectors, and for the gaps of a sanitizer.
  run_selective_tasks(pool, tasks, threads, 16 * p.N + 1024, [&](int64_t i, void* scratch) {
    const int64_t begin = i / parts * together, first = i % parts * channels;
    kernels().selective_step(p, begin, std::min(begin + together, p.B), first, std::min(first + channels, p.D), scratch);
  });
}

}  // namespace glax
