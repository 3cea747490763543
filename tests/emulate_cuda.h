// CUDA's words for the host, so that tests can run device/*.cu without a GPU: a block is a group of threads of the system, and
// blocks run one after the other. It checks arithmetic, indices and barriers, not races between warps.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

struct uint2 { unsigned int x, y; };
struct uint4 { unsigned int x, y, z, w; };
struct Index { int x; };
inline thread_local Index threadIdx, blockIdx;

struct Block {
  explicit Block(int threads) : all(threads), exchanged(threads) {
    for (int i = 0; i < threads; i += 32) warps.push_back(std::make_unique<std::barrier<>>(32));
  }
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<float> exchanged;
};
inline Block* block = nullptr;

inline void __syncthreads() { block->all.arrive_and_wait(); }

inline float __shfl_xor_sync(unsigned, float x, int across) {
  auto& warp = *block->warps[threadIdx.x / 32];
  block->exchanged[threadIdx.x] = x;
  warp.arrive_and_wait();
  const float other = block->exchanged[threadIdx.x ^ across];
  warp.arrive_and_wait();
  return other;
}

template <typename To, typename From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &x, sizeof x);
  return to;
}
inline float __uint_as_float(unsigned int x) { return bits_as<float>(x); }
inline unsigned int __float_as_uint(float x) { return bits_as<unsigned int>(x); }
inline float float_of_half(unsigned short bits) { return static_cast<float>(bits_as<_Float16>(bits)); }
inline unsigned int half_of_float(float x) { return bits_as<unsigned short>(static_cast<_Float16>(x)); }

inline int atomicAdd(int* x, int added) { return std::exchange(*x, *x + added); }  // blocks run one after the other

inline void atomicMax(unsigned int* x, unsigned int y) {
  std::atomic_ref<unsigned int> shared(*x);
  for (unsigned int found = shared; found < y && !shared.compare_exchange_weak(found, y);) {
  }
}

template <typename T>
inline T __ldcs(const T* x) { return *x; }
template <typename T>
inline void __stcs(T* x, T value) { *x = value; }

template <typename Kernel>
void run_blocks(int blocks, int threads, Kernel kernel) {
  for (int b = 0; b < blocks; ++b) {
    Block own(threads);
    block = &own;
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t) {
      running.emplace_back([=] {
        threadIdx.x = t;
        blockIdx.x = b;
        kernel();
      });
    }
    for (auto& each : running) each.join();
  }
}
