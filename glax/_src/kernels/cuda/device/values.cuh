// Numbers in memory and in registers: 32-bit floats in registers, and in memory one of the STORED dtypes. FLOAT8 is e4m3fn, in
// which states hold no NaN: it would read as 480.
// Compiled by NVRTC, which has no headers beside it; tests compile it for the host, behind tests/emulate_cuda.h.

enum Stored { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, FLOAT8 = 4 };

template <int DTYPE>
struct Memory {
  using word = unsigned short;
};
template <>
struct Memory<FLOAT32> {
  using word = unsigned int;
};
template <>
struct Memory<INT8> {
  using word = unsigned char;
};
template <>
struct Memory<FLOAT8> {
  using word = unsigned char;
};

// 2^120: a float8's seven bits are the uppermost of the exponent and the mantissa of a float that is as many times smaller.
constexpr float FLOAT8_SCALE = 1.329227995784916e36f;

template <int DTYPE>
__device__ inline float to_float(unsigned int bits) {
  if (DTYPE == FLOAT32) return __uint_as_float(bits);
  if (DTYPE == BFLOAT16) return __uint_as_float(bits << 16);
  if (DTYPE == INT8) return static_cast<float>(static_cast<signed char>(bits));
  if (DTYPE == FLOAT8) {
    const float magnitude = __uint_as_float((bits & 0x7fu) << 20) * FLOAT8_SCALE;
    return bits & 0x80u ? -magnitude : magnitude;
  }
  return float_of_half(static_cast<unsigned short>(bits));
}

// Round to nearest, ties to even; NaN stays NaN. What rounds to 8 bits must be finite, and is first cut to the dtype's numbers.
template <int DTYPE>
__device__ inline unsigned int to_bits(float x) {
  if (DTYPE == FLOAT32) return __float_as_uint(x);
  if (DTYPE == INT8) return static_cast<unsigned char>(static_cast<signed char>(rintf(fminf(fmaxf(x, -127.0f), 127.0f))));
  if (DTYPE == FLOAT8) {
    const unsigned int magnitude = __float_as_uint(fminf(fabsf(x), 448.0f) / FLOAT8_SCALE);
    const unsigned int rounded = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    return rounded | (__float_as_uint(x) >> 24 & 0x80u);
  }
  if (DTYPE == FLOAT16) return half_of_float(x);
  const unsigned int bits = __float_as_uint(x);
  if (x != x) return 0x7fc0u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

template <int DTYPE>
__device__ inline float load(const void* x, long long i) {
  return to_float<DTYPE>(static_cast<const typename Memory<DTYPE>::word*>(x)[i]);
}

template <int DTYPE>
__device__ inline void store(void* x, long long i, float value) {
  static_cast<typename Memory<DTYPE>::word*>(x)[i] = static_cast<typename Memory<DTYPE>::word>(to_bits<DTYPE>(value));
}

// COUNT numbers in one access of at most 16 bytes, which passes the caches: states are larger than these, and each is read once.
template <int BYTES>
struct Words;
template <>
struct Words<1> {
  using type = unsigned char;
};
template <>
struct Words<2> {
  using type = unsigned short;
};
template <>
struct Words<4> {
  using type = unsigned int;
};
template <>
struct Words<8> {
  using type = uint2;
};
template <>
struct Words<16> {
  using type = uint4;
};

template <int DTYPE, int COUNT>
union Pack {
  typename Words<COUNT * sizeof(typename Memory<DTYPE>::word)>::type whole;
  typename Memory<DTYPE>::word each[COUNT];
};

template <int DTYPE, int COUNT>
__device__ inline void load_pack(Pack<DTYPE, COUNT>& pack, const void* x, long long i) {
  using Whole = typename Words<COUNT * sizeof(typename Memory<DTYPE>::word)>::type;
  pack.whole = __ldcs(reinterpret_cast<const Whole*>(static_cast<const typename Memory<DTYPE>::word*>(x) + i));
}

template <int DTYPE, int COUNT>
__device__ inline void unpack(const Pack<DTYPE, COUNT>& pack, float (&values)[COUNT]) {
#pragma unroll
  for (int c = 0; c < COUNT; ++c) values[c] = to_float<DTYPE>(pack.each[c]);
}

template <int DTYPE, int COUNT>
__device__ inline void load_streaming(const void* x, long long i, float (&values)[COUNT]) {
  Pack<DTYPE, COUNT> pack;
  load_pack(pack, x, i);
  unpack(pack, values);
}

template <int DTYPE, int COUNT>
__device__ inline void store_streaming(void* x, long long i, const float (&values)[COUNT]) {
  using Whole = typename Words<COUNT * sizeof(typename Memory<DTYPE>::word)>::type;
  Pack<DTYPE, COUNT> pack;
#pragma unroll
  for (int c = 0; c < COUNT; ++c) pack.each[c] = static_cast<typename Memory<DTYPE>::word>(to_bits<DTYPE>(values[c]));
  __stcs(reinterpret_cast<Whole*>(static_cast<typename Memory<DTYPE>::word*>(x) + i), pack.whole);
}
