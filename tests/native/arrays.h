// Arrays for the kernels in heap blocks of exactly their size: a sanitizer detects every access past an end.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../../glax/_src/kernels/cpu/native/problem.h"

using glax::Tensor;
using glax::Type;
using Numbers = std::vector<double>;

constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN(), INFINITE = std::numeric_limits<double>::infinity();

// The same numbers on every machine.
struct Random {
  uint64_t state;

  double uniform() {
    state += 0x9e3779b97f4a7c15u;
    uint64_t x = state;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return double((x ^ (x >> 31)) >> 11) / 9007199254740992.0;  // 2^53
  }
  double normal() {
    double total = -6;
    for (int i = 0; i < 12; ++i) total += uniform();
    return total;
  }
  double log_sigmoid() { return -std::log1p(std::exp(-normal())); }
};

// Encodes and decodes bfloat16 (8 bits of exponent, 7 of fraction) and float16 (5 and 10), from their definitions alone.
struct Short {
  int fraction, bias;

  explicit Short(Type type) : fraction(type == Type::bf16 ? 7 : 10), bias(type == Type::bf16 ? 127 : 15) {}

  double decode(uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> fraction, rest = bits & ((1 << fraction) - 1);
    double x = std::ldexp(rest + (exponent ? 1 << fraction : 0), (exponent ? exponent : 1) - bias - fraction);
    if (exponent == 2 * bias + 1) x = rest ? NOT_A_NUMBER : INFINITE;
    return bits & 0x8000 ? -x : x;
  }
  uint16_t encode(double x) const {
    const int infinite = (2 * bias + 1) << fraction, sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return uint16_t(infinite + 1);
    if (std::isinf(x)) return uint16_t(sign | infinite);
    const int exponent = x == 0 ? 1 - bias : std::max(std::ilogb(x), 1 - bias);
    const int units = int(std::nearbyint(std::ldexp(std::fabs(x), fraction - exponent)));  // ties to even
    return uint16_t(sign | std::min(infinite, ((exponent + bias - 1) << fraction) + units));
  }
};

// An array of NaN when allocated: kernels must not read those, and elements that were not written remain NaN.
class Array {
 public:
  Array() = default;
  Array(int64_t count, Type type = Type::f32) : count_(count), type_(type) {
    void* data = nullptr;  // large arrays are aligned like XLA's, since kernels stream to those
    if (bytes() < large || posix_memalign(&data, 64, bytes()) != 0) data = std::malloc(bytes());
    data_ = static_cast<char*>(data);
    if (bytes()) std::memset(data_, 0xff, bytes());
  }
  Array(Array&& other) { *this = std::move(other); }
  Array& operator=(Array&& other) {
    std::swap(count_, other.count_), std::swap(type_, other.type_), std::swap(data_, other.data_);
    return *this;
  }
  ~Array() { std::free(data_); }

  int64_t count() const { return count_; }
  int64_t bytes() const { return count_ * (type_ == Type::f32 ? 4 : 2); }
  Type type() const { return type_; }
  char* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

  double operator[](int64_t i) const {
    if (type_ == Type::f32) return floats()[i];
    return Short(type_).decode(reinterpret_cast<const uint16_t*>(data_)[i]);
  }
  void set(int64_t i, double x) {
    if (type_ == Type::f32) floats()[i] = float(x);
    if (type_ != Type::f32) reinterpret_cast<uint16_t*>(data_)[i] = Short(type_).encode(x);
  }
  template <class Draw>
  void fill(const Draw& draw) {
    for (int64_t i = 0; i < count_; ++i) set(i, draw());
  }

  // A tensor [.., heads, width]; without data if it was never allocated.
  Tensor tensor(int64_t heads, int64_t width) const {
    Tensor x;
    x.data = data_, x.type = type_, x.heads = heads, x.width = width;
    return x;
  }
  Numbers numbers() const {
    Numbers x(count_);
    for (int64_t i = 0; i < count_; ++i) x[i] = (*this)[i];
    return x;
  }
  // The sum of `parts` contiguous arrays.
  Numbers sum_of(int64_t parts) const {
    Numbers x(count_ / parts);
    for (int64_t i = 0; i < count_; ++i) x[i % x.size()] += (*this)[i];
    return x;
  }
  std::string content() const { return std::string(data_, size_t(bytes())); }

 private:
  static constexpr int64_t large = 1 << 20;  // bytes
  int64_t count_ = 0;
  Type type_ = Type::f32;
  char* data_ = nullptr;
};
