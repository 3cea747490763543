// Kernels for AVX2 with fused multiply-adds.
#if defined(__x86_64__) || defined(_M_X64)
#include <cstdint>
#include <initializer_list>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>
#define LANES 8
#define TOKENS 4
#define GLAX_CONVERTS_F16
#define GLAX_LOAD_BYTES(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))
#define GLAX_STREAM _mm256_stream_ps
#define GLAX_NAME "AVX2"
#define GLAX_NAMESPACE of_avx2
#define GLAX_NAMESPACE_EXPORT avx2
#include "instructions.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
