// Vectors of LANES floats, in the compiler's vector types. Each instruction set's file includes this one in its namespace.

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef float vec_in_memory __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline vec load(const float* p) { return *reinterpret_cast<const vec_in_memory*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<vec_in_memory*>(p) = x; }
inline vec broadcast(float x) { return x - vec{}; }  // x - 0 preserves -0, x + 0 would not
inline vec choose(ivec mask, vec x, vec y) { return mask ? x : y; }
inline vec minimum(vec x, vec y) { return choose(x < y, x, y); }
inline vec maximum(vec x, vec y) { return choose(x > y, x, y); }
constexpr int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

// Rotates lanes: lane i of the result is lane i + BY of x.
template <int BY, class Vector>
inline Vector rotated(Vector x) {
  ivec from;
  for (int i = 0; i < LANES; ++i) from[i] = (i + BY) % LANES;
#ifdef __clang__
  Vector y;
  for (int i = 0; i < LANES; ++i) y[i] = x[from[i]];
  return y;
#else
  return __builtin_shuffle(x, from);
#endif
}

// The sum over lanes.
inline float sum(vec x) {
  if (LANES >= 16) x += rotated<8>(x);
  if (LANES >= 8) x += rotated<4>(x);
  x += rotated<2>(x);
  x += rotated<1>(x);
  return x[0];
}

// Whether some lane is true.
inline bool any(ivec x) {
  if (LANES >= 16) x |= rotated<8>(x);
  if (LANES >= 8) x |= rotated<4>(x);
  x |= rotated<2>(x);
  x |= rotated<1>(x);
  return x[0];
}

// e^x = 2^n e^r with n whole and |r| <= log(2) / 2.
struct Power {
  vec shifted, rest;  // 1.5 * 2^23 + n, e^r - 1

  explicit Power(vec x) {
    const vec shift = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
    shifted = x * broadcast(1.44269504088896341f) + shift;
    const vec n = shifted - shift;
    // The first part of log 2 has 9 bits, so that n times it is exact.
    const vec r = (x - n * broadcast(0.693359375f)) - n * broadcast(-2.12194440054690583e-4f);
    vec p = broadcast(1.3814539415761828e-3f);
    p = p * r + broadcast(8.36874544620514e-3f);
    p = p * r + broadcast(4.166838899254799e-2f);
    p = p * r + broadcast(0.1666652113199234f);
    p = p * r + broadcast(0.4999999403953552f);
    rest = (p * r) * r + r;
  }

  vec fraction() const { return rest + broadcast(1.f); }
  // 2^n for |n| < 126: the last bits of 1.5 * 2^23 + n are its exponent less the bias.
  vec whole() const { return reinterpret_cast<vec>((reinterpret_cast<uvec>(shifted) << 23) + (127u << 23)); }
};

// e^x, within 2 units in the last place of every float.
inline vec exponential(vec x) {
  // Clamping does not change results: e^-150 is 0 and e^130 is infinite. NaN passes both comparisons.
  x = choose(x < broadcast(-150.f), broadcast(-150.f), x);
  x = choose(x > broadcast(130.f), broadcast(130.f), x);
  const Power power(x);
  // Two factors for 2^n: n exceeds the exponent's range where e^x is denormal or infinite.
  const ivec whole = reinterpret_cast<ivec>(power.shifted) - 0x4b400000, half = whole >> 1;
  const vec low = reinterpret_cast<vec>((half + 127) << 23), high = reinterpret_cast<vec>((whole - half + 127) << 23);
  return power.fraction() * low * high;
}

// e^x for |x| <= 80 or NaN, with one factor for 2^n. Undefined outside that range.
inline vec exponential_of_small(vec x) {
  const Power power(x);
  return power.fraction() * power.whole();
}

// e^x s + added for |x| <= 80 or NaN. The rounding of s + s (e^r - 1) depends on s. One factor next to 1 would have the same error at
// every token of a slow decay, and the errors would add up.
inline vec decayed_by_small(vec x, vec s, vec added) {
  const Power power(x);
  const vec scaled = s * power.whole();
  return scaled + (scaled * power.rest + added);
}

// 1 / x for e^-80 <= x <= e^80, to about 1 ulp.
inline vec reciprocal(vec x) {
#ifdef GLAX_RECIPROCAL
  const vec near = GLAX_RECIPROCAL(x);
  return near + near * (broadcast(1) - x * near);
#else
  return broadcast(1) / x;
#endif
}

// ---- conversions from and to stored types -------------------------------------------------------------------------------

inline float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
}

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  return x != x ? uint16_t(0x7fc0) : uint16_t(rounded);
}

// Converts float16 by integer arithmetic: not every machine and compiler has the type. No intermediate value is a float32 denormal, since
// the caller's threads may flush those to 0.
inline float from_f16(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = x & 0x7c00, rest = uint32_t(x & 0x7fff) << 13;
  float y;
  if (exponent == 0) {
    y = float(x & 0x3ff) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -y : y;
  }
  const uint32_t bits = sign | (exponent == 0x7c00 ? rest | 0x7f800000u : rest + (112u << 23));  // biases: 127 here, 15 there
  __builtin_memcpy(&y, &bits, 4);
  return y;
}

inline uint16_t to_f16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds past the largest
  if (bits < 0x38800000) {  // denormal there: adding 0.5 rounds the last bit to 2^-24
    float y;
    __builtin_memcpy(&y, &bits, 4);
    y += 0.5f;
    __builtin_memcpy(&bits, &y, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  return uint16_t(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}

// Converts the first elements of a row, eight at a time, where the machine has instructions for it. Returns how many.
#ifdef GLAX_CONVERTS_F16
inline int64_t widen_f16(const uint16_t* from, int64_t width, float* to) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  return i;
}

inline int64_t narrow_f16(const float* from, int64_t width, uint16_t* to) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}
#else
inline int64_t widen_f16(const uint16_t*, int64_t, float*) { return 0; }
inline int64_t narrow_f16(const float*, int64_t, uint16_t*) { return 0; }
#endif

// Converts whole vectors of bfloat16 by intrinsics. Compilers split the equivalent loops.
#ifdef GLAX_CONVERTS_BF16
constexpr bool fast_bf16 = true;
inline vec load_bf16(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return reinterpret_cast<vec>(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, bits), 16));
}
inline void store_bf16(uint16_t* p, vec x) {
  const uvec bits = reinterpret_cast<uvec>(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uvec number = reinterpret_cast<uvec>(x == x), stored = (rounded & number) | (0x7fc0 & ~number);
  const __m256i halves = _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(stored));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
}
#else
constexpr bool fast_bf16 = false;
inline vec load_bf16(const uint16_t* p) {
  vec x;
  for (int i = 0; i < LANES; ++i) x[i] = from_bf16(p[i]);
  return x;
}
inline void store_bf16(uint16_t* p, vec x) {
  for (int i = 0; i < LANES; ++i) p[i] = to_bf16(x[i]);
}
#endif

// ---- 8 bits --------------------------------------------------------------------------------------------------------------

// Loads LANES bytes, and stores the last byte of the first `count` lanes, by intrinsics where there are some: compilers take the lanes of
// the equivalent loops one by one.
inline uvec load_bytes(const char* p) {
#ifdef GLAX_LOAD_BYTES
  return reinterpret_cast<uvec>(GLAX_LOAD_BYTES(p));
#else
  uvec x;
  for (int i = 0; i < LANES; ++i) x[i] = uint8_t(p[i]);
  return x;
#endif
}

inline void store_bytes(char* p, uvec x, int64_t count) {
#ifdef GLAX_STORE_BYTES
  if (count == LANES) return GLAX_STORE_BYTES(p, x);
#endif
  for (int64_t i = 0; i < count; ++i) p[i] = char(x[i]);
}

// The number of an int8, which is in the last bits of x.
inline vec from_i8(uvec x) { return __builtin_convertvector(reinterpret_cast<ivec>(x << 24) >> 24, vec); }

// The number of a float8, which is in the last bits of x. No intermediate value is a float32 denormal.
inline vec from_f8(uvec x) {
  const uvec rest = x & 0x7f;
  const vec small = __builtin_convertvector(reinterpret_cast<ivec>(x & 7), vec) * broadcast(0.001953125f);  // 2^-9
  const uvec normal = (rest << 20) + (120u << 23), number = rest < 8 ? reinterpret_cast<uvec>(small) : normal;  // biases: 127 here, 7 there
  return reinterpret_cast<vec>((rest == 0x7f ? (number | 0x7fc00000u) : number) | (x & 0x80) << 24);
}

// Rounds to the nearest, ties to even. Numbers beyond the largest become the largest.
inline uvec to_i8(vec x) {
  x = minimum(maximum(x, broadcast(-127)), broadcast(127));
  return reinterpret_cast<uvec>(x + broadcast(12582912.f)) - 0x4b400000u;  // 1.5 * 2^23
}

inline uvec to_f8(vec x) {
  const uvec bits = reinterpret_cast<uvec>(x), size = bits & 0x7fffffff;
  // Denormal there: adding 1.5 * 2^23 * 2^-9 rounds the last bit to 2^-9.
  const uvec small = reinterpret_cast<uvec>(reinterpret_cast<vec>(size) + broadcast(24576.f)) - 0x46c00000u;
  const uvec normal = (size - 0x3c000000u + 0x7ffffu + ((size >> 20) & 1)) >> 20;
  const uvec rounded = size < 0x3c800000u ? small : normal;
  return (size >= 0x43e00000u ? uvec{} + 0x7e : rounded) | ((bits >> 24) & 0x80);  // 448
}

// Stores past the caches, where the machine can: a line that is written whole need not be read first. `to` is aligned to a vector.
// Other threads see the stores after `streams_end`.
#ifdef GLAX_STREAM
constexpr bool streams = true;
inline void stream(const float* x, float* to, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) GLAX_STREAM(to + i, load(x + i));
}
inline void streams_end() { _mm_sfence(); }
#else
constexpr bool streams = false;
inline void stream(const float*, float*, int64_t) {}
inline void streams_end() {}
#endif

// Converts a row [width] to float32, padded with zeros to a whole vector.
inline void widen(const char* row, Type type, int64_t width, float* to) {
  const uint16_t* from = reinterpret_cast<const uint16_t*>(row);
  if (type == Type::f32 && width % LANES == 0) {
    for (int64_t i = 0; i < width; i += LANES) store(to + i, load(reinterpret_cast<const float*>(row) + i));
    return;
  }
  if (type == Type::f32) {
    __builtin_memcpy(to, row, width * 4);
  } else if (type == Type::bf16) {
    for (int64_t i = 0; i < width; ++i) to[i] = from_bf16(from[i]);
  } else {
    for (int64_t i = widen_f16(from, width, to); i < width; ++i) to[i] = from_f16(from[i]);
  }
  for (int64_t i = width; i < padded(width); ++i) to[i] = 0;
}

// Converts x [width] from float32 to a row of `type`.
inline void narrow(const float* x, char* row, Type type, int64_t width) {
  uint16_t* to = reinterpret_cast<uint16_t*>(row);
  if (type == Type::f32 && width % LANES == 0) {
    for (int64_t i = 0; i < width; i += LANES) store(reinterpret_cast<float*>(row) + i, load(x + i));
  } else if (type == Type::f32) {
    __builtin_memcpy(row, x, width * 4);
  } else if (type == Type::bf16 && fast_bf16 && width % LANES == 0) {
    for (int64_t i = 0; i < width; i += LANES) store_bf16(to + i, load(x + i));
  } else if (type == Type::bf16) {
    for (int64_t i = 0; i < width; ++i) to[i] = to_bf16(x[i]);
  } else {
    for (int64_t i = narrow_f16(x, width, to); i < width; ++i) to[i] = to_f16(x[i]);
  }
}
