// Distributes the step of a pool with replay rings over threads.
#pragma once
#include "parallel_for.h"

namespace glax {

// Runs one token of each sequence. The lengths of rings change behind all heads, which read them. Throws std::bad_alloc if no thread gets
// its scratch.
template <class Pool>
void run_replay(Pool& pool, const Replay& p) {
  // Small heads share a task: waking a thread costs more than one of them.
  const int64_t heads = p.B * p.H, heads_per_task = std::max<int64_t>(1, (int64_t(1) << 16) / std::max<int64_t>(1, p.K * p.V));
  const int64_t tasks = (heads + heads_per_task - 1) / heads_per_task, bytes = kernels().replay_bytes(p);
  const bool done = parallel_for(pool, tasks, std::max<int64_t>(1, pool.num_threads()), [&](std::atomic<int64_t>& next, int64_t tasks) {
    const ThreadScratch scratch(bytes);
    if (!scratch.block) return;
    for (int64_t i; (i = next.fetch_add(1)) < tasks;)
      for (int64_t head = i * heads_per_task; head < std::min((i + 1) * heads_per_task, heads); ++head)
        kernels().replay(p, head / p.H, head % p.H, scratch.aligned());
  });
  if (!done) throw std::bad_alloc();
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t slot = p.slots ? p.slots[b] : b;
    if (slot < 0 || slot >= p.P) continue;
    const int64_t length = std::clamp<int64_t>(p.length[slot], 0, p.places) + 1;
    p.length[slot] = int32_t(length < p.replay ? length : 0), p.drafted[slot] = 0;
  }
}

}  // namespace glax
