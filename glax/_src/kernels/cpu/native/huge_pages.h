// Populates memory with huge pages before it is first written. The system clears a page when it is first touched. Huge pages are much
// cheaper to clear than small ones. Threads that touch the same huge page together each clear it, so large results are populated before
// the kernels run. Where the system refuses, pages are cleared as they are written, only slower.
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

// Addresses [begin, end).
struct Bytes {
  uintptr_t begin, end;
};

constexpr uintptr_t small_page = 1 << 12, huge_page = 1 << 21;
constexpr uintptr_t min_huge_bytes = 1 << 20;  // bytes

// Advises huge pages for x, including the pages it shares with its neighbours: an array of 2 MiB rarely fills a huge page alone.
inline void advise_huge_pages(const Bytes& x) {
#ifdef __linux__
  const uintptr_t first = x.begin / huge_page * huge_page, last = (x.end + huge_page - 1) / huge_page * huge_page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Lists the parts of arrays that are not in memory yet, each at most one huge page, without duplicates.
inline std::vector<Bytes> absent_pages(const std::vector<Bytes>& arrays) {
  std::vector<Bytes> absent;
#ifdef __linux__
  for (const Bytes& x : arrays) {
    if (x.end - x.begin < min_huge_bytes) continue;
    advise_huge_pages(x);
    for (uintptr_t page = x.begin / huge_page * huge_page; page < x.end; page += huge_page) {
      const uintptr_t begin = std::max(x.begin, page) / small_page * small_page, end = std::min(x.end, page + huge_page);
      const uintptr_t middle = (begin + end) / 2 / small_page * small_page;  // a neighbour may have touched the ends
      unsigned char present = 0;
      if (mincore(reinterpret_cast<void*>(middle), small_page, &present) == 0 && !(present & 1)) absent.push_back({begin, end});
    }
  }
  const auto before = [](const Bytes& x, const Bytes& y) { return x.begin < y.begin; };
  const auto same = [](const Bytes& x, const Bytes& y) { return x.begin / huge_page == y.begin / huge_page; };
  std::sort(absent.begin(), absent.end(), before);
  absent.erase(std::unique(absent.begin(), absent.end(), same), absent.end());
#endif
  return absent;
}

// Populates pages for writing.
inline void populate(const Bytes& pages) {
#ifdef __linux__
  madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, MADV_POPULATE_WRITE);
#endif
}

}  // namespace glax
