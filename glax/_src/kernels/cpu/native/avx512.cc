// Kernels for AVX-512.
#if defined(__x86_64__) || defined(_M_X64)
#include <cstdint>
#include <initializer_list>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif
#include <immintrin.h>
#define LANES 16
#define TOKENS 6
#define GLAX_CONVERTS_F16
#define GLAX_CONVERTS_BF16
#define GLAX_RECIPROCAL(x) _mm512_maskz_rcp14_ps(0xffff, x)  // GCC's header warns without the mask
#define GLAX_LOAD_BYTES(p) _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))
#define GLAX_STORE_BYTES(p, x) \
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(x)))
#define GLAX_STREAM _mm512_stream_ps
#define GLAX_NAME "AVX-512"
#define GLAX_NAMESPACE of_avx512
#define GLAX_NAMESPACE_EXPORT avx512
#include "instructions.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
