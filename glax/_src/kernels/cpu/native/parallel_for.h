// How work is shared out over threads: who runs which task. Results do not depend on it.
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

// The widest instructions that this machine has and that GLAX_CPU_INSTRUCTIONS, for tests, does not forbid.
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

// Runs work(task) for every task, on the caller's thread and as many of the pool's as come in time. The caller never waits
// for a thread that has not begun, so a busy pool cannot block it. A worker may leave without taking a task; returns whether all are done.
//
// Pool: num_threads() and Schedule(function), as XLA's.
template <class Pool, class Worker>
bool share_out(Pool& pool, int64_t tasks, int64_t threads, const Worker& worker) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable idle;
    std::atomic<int64_t> busy{0};  // changed under the mutex
    bool closed = false;
  };
  auto shared = std::make_shared<Shared>();
  const Worker* work = &worker;  // valid as long as the caller waits, which it does for all who entered before `closed`
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
    // Fewer threads come; the caller must not leave before those that were called.
  }
  worker(shared->next, tasks);
  {
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->closed = true;
  }
  // The others are about to be done, and to wake a thread that sleeps takes tens of microseconds.
  const auto patience = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
  while (shared->busy > 0 && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->idle.wait(lock, [&] { return shared->busy == 0; });
  return shared->next >= tasks;
}

// How many ranges to cut `width` columns into: enough to keep the threads busy, since each range forms the rows' factors anew.
inline int64_t ranges(int64_t heads, int64_t width, int64_t threads) {
  const int64_t most = std::max<int64_t>(1, (width + group - 1) / group);
  int64_t cut = 1;
  while (cut < most && heads * cut < 4 * threads && (heads * cut) % threads != 0) ++cut;
  return cut;
}

struct Range {
  int64_t first, last;
};

inline Range range(int64_t i, int64_t cut, int64_t width) {
  const int64_t groups = (width + group - 1) / group;
  return {i * groups / cut * group, std::min((i + 1) * groups / cut * group, width)};
}

// What a thread computes in; `block` is null where the system has no more.
struct Memory {
  explicit Memory(int64_t bytes) : edge(uintptr_t(bytes) < worth_large_pages ? 64 : large_page), block(std::malloc(bytes + edge)) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(aligned());
    if (block && edge == large_page) ask_for_large_pages({begin, begin + bytes});
  }
  ~Memory() { std::free(block); }
  void* aligned() const { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block) + edge - 1) / edge * edge); }
  uintptr_t edge;
  void* block;
};

// What is done to every piece and head, for each range of the columns.
struct Task {
  Kernel* run;
  int64_t width;
};

// How many heads a task walks side by side: as many as their states leave room for in the second cache and as leave every thread a
// few tasks, but one where a token's row is so short that nothing is gained.
inline int64_t heads_together(const Problem& p, int64_t tasks, int64_t threads) {
  constexpr int64_t room = 1 << 19, few = 2, short_row = 2048;  // bytes; tasks a thread; bytes
  if (p.H * std::max(p.K * p.k.bytes(), p.V * p.v.bytes()) < short_row) return 1;
  const int64_t fit = room / std::max<int64_t>(1, 4 * p.K * p.V), spare = tasks / (few * threads);
  return std::clamp<int64_t>(std::min(fit, spare), 1, std::min(Heads::most, p.H));
}

// Returns whether all numbers stayed in range. Throws std::bad_alloc where no thread gets its scratch.
template <class Pool>
bool run_tasks(Pool& pool, const Problem& p, const std::vector<Piece>& pieces, std::initializer_list<Task> kinds) {
  struct Item {
    const Task* task;
    const Piece* piece;
    Heads heads;
    Range columns;
  };
  std::vector<Item> items;
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t tasks_of_heads = pieces.size() * p.H * kinds.size(), together = heads_together(p, tasks_of_heads, threads);
  for (const Piece& piece : pieces) {
    for (const Task& task : kinds) {
      const int64_t cut = ranges(tasks_of_heads, task.width, threads);
      for (int64_t h = 0; h < p.H; h += together)
        for (int64_t i = 0; i < cut; ++i)
          items.push_back({&task, &piece, {h, std::min(h + together, p.H)}, range(i, cut, task.width)});
    }
  }
  // The longest first: the last to be walked then keeps few threads waiting.
  std::stable_sort(items.begin(), items.end(), [](const Item& x, const Item& y) { return x.piece->length > y.piece->length; });
  const int64_t bytes = items.empty() ? 0 : kernels().scratch_bytes(p, together, items[0].piece->length);
  std::atomic<bool> sound{true};
  const bool done = share_out(pool, items.size(), threads, [&](std::atomic<int64_t>& next, int64_t tasks) {
    const Memory scratch(bytes);
    if (!scratch.block) return;
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
      const Item& item = items[i];
      if (!item.task->run(p, *item.piece, item.heads, item.columns.first, item.columns.last, scratch.aligned())) sound = false;
    }
  });
  if (!done) throw std::bad_alloc();
  return sound;
}

}  // namespace glax
