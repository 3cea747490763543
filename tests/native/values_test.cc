// Forward and gradient against the recurrence in double precision.
#include "checks.h"

namespace {

void widths() {
  Group group("widths, every form of gates");
  const int64_t widths[][2] = {{1, 3}, {3, 1}, {16, 17}, {17, 16}, {40, 100}, {100, 40}, {128, 128}, {300, 20}, {20, 300}};
  int64_t i = 0;
  for (const auto& [K, V] : widths) {
    for (Gates gates : ALL_GATES) {
      Case c;
      c.gates = gates, c.K = K, c.V = V, c.H = 1, c.T = 37;
      c.reverse = i % 2, c.initial = i % 3, ++i;
      check(group, c);
    }
  }
}

void lengths() {
  Group group("lengths, to both sides of a block");
  for (int64_t T : {0, 1, 2, 7, 8, 9, 15, 16, 17, 33}) {
    for (Gates gates : ALL_GATES) {
      Case c;
      c.gates = gates, c.T = T, c.block = 8, c.K = 17, c.V = 5, c.B = 2;
      check(group, c);
      c.reverse = true, c.initial = false;
      check(group, c);
    }
  }
  for (int64_t block : {1, 2, 3, 64}) {
    Case c;
    c.gates = Gates::key_and_value, c.block = block, c.K = 9, c.V = 33;
    check(group, c);
  }
}

void heads() {
  Group group("heads that share a query, key or value");
  const int64_t heads[][3] = {{1, 4, 4}, {4, 2, 1}, {2, 1, 4}, {1, 1, 4}, {4, 4, 2}};
  for (const auto& [q, k, v] : heads) {
    for (Gates gates : ALL_GATES) {
      Case c;
      c.gates = gates, c.H = 4, c.query_heads = q, c.key_heads = k, c.value_heads = v, c.B = 2, c.K = 5, c.V = 18, c.T = 19;
      check(group, c);
      c.type = Type::bf16;
      check(group, c);
    }
  }
}

// Rows so long that a task scans several heads together.
void heads_together() {
  Group group("heads scanned together");
  for (Gates gates : ALL_GATES) {
    Case c;
    c.gates = gates, c.H = 10, c.K = 64, c.V = 60;
    check(group, c);
    c.query_heads = 5, c.value_heads = 2, c.type = Type::bf16, c.reverse = true;
    check(group, c);
    c.boundaries = {0, 0, 13, 35};
    check(group, c);
    c.query_heads = c.key_heads = 1, c.H = 12, c.value_heads = 0;  // more heads share a query than a task scans together
    check(group, c);
  }
}

// Results so large that they are written past the caches.
void large() {
  Group group("large results");
  Case c;
  c.gates = Gates::key_and_value, c.H = 32, c.T = 4096;
  check(group, c);
}

void packed() {
  Group group("packed sequences, empty ones, padding");
  for (const std::vector<int32_t>& boundaries :
       {std::vector<int32_t>{0, 0, 13, 13, 13, 40, 41, 52}, {0, 50}, {5, 9, 30}, {0, 0, 0}, {57, 57}}) {
    for (Gates gates : ALL_GATES) {
      Case c;
      c.gates = gates, c.boundaries = boundaries, c.T = 57, c.K = 18, c.V = 7, c.block = 8;
      check(group, c);
      c.reverse = true, c.initial = false;
      check(group, c);
    }
  }
}

// Rows in three runs with padding, which holds NaN. NaN in the second run of row 0 leaves all other results as they are.
void marked() {
  Group group("marks of runs and padding");
  constexpr int64_t first = 12, last = 20;
  for (Gates gates : ALL_GATES) {
    for (bool reverse : {false, true}) {
      Case c;
      c.gates = gates, c.T = 33, c.B = 2, c.K = 18, c.V = 7, c.block = 8, c.reverse = reverse;
      c.marks.assign(size_t(c.T), glax::continues);
      for (int64_t t : {0, 1, 30, 31, 32}) c.marks[size_t(t)] = glax::padding;
      c.marks[size_t(reverse ? first - 1 : first)] = c.marks[size_t(reverse ? last : last + 1)] = glax::resets;
      check(group, c);
      for (int64_t at : {first, last}) {
        for (Array Inputs::* x : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::head, &Inputs::key, &Inputs::value, &Inputs::d_output}) {
          Inputs in(c, 1);
          const int64_t row = (in.*x).count() / (c.B * c.T);
          for (int64_t i = 0; i < row; ++i) (in.*x).set(at * row + i, NOT_A_NUMBER);
          Pool pool(1);
          Results got = Outputs(c, in, pool).results(), wanted = reference(c, in);
          for (auto& [name, numbers] : wanted) {
            const bool sum = name == "d_scale" || name == "d_constant", state = name == "final_state" || name == "d_initial";
            const int64_t each = int64_t(numbers.size()) / (sum || state ? c.B : c.B * c.T), from = sum ? 0 : first * each;
            const int64_t until = sum ? each : (last + 1) * each;
            for (int64_t i = from; i < until && !state; ++i) got[name][size_t(i)] = numbers[size_t(i)] = 0;
          }
          compare(group, c, got, wanted);
        }
      }
    }
  }
}

void garbage() {
  Group group("boundaries that are garbage");
  constexpr int32_t least = std::numeric_limits<int32_t>::min(), most = std::numeric_limits<int32_t>::max();
  for (const std::vector<int32_t>& boundaries :
       {std::vector<int32_t>{-7, 5, 20, most}, {least, most}, {40, 20, 10, 0}, {most, least, 0, most}, {9, -3, -9, 4},
        {50, 60, 70}}) {
    for (Gates gates : {Gates::none, Gates::head, Gates::key_and_value}) {
      for (bool reverse : {false, true}) {
        Case c;
        c.gates = gates, c.boundaries = boundaries, c.T = 30, c.reverse = reverse, c.K = 5, c.V = 3;
        check(group, c);
      }
    }
  }
  // Overlapping sequences have no defined result: only the rows of some sequence are written.
  for (Gates gates : {Gates::none, Gates::constant, Gates::key_and_value}) {
    Case c;
    c.gates = gates, c.boundaries = {2, 20, 10, 25, 0, 5}, c.T = 30, c.K = 5, c.V = 3;
    Pool pool(1);
    const Inputs in(c, 1);
    for (const auto& [name, numbers] : Outputs(c, in, pool).results()) {
      const size_t row = numbers.size() / size_t(c.T);
      const bool by_token = name == "output" || name == "dq" || name == "dk" || name == "dv" ||
                            name == "d_head" || name == "d_key" || name == "d_value";
      bool right = true;
      for (size_t i = 0; i < numbers.size(); ++i) right &= std::isnan(numbers[i]) == (by_token && i / row >= 25);
      group.expect(right, c.name() + ": " + name + " is NaN or was written in the wrong places");
    }
  }
}

void storage() {
  Group group("bfloat16 and float16");
  for (Type type : {Type::bf16, Type::f16}) {
    for (Gates gates : ALL_GATES) {
      for (Type gate_type : {type, Type::f32}) {
        Case c;
        c.gates = gates, c.type = type, c.gate_type = gate_type, c.K = 33, c.V = 17, c.reverse = gate_type == type;
        check(group, c);
        c.type = Type::f32, c.K = 16, c.V = 32;
        check(group, c);
      }
    }
  }
}

void strengths() {
  Group group("gates of every strength");
  const double inf = INFINITE;
  for (Gates gates : ALL_GATES) {
    if (gates == Gates::none) continue;
    for (double x : {0., -1e-6, 0.05, -1., -20., -39., -41., -120., -inf}) {
      Case c;
      c.gates = gates, c.K = 17, c.V = 20, c.gate = [x](Random&) { return x; };
      check(group, c);
    }
    for (double x : {-100., -inf}) {
      for (double part : {0.02, 0.2}) {
        Case c;
        c.gates = gates, c.K = 17, c.V = 20, c.T = 60, c.extreme = true;
        c.gate = [=](Random& random) { return random.uniform() < part ? x : random.log_sigmoid(); };
        check(group, c);
        c.reverse = true;
        check(group, c, 2);
      }
    }
    Case c;
    c.gates = gates, c.K = 40, c.V = 20, c.T = 70, c.gate = [](Random& random) { return 3 * random.log_sigmoid(); };
    check(group, c);
    c.gate = [](Random& random) { return random.uniform() / 2 - 0.2; };
    check(group, c);
  }
}

// Values are divided by up to e^-40 within a block: those that overflow or underflow float32 use the narrow limit.
void magnitudes() {
  Group group("numbers of every magnitude");
  const double magnitudes[][4] = {{1, 3e10, 3e10, 1},      {1, 1e17, 1e17, 1e-10}, {1, 1e10, 1e26, 1e-10}, {1, 1, 1e35, 1e-9},
                                  {1e15, 1e10, 1e10, 1e-9}, {1e-24, 1, 1, 1},       {1e-28, 1, 1, 1},       {1, 1, 1, 1e-28},
                                  {1, 1, 1e-24, 1},         {1, 1e-14, 1e-14, 1},   {1e-13, 1, 1, 1},       {1, 1e-24, 1, 1}};
  for (Gates gates : ALL_GATES) {
    for (const auto& [q, k, v, d] : magnitudes) {
      for (double x : {-0.9, -1.4, 0.}) {  // the last stands for log-sigmoid
        Case c;
        c.gates = gates, c.T = 70, c.K = 17, c.V = 20, c.block = 24;
        if (x != 0) c.gate = [x](Random&) { return x; };
        Pool pool(1);
        const Inputs in = Inputs(c, 1).scaled(q, k, v, d);
        compare(group, c, Outputs(c, in, pool).results(), reference(c, in));
      }
    }
  }
  Case c;
  c.gates = Gates::key, c.H = 1, c.T = 2100, c.K = 3, c.V = 5, c.gate = [](Random&) { return -1.4; };  // in segments
  Pool pool(1);
  const Inputs in = Inputs(c, 1).scaled(1, 3e10, 3e10, 1);
  compare(group, c, Outputs(c, in, pool).results(), reference(c, in));
}

// Decays next to 1: equal rounding errors at every token or stretch would add up.
void long_steady() {
  Group group("steady gates over many tokens");
  for (Gates gates : {Gates::constant, Gates::head, Gates::key, Gates::key_and_value}) {
    for (int64_t H : {1, 8}) {  // in segments, and whole
      Case c;
      c.gates = gates, c.T = H == 1 ? 200000 : 30000, c.H = H, c.K = 2, c.V = 3, c.gate = [](Random&) { return -3e-5; };
      check(group, c);
    }
  }
}

void segments() {
  Group group("few heads, long sequences: segments");
  for (Gates gates : ALL_GATES) {
    Case c;
    c.gates = gates, c.H = 1, c.T = 2100, c.K = 3, c.V = 5;
    check(group, c);
    c.boundaries = {0, 0, 1300, 1301, 2090}, c.reverse = true, c.initial = gates == Gates::key;
    check(group, c);
    if (gates == Gates::none) continue;
    c.extreme = true, c.gate = [](Random& random) { return random.uniform() < 0.02 ? -INFINITE : random.log_sigmoid(); };
    check(group, c);
  }
}

void exponential() {
  Group group("the exponential");
  for (int64_t count : {1, 3, 4, 5, 15, 16, 17, 1000}) {
    Random random{7};
    Array x(count), y(count);
    x.fill([&] { return 190 * random.uniform() - 103; });
    glax::kernels().exponential(x.floats(), y.floats(), count);
    double worst = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double wanted = std::exp(x[i]), unit = std::ldexp(1., std::max(std::ilogb(wanted), -126) - 23);
      worst = std::max(worst, std::fabs(y[i] - wanted) / unit);
    }
    group.within(worst / 2, "e^x of " + std::to_string(count));
  }
  Array x(3), y(3);
  x.set(0, -INFINITE), x.set(1, INFINITE), x.set(2, NOT_A_NUMBER);
  glax::kernels().exponential(x.floats(), y.floats(), 3);
  group.expect(y[0] == 0 && y[1] == INFINITE && std::isnan(y[2]), "e^x of -inf, inf and NaN");
}

// The checks must fail for results that are off by slightly more than the bar.
void spoilt() {
  Group group("spoilt results are found");
  for (Gates gates : ALL_GATES) {
    Case c;
    c.gates = gates, c.boundaries = {0, 9, 20}, c.T = 21;
    Pool pool(1);
    const Inputs in(c, 1);
    const Results wanted = reference(c, in);
    for (const auto& [name, good] : Outputs(c, in, pool).results()) {
      double norm = 0;
      for (double x : wanted.at(name)) norm += std::isnan(x) ? 0 : x * x;
      const double bar = bar_of(c, name);
      group.expect(error_of(good, wanted.at(name), bar) <= 1, name + " is wrong before it is spoilt");
      for (double by : {2.5 * bar * std::sqrt(norm), INFINITE, NOT_A_NUMBER}) {
        Numbers bad = good;
        bad[bad.size() / 3] += by;
        group.expect(error_of(bad, wanted.at(name), bar) > 1, name + " is spoilt by " + std::to_string(by) + ", unseen");
      }
      if (std::isnan(good.back())) {
        Numbers bad = good;
        bad.back() = 0;
        group.expect(error_of(bad, wanted.at(name), bar) > 1, name + " is written into padding, unseen");
      }
    }
  }
}

}  // namespace

void test_values() {
  widths(), lengths(), heads(), heads_together(), large(), packed(), marked(), garbage(), storage(), strengths();
  magnitudes(), long_steady(), segments(), exponential(), spoilt();
}
