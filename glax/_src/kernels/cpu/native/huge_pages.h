// Memory that is about to be written for the first time: the system clears its pages as they are touched. 2 MiB in pages of 4 KiB cost
// ten times what they cost as one large page; and threads that touch one large page at a time each clear it, which is why large
// results are not left to the kernels to touch. What the system refuses is done as memory is written, only slower.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

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

constexpr uintptr_t small_page = 1 << 12, large_page = 1 << 21;
constexpr uintptr_t worth_large_pages = 1 << 20;  // bytes

// A page that x shares with its neighbours is asked for too: an array of 2 MiB has no large page of its own.
inline void ask_for_large_pages(const Bytes& x) {
#ifdef __linux__
  const uintptr_t first = x.begin / large_page * large_page, last = (x.end + large_page - 1) / large_page * large_page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// The parts of arrays that are not in memory yet, at most a large page each, and no page twice.
inline std::vector<Bytes> absent_pages(const std::vector<Bytes>& arrays) {
  std::vector<Bytes> absent;
#ifdef __linux__
  for (const Bytes& x : arrays) {
    if (x.end - x.begin < worth_large_pages) continue;
    ask_for_large_pages(x);
    for (uintptr_t page = x.begin / large_page * large_page; page < x.end; page += large_page) {
      const uintptr_t begin = std::max(x.begin, page) / small_page * small_page, end = std::min(x.end, page + large_page);
      const uintptr_t middle = (begin + end) / 2 / small_page * small_page;  // the ends may be in memory for a neighbour's sake
      unsigned char present = 0;
      if (mincore(reinterpret_cast<void*>(middle), small_page, &present) == 0 && !(present & 1)) absent.push_back({begin, end});
    }
  }
  const auto before = [](const Bytes& x, const Bytes& y) { return x.begin < y.begin; };
  const auto same = [](const Bytes& x, const Bytes& y) { return x.begin / large_page == y.begin / large_page; };
  std::sort(absent.begin(), absent.end(), before);
  absent.erase(std::unique(absent.begin(), absent.end(), same), absent.end());
#endif
  return absent;
}

inline void clear(const Bytes& pages) {
#ifdef __linux__
  madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, MADV_POPULATE_WRITE);
#endif
}

}  // namespace glax
