// Memory that is about to be written for the first time: the system clears its pages as they are touched. A page of 4 KiB costs a
// microsecond, 2 MiB in such pages ten times what they cost as one large page; and threads that touch one large page at a time each
// clear it, which is why large results are not left to the kernels to touch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "share.h"

#ifdef __linux__
#include <sys/mman.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14; before, an error without effect
#endif
#endif

namespace glax {

struct Bytes {
  uintptr_t begin, end;
};

// Has the pages of arrays cleared by all threads, large pages where the system has them. What it refuses is done as memory is
// written, only slower.
template <class Pool>
void clear_pages(Pool& pool, const std::vector<Bytes>& arrays) {
#ifdef __linux__
  constexpr uintptr_t small = 1 << 12, large = 1 << 21, worth = 1 << 20;
  const auto address = [](uintptr_t x) { return reinterpret_cast<void*>(x); };
  std::vector<Bytes> absent;
  for (const Bytes& x : arrays) {
    if (x.end - x.begin < worth) continue;
    // A page that the array shares with its neighbours is advised too: an array of 2 MiB has no large page of its own.
    const uintptr_t first = x.begin / large * large;
    madvise(address(first), (x.end + large - 1) / large * large - first, MADV_HUGEPAGE);
    for (uintptr_t page = first; page < x.end; page += large) {
      const uintptr_t begin = std::max(x.begin, page) / small * small;
      unsigned char present = 0;
      if (mincore(address(begin), small, &present) == 0 && !(present & 1)) absent.push_back({begin, std::min(x.end, page + large)});
    }
  }
  // Arrays side by side may share a large page, which only one thread should clear.
  std::sort(absent.begin(), absent.end(), [](const Bytes& x, const Bytes& y) { return x.begin < y.begin; });
  const auto shared = [](const Bytes& x, const Bytes& y) { return x.begin / large == y.begin / large; };
  absent.erase(std::unique(absent.begin(), absent.end(), shared), absent.end());
  share_out(pool, absent.size(), pool.num_threads(), [&](std::atomic<int64_t>& next, int64_t tasks) {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;)
      madvise(address(absent[i].begin), absent[i].end - absent[i].begin, MADV_POPULATE_WRITE);
  });
#endif
}

}  // namespace glax
