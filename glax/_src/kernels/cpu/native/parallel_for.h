// Distributes tasks over a thread pool. Results do not depend on the number of threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "huge_pages.h"
#include "problem.h"

namespace glax {

// Selects the widest instructions that this machine has and that GLAX_CPU_INSTRUCTIONS (for tests) allows.
inline const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const char* named = std::getenv("GLAX_CPU_INSTRUCTIONS");
    const std::string most = named && *named ? named : "avx512";
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && most == "avx512") return avx512;
    if (has_avx2 && most != "baseline") return avx2;
#endif
    return baseline;
  }();
  return chosen;
}

// Runs worker(next, tasks) on the caller's thread and on up to threads - 1 threads of the pool. A worker claims tasks from `next` until
// none is left. The caller waits only for threads that have started, so a busy pool cannot block it. A worker may return without
// claiming a task, for example without memory. Returns whether every task was claimed.
//
// Pool has num_threads() and Schedule(function), as XLA's does.
template <class Pool, class Worker>
bool parallel_for(Pool& pool, int64_t tasks, int64_t threads, const Worker& worker) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable idle;
    std::atomic<int64_t> busy{0};  // changed under the mutex
    bool closed = false;
  };
  auto shared = std::make_shared<Shared>();
  const Worker* work = &worker;  // valid until the caller returns: it waits for every thread that entered before `closed`
  try {
    for (int64_t i = 1; i < std::min(tasks, threads); ++i) {
      pool.Schedule([shared, work, tasks] {
        {
          std::lock_guard<std::mutex> lock(shared->mutex);
          if (shared->closed || shared->next >= tasks) return;
          ++shared->busy;
        }
        (*work)(shared->next, tasks);
        std::lock_guard<std::mutex> lock(shared->mutex);
        if (--shared->busy == 0) shared->idle.notify_all();
      });
    }
  } catch (const std::bad_alloc&) {
    // Fewer threads take part. The caller still waits for those that were scheduled.
  }
  worker(shared->next, tasks);
  {
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->closed = true;
  }
  // Spin first: the others are about to finish, and waking a sleeping thread takes longer than they need.
  const auto patience = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
  while (shared->busy > 0 && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->idle.wait(lock, [&] { return shared->busy == 0; });
  return shared->next >= tasks;
}

// The number of ranges to cut `width` columns into: no more than keep the threads busy, since each range recomputes the rows' factors.
inline int64_t ranges(int64_t heads, int64_t width, int64_t threads) {
  const int64_t most = std::max<int64_t>(1, (width + group - 1) / group);
  int64_t cut = 1;
  while (cut < most && heads * cut < 4 * threads && (heads * cut) % threads != 0) ++cut;
  return cut;
}

// Columns [first, last).
struct Range {
  int64_t first, last;
};

// Range i of `cut` ranges.
inline Range range(int64_t i, int64_t cut, int64_t width) {
  const int64_t groups = (width + group - 1) / group;
  return {i * groups / cut * group, std::min((i + 1) * groups / cut * group, width)};
}

// Scratch memory of a thread. `block` is null if the allocation failed.
struct ThreadScratch {
  explicit ThreadScratch(int64_t bytes) : edge(uintptr_t(bytes) < min_huge_bytes ? 64 : huge_page), block(std::malloc(bytes + edge)) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(aligned());
    if (block && edge == huge_page) advise_huge_pages({begin, begin + bytes});
  }
  ~ThreadScratch() { std::free(block); }
  void* aligned() const { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block) + edge - 1) / edge * edge); }
  uintptr_t edge;
  void* block;
};

// A kernel that runs for every segment and head and each range of `width` columns. A worker runs `sharing` consecutive heads one after the
// other: they add to the same rows.
struct Task {
  Kernel* run;
  int64_t width;
  int64_t sharing = 1;
};

// The number of heads that a task scans together. Their states must fit into the second-level cache, and every thread must get a few
// tasks. It is 1 where a token's row is too short for a gain.
inline int64_t heads_together(const Problem& p, int64_t tasks, int64_t threads) {
  constexpr int64_t room = 1 << 19, few = 2, short_row = 2048;  // bytes; tasks a thread; bytes
  if (p.H * std::max(p.K * p.k.bytes(), p.V * p.v.bytes()) < short_row) return 1;
  const int64_t fit = room / std::max<int64_t>(1, 4 * p.K * p.V), spare = tasks / (few * threads);
  return std::clamp<int64_t>(std::min(fit, spare), 1, std::min(Heads::most, p.H));
}

// Runs the kernels over all segments, heads and ranges of columns. Returns whether all numbers stayed in range.
// Throws std::bad_alloc if no thread gets its scratch.
template <class Pool>
bool run_tasks(Pool& pool, const Problem& p, const std::vector<Segment>& segments, std::initializer_list<Task> kinds) {
  struct Item {
    const Task* task;
    const Segment* segment;
    Heads heads;
    Range columns;
  };
  std::vector<Item> items;
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t tasks_of_heads = segments.size() * p.H * kinds.size(), together = heads_together(p, tasks_of_heads, threads);
  for (const Segment& segment : segments) {
    for (const Task& task : kinds) {
      const int64_t cut = ranges(tasks_of_heads, task.width, threads);
      const int64_t claimed = std::max(together / task.sharing, int64_t(1)) * task.sharing;
      for (int64_t h = 0; h < p.H; h += claimed)
        for (int64_t i = 0; i < cut; ++i)
          items.push_back({&task, &segment, {h, std::min(h + claimed, p.H)}, range(i, cut, task.width)});
    }
  }
  // Longest first, so that few threads wait for the last one.
  std::stable_sort(items.begin(), items.end(), [](const Item& x, const Item& y) { return x.segment->length > y.segment->length; });
  const int64_t bytes = items.empty() ? 0 : kernels().scratch_bytes(p, together, items[0].segment->length);
  std::atomic<bool> in_range{true};
  const bool done = parallel_for(pool, items.size(), threads, [&](std::atomic<int64_t>& next, int64_t tasks) {
    const ThreadScratch scratch(bytes);
    if (!scratch.block) return;
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
      const Item& item = items[i];
      for (int64_t h = item.heads.first; h < item.heads.last; h += together) {
        const Heads heads{h, std::min(h + together, item.heads.last)};
        if (!item.task->run(p, *item.segment, heads, item.columns.first, item.columns.last, scratch.aligned())) in_range = false;
      }
    }
  });
  if (!done) throw std::bad_alloc();
  return in_range;
}

}  // namespace glax
