// The selective scan: the forward, the gradient and the step against a loop in double precision, and with any number of threads.
#include "../../glax/_src/kernels/cpu/native/selective_tasks.h"
#include "checks.h"

namespace {

struct SelectiveCase {
  int64_t rows = 2, T = 37, D = 21, N = 5;
  Type type = Type::f32;
  bool reverse = false;
  double step = 1, sign = -1;  // dt is uniform times `step`, and A is exp(normal) times `sign`
  std::vector<int32_t> boundaries, resets;

  int64_t sequences() const { return boundaries.empty() ? rows : int64_t(boundaries.size()) - 1; }
  std::string name() const {
    const auto number = [](const char* of, int64_t x) { return std::string(" ") + of + std::to_string(x); };
    return number("T", T) + number("D", D) + number("N", N) + number("sequences", sequences()) + " step " + std::to_string(step) +
           (reverse ? " reverse" : "") + (type == Type::f32 ? "" : " 16 bits") + (resets.empty() ? "" : " resets");
  }
  // The places in [rows, T] of a sequence's tokens, in the order of the scan.
  std::vector<int64_t> tokens(int64_t n) const {
    std::vector<int64_t> found;
    const int64_t row = boundaries.empty() ? n : 0, begin = boundaries.empty() ? 0 : boundaries[size_t(n)];
    for (int64_t t = begin; t < (boundaries.empty() ? T : boundaries[size_t(n) + 1]); ++t) found.push_back(row * T + t);
    if (reverse) std::reverse(found.begin(), found.end());
    return found;
  }
};

struct SelectiveArrays {
  Array x, dt, A, B, C, initial, d_y, d_final, y, final_state, starts, dx, ddt, dA, dB, dC, d_initial;
  int64_t groups;

  explicit SelectiveArrays(const SelectiveCase& c) {
    Random random{7};
    const int64_t tokens = c.rows * c.T, state = c.D * c.N, states = c.sequences() * state;
    const auto draw = [&](int64_t count, Type type = Type::f32) {
      Array x(count, type);
      x.fill([&] { return random.normal(); });
      return x;
    };
    x = draw(tokens * c.D, c.type), B = draw(tokens * c.N, c.type), C = draw(tokens * c.N, c.type);
    dt = Array(tokens * c.D), dt.fill([&] { return c.step * random.uniform(); });
    A = Array(state), A.fill([&] { return c.sign * std::exp(random.normal()); });
    initial = draw(states), d_y = draw(tokens * c.D), d_final = draw(states);
    y = Array(tokens * c.D), final_state = Array(states), d_initial = Array(states), dA = Array(states);
    dx = Array(tokens * c.D, c.type), ddt = Array(tokens * c.D);
    glax::SelectiveScan p = problem(c);
    const int64_t channels = glax::selective_alignment;
    groups = (c.D + channels - 1) / channels;
    dB = Array(groups * tokens * c.N), dC = Array(groups * tokens * c.N);
    const int64_t chunks = c.boundaries.empty() ? p.first_chunk(c.rows) : c.T / p.chunk + c.sequences();
    starts = Array(chunks * state);
  }

  glax::SelectiveScan problem(const SelectiveCase& c) const {
    glax::SelectiveScan p;
    p.rows = c.rows, p.T = c.T, p.D = c.D, p.N = c.N, p.sequences = c.sequences(), p.reverse = c.reverse;
    if (!c.boundaries.empty()) p.boundaries = c.boundaries.data();
    if (!c.resets.empty()) p.resets = c.resets.data();
    p.x = x.tensor(1, c.D), p.dt = dt.tensor(1, c.D), p.B = B.tensor(1, c.N), p.C = C.tensor(1, c.N);
    p.A = A.floats(), p.initial = initial.floats(), p.starts = starts.floats();
    p.y = y.floats(), p.final_state = final_state.floats(), p.d_y = d_y.floats(), p.d_final = d_final.floats();
    p.dx = dx.tensor(1, c.D), p.ddt = ddt.tensor(1, c.D), p.dA = dA.floats(), p.dB = dB.floats(), p.dC = dC.floats();
    p.d_initial = d_initial.floats(), p.group_channels = glax::selective_alignment;
    return p;
  }

  void run(const SelectiveCase& c, Pool& pool) {
    const glax::SelectiveScan p = problem(c);
    glax::run_selective(pool, p, false);
    glax::run_selective(pool, p, true);
  }

  Results results(const SelectiveCase& c) const {
    return {{"y", y.numbers()}, {"final", final_state.numbers()}, {"dx", dx.numbers()}, {"ddt", ddt.numbers()},
            {"dA", dA.sum_of(c.sequences())}, {"dB", dB.sum_of(groups)}, {"dC", dC.sum_of(groups)}, {"d_initial", d_initial.numbers()}};
  }
  std::string bits() const {
    std::string all;
    for (const Array* x : {&y, &final_state, &dx, &ddt, &dA, &dB, &dC, &d_initial}) all += x->content();
    return all;
  }
};

Results loop(const SelectiveCase& c, const SelectiveArrays& in) {
  const int64_t rows = c.rows * c.T, state = c.D * c.N;
  Results r{{"y", Numbers(rows * c.D)}, {"final", in.initial.numbers()}, {"dx", Numbers(rows * c.D)}, {"ddt", Numbers(rows * c.D)},
            {"dA", Numbers(state)}, {"dB", Numbers(rows * c.N)}, {"dC", Numbers(rows * c.N)}, {"d_initial", in.d_final.numbers()}};
  for (int64_t s = 0; s < c.sequences(); ++s) {
    const std::vector<int64_t> tokens = c.tokens(s);
    for (int64_t d = 0; d < c.D; ++d) {
      for (int64_t n = 0; n < c.N; ++n) {
        const int64_t own = s * state + d * c.N + n;
        const double A = in.A[d * c.N + n];
        std::vector<double> before, after;
        double h = in.initial[own];
        for (int64_t t : tokens) {
          const bool fresh = !c.resets.empty() && c.resets[size_t(t)];
          before.push_back(fresh ? 0 : h);
          h = (fresh ? 0 : std::exp(in.dt[t * c.D + d] * A) * h) + in.dt[t * c.D + d] * in.x[t * c.D + d] * in.B[t * c.N + n];
          after.push_back(h), r["y"][size_t(t * c.D + d)] += in.C[t * c.N + n] * h;
        }
        r["final"][size_t(own)] = h;
        double G = in.d_final[own];
        for (size_t i = tokens.size(); i-- > 0;) {
          const int64_t t = tokens[i], at = t * c.D + d;
          const double dt = in.dt[at], x = in.x[at], B = in.B[t * c.N + n];
          G += in.C[t * c.N + n] * in.d_y[at];
          r["dC"][size_t(t * c.N + n)] += in.d_y[at] * after[i], r["dB"][size_t(t * c.N + n)] += G * dt * x;
          r["dx"][size_t(at)] += G * dt * B, r["ddt"][size_t(at)] += G * x * B;
          const bool fresh = !c.resets.empty() && c.resets[size_t(t)];
          G = fresh ? 0 : std::exp(dt * A) * G;
          r["dA"][size_t(d * c.N + n)] += G * before[i] * dt, r["ddt"][size_t(at)] += G * before[i] * A;
        }
        r["d_initial"][size_t(own)] = G;
      }
    }
  }
  return r;
}

void check(Group& group, const SelectiveCase& c) {
  Pool pool(1);
  SelectiveArrays arrays(c);
  arrays.run(c, pool);
  const Results got = arrays.results(c);
  for (const auto& [name, wanted] : loop(c, arrays)) {
    const bool gradient = name[0] == 'd';
    group.within(error_of(got.at(name), wanted, bar_of(name == "dx" ? c.type : Type::f32, gradient)), c.name() + ": " + name);
  }
}

void check_step(Group& group, Type type, Type state_type, int64_t D, int64_t N, double size) {
  Random random{3};
  const std::vector<int32_t> slots{3, -1, 0, 5, std::numeric_limits<int32_t>::max()};
  const int64_t rows = slots.size(), P = 5;
  const auto draw = [&](int64_t count, Type of) {
    Array x(count, of);
    x.fill([&] { return random.normal(); });
    return x;
  };
  const Array x = draw(rows * D, type), B = draw(rows * N, type), C = draw(rows * N, type), state = draw(P * D * N, state_type);
  Array dt(rows * D, type), A(D * N), y(rows * D);
  dt.fill([&] { return size * random.uniform(); }), A.fill([&] { return -std::exp(random.normal()); });
  Numbers wanted_y(size_t(rows * D)), wanted = state.numbers();
  for (int64_t b = 0; b < rows; ++b) {
    for (int64_t i = 0; i < D * N && slots[size_t(b)] >= 0 && slots[size_t(b)] < P; ++i) {
      const int64_t d = b * D + i / N, n = b * N + i % N;
      double& h = wanted[size_t(slots[size_t(b)] * D * N + i)];
      h = std::exp(dt[d] * A[i]) * h + dt[d] * x[d] * B[n];
      wanted_y[size_t(d)] += C[n] * h;
    }
  }
  glax::SelectiveStep p;
  p.B = rows, p.D = D, p.N = N, p.P = P, p.slots = slots.data(), p.A = A.floats(), p.y = y.floats();
  p.x = x.tensor(1, D), p.dt = dt.tensor(1, D), p.in = B.tensor(1, N), p.out = C.tensor(1, N), p.state = state.tensor(1, D * N);
  Pool pool(2);
  glax::run_selective_step(pool, p);
  const std::string name = "step D" + std::to_string(D) + " N" + std::to_string(N) + " size " + std::to_string(size);
  group.within(error_of(y.numbers(), wanted_y, bar_of(Type::f32, false)), name + ": y");
  group.within(error_of(state.numbers(), wanted, bar_of(state_type, false)), name + ": state");
}

}  // namespace

void test_selective() {
  Group group("the selective scan");
  for (double step : {0., 0.1, 1000.}) {
    for (bool reverse : {false, true}) {
      SelectiveCase c;
      c.step = step, c.reverse = reverse;
      check(group, c);
      c.rows = 1, c.T = 90, c.boundaries = {0, 40, 40, 41, 90};
      check(group, c);
      c.boundaries = {}, c.resets = std::vector<int32_t>(90);
      for (size_t t : {0, 7, 31, 32, 64, 89}) c.resets[t] = 1;
      check(group, c);
    }
  }
  const int64_t widths[][2] = {{1, 1}, {64, 16}, {65, 3}, {150, 17}};
  for (const auto& [D, N] : widths) {
    SelectiveCase c;
    c.D = D, c.N = N, c.T = 1;
    check(group, c);
    c.T = 33, c.type = D == 65 ? Type::bf16 : D == 150 ? Type::f16 : Type::f32;
    check(group, c);
    for (double size : {0.1, 500.}) {
      check_step(group, Type::f32, Type::f32, D, N, size);
      check_step(group, Type::bf16, Type::bf16, D, N, size), check_step(group, Type::f16, Type::f16, D, N, size);
    }
  }
  SelectiveCase grows;
  grows.sign = 1, grows.step = 0.02;
  check(group, grows);
  test_selective_threads();
}

void test_selective_threads() {
  Group group("threads: the selective scan");
  SelectiveCase c;
  c.rows = 1, c.D = 200, c.N = 16, c.T = 90, c.boundaries = {0, 40, 40, 41, 90};
  std::string wanted;
  for (const auto& [threads, kind] : {std::pair(1, Pool::ready), {2, Pool::ready}, {8, Pool::ready}, {8, Pool::busy}, {3, Pool::late}}) {
    SelectiveArrays arrays(c);
    {
      Pool pool(threads, kind);
      arrays.run(c, pool);
    }
    if (wanted.empty()) wanted = arrays.bits();
    group.expect(arrays.bits() == wanted, c.name() + ": differs with " + std::to_string(threads) + " threads");
  }
}
