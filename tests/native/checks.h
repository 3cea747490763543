// Runs the kernels on a case and compares the results with the reference.
#pragma once
#include <unistd.h>

#include <cstdio>

#include "../../glax/_src/kernels/cpu/native/segments.h"
#include "pool.h"
#include "reference.h"

// A group of checks: prints one line for the group and one for each failure. A group that takes longer than its time is a
// deadlock, and ends the process. With a sanitizer, and behind other work, a group takes a minute.
class Group {
 public:
  explicit Group(const char* name) : name_(name) { alarm(600); }
  ~Group() {
    if (worst_ > 0) {
      std::printf("%-6s %-7s %-40s %5lld checks, %.2f of the bar at worst\n", failed_ ? "FAILED" : "passed",
                  glax::kernels().name, name_, static_cast<long long>(checks_), worst_);
    } else {
      std::printf("%-6s %-7s %-40s %5lld checks\n", failed_ ? "FAILED" : "passed", glax::kernels().name, name_,
                  static_cast<long long>(checks_));
    }
    std::fflush(stdout);
    all_checks += checks_, all_failed += failed_;
  }

  void expect(bool right, const std::string& what) {
    ++checks_;
    if (right) return;
    if (++failed_ <= 20) std::printf("       %s: %s\n", name_, what.c_str());
  }
  void within(double of_the_bar, const std::string& what) {
    if (of_the_bar <= 1) worst_ = std::max(worst_, of_the_bar);
    expect(of_the_bar <= 1, what + ": error is " + std::to_string(of_the_bar) + " of the bar");
  }

  inline static int64_t all_checks = 0, all_failed = 0;

 private:
  const char* name_;
  int64_t checks_ = 0, failed_ = 0;
  double worst_ = 0;
};

// The relative root mean square error divided by the bar; infinite where only one of the two is NaN.
inline double error_of(const Numbers& got, const Numbers& wanted, double bar) {
  if (got.size() != wanted.size()) return INFINITE;
  double error = 0, norm = 1e-60;  // e^-120 is 0 in float32, and so is a gradient as small
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) != std::isnan(wanted[i])) return INFINITE;
    if (std::isnan(wanted[i])) continue;
    error += (got[i] - wanted[i]) * (got[i] - wanted[i]), norm += wanted[i] * wanted[i];
  }
  return std::isfinite(error) ? std::sqrt(error / norm) / bar : INFINITE;
}

// The bars of docs/numerics.md.
inline double bar_of(Type type, bool gradient, bool extreme = false) {
  if (type == Type::bf16) return 3.5e-3;
  if (type == Type::f16) return 1e-3;
  return (gradient ? 5e-5 : 1e-5) * (extreme ? 10 : 1);
}

inline double bar_of(const Case& c, const std::string& result) {
  const Type type = result == "output" ? c.type
                    : result == "dq"   ? c.gradient_type(c.query_heads)
                    : result == "dk"   ? c.gradient_type(c.key_heads)
                    : result == "dv"   ? c.gradient_type(c.value_heads)
                                       : Type::f32;
  const double bar = bar_of(type, result != "output" && result != "final_state", c.extreme);
  return result == "d_scale" || result == "d_constant" ? 10 * bar : bar;  // single sums over everything, with cancellation
}

// Runs the forward and the gradient and holds their results.
struct Outputs {
  Array output, final_state, dq, dk, dv, d_head, d_key, d_value, d_constant, d_initial, d_scale;
  int64_t groups;

  Outputs(const Case& c, const Inputs& in, Pool& pool) : groups((c.K + glax::group - 1) / glax::group) {
    const int64_t H = c.H, K = c.K, V = c.V, N = c.N(), tokens = c.B * c.T;
    output = Array(tokens * H * V, c.type), final_state = Array(N * H * K * V);
    const auto gradient_of = [&](int64_t shared, int64_t width) {
      return Array(tokens * (shared ? shared : H) * width, c.gradient_type(shared));
    };
    dq = gradient_of(c.query_heads, K), dk = gradient_of(c.key_heads, K), dv = gradient_of(c.value_heads, V);
    if (in.head.data() || in.constant.data()) d_head = Array(groups * tokens * H);
    if (in.key.data()) d_key = Array(tokens * H * K);
    if (in.value.data()) d_value = Array(tokens * H * V);
    if (in.constant.data()) d_constant = Array(groups * N * H);
    if (in.initial.data()) d_initial = Array(N * H * K * V);
    d_scale = Array(groups * N * H);

    const auto heads = [&](const Array& x, int64_t width) { return x.tensor(tokens ? x.count() / (tokens * width) : H, width); };
    glax::Problem p;
    p.B = c.B, p.T = c.T, p.N = N, p.H = H, p.K = K, p.V = V, p.reverse = c.reverse, p.block = c.block;
    if (c.packed()) p.boundaries = in.boundaries.data();
    std::vector<int32_t> marks;
    for (int64_t b = 0; b < c.B; ++b) marks.insert(marks.end(), c.marks.begin(), c.marks.end());
    if (!marks.empty()) p.marks = marks.data();
    p.q = heads(in.q, K), p.k = heads(in.k, K), p.v = heads(in.v, V);
    p.head = heads(in.head, 1), p.key = heads(in.key, K), p.value = heads(in.value, V);
    p.constant = in.constant.floats(), p.initial = in.initial.floats(), p.scale = in.scale.floats();
    p.output = heads(output, V), p.final_state = final_state.floats();
    glax::run_forward(pool, p);
    p.output = {}, p.final_state = nullptr;  // the library's gradient call has no such results
    p.d_output = heads(in.d_output, V), p.d_final = in.d_final.floats();
    p.dq = heads(dq, K), p.dk = heads(dk, K), p.dv = heads(dv, V);
    p.d_head = d_head.floats(), p.d_key = d_key.floats(), p.d_value = d_value.floats();
    p.d_constant = d_constant.floats(), p.d_initial = d_initial.floats(), p.d_scale = d_scale.floats();
    glax::run_gradient(pool, p);
  }

  Results results() const {
    Results found{{"output", output.numbers()}, {"final_state", final_state.numbers()}, {"dq", dq.numbers()},
                  {"dk", dk.numbers()},         {"dv", dv.numbers()},                   {"d_scale", d_scale.sum_of(groups)}};
    if (d_head.data()) found["d_head"] = d_head.sum_of(groups);
    if (d_key.data()) found["d_key"] = d_key.numbers();
    if (d_value.data()) found["d_value"] = d_value.numbers();
    if (d_constant.data()) found["d_constant"] = d_constant.sum_of(groups);
    if (d_initial.data()) found["d_initial"] = d_initial.numbers();
    return found;
  }

  // The bytes of every result.
  std::map<std::string, std::string> bits() const {
    return {{"output", output.content()}, {"final_state", final_state.content()}, {"dq", dq.content()},
            {"dk", dk.content()},         {"dv", dv.content()},                   {"d_head", d_head.content()},
            {"d_key", d_key.content()},   {"d_value", d_value.content()},         {"d_constant", d_constant.content()},
            {"d_scale", d_scale.content()}, {"d_initial", d_initial.content()}};
  }
};

inline void compare(Group& group, const Case& c, const Results& got, const Results& wanted) {
  group.expect(got.size() == wanted.size(), c.name() + ": other results than expected");
  for (const auto& [name, numbers] : wanted)
    group.within(error_of(got.count(name) ? got.at(name) : Numbers(), numbers, bar_of(c, name)), c.name() + ": " + name);
}

// One thread's results for a case, against the reference.
inline void check(Group& group, const Case& c, uint64_t seed = 1) {
  Pool pool(1);
  const Inputs in(c, seed);
  compare(group, c, Outputs(c, in, pool).results(), reference(c, in));
}

// The program's groups of tests.
void test_values();
void test_steps();
void test_delta();
void test_replay();
void test_replay_threads();
void test_threads();
void test_delta_threads();
void test_selective();
void test_selective_threads();
