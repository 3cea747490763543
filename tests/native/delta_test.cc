// The delta rule: the forward, the gradient and the step against a scan in double precision, and with any number of threads.
#include "../../glax/_src/kernels/cpu/native/delta_tasks.h"
#include "checks.h"

namespace {

enum class Erases { beta, erase, erase_and_write };

struct DeltaCase {
  Gates gates = Gates::head;
  Erases erases = Erases::beta;
  int64_t K = 16, V = 16, T = 37, B = 1, H = 2, query_heads = 0;
  Type type = Type::f32;
  bool reverse = false, repeats_keys = false;
  double gate = 1;  // times log-sigmoid
  std::vector<int32_t> boundaries, marks;

  int64_t N() const { return boundaries.empty() ? B : int64_t(boundaries.size()) - 1; }
  int64_t q_heads() const { return query_heads ? query_heads : H; }
  std::string name() const {
    const auto number = [](const char* of, int64_t x) { return std::string(" ") + of + std::to_string(x); };
    return name_of(gates) + number("erases ", int(erases)) + number("T", T) + number("H", H) + number("K", K) + number("V", V) +
           number("N", N()) + " gate " + std::to_string(gate) + (reverse ? " reverse" : "") + (type == Type::f32 ? "" : " 16 bits") +
           (marks.empty() ? "" : " marks");
  }
  // Tokens first to last of row b in the order of the scan, without padding.
  std::vector<int64_t> scan(int64_t b, int64_t first, int64_t last) const {
    std::vector<int64_t> tokens;
    for (int64_t t = first; t < last; ++t)
      if (marks.empty() || marks[size_t(b * T + t)] != glax::padding) tokens.push_back(t);
    if (reverse) std::reverse(tokens.begin(), tokens.end());
    return tokens;
  }
  // Whether a token of a scan starts from a state of zeros: it is marked, or padding lies before it.
  bool resets(int64_t b, const std::vector<int64_t>& scan, size_t s) const {
    return !marks.empty() && s > 0 && (marks[size_t(b * T + scan[s])] == glax::resets || std::abs(scan[s] - scan[s - 1]) > 1);
  }
};

// Every array of a problem, with its gradient.
struct DeltaArrays {
  Array q, k, v, head, key, constant, beta, erase, write, initial, scale, d_output, d_final;
  Array output, final_state, dq, dk, dv, d_head, d_key, d_constant, d_beta, d_erase, d_write, d_initial, d_scale;

  explicit DeltaArrays(const DeltaCase& c) {
    Random random{7};
    const int64_t tokens = c.B * c.T, N = c.N(), H = c.H, K = c.K, V = c.V;
    const auto draw = [&](int64_t count, Type type) {
      Array x(count, type);
      x.fill([&] { return random.normal(); });
      return x;
    };
    const auto gates = [&](int64_t count) {
      Array x(count);
      x.fill([&] { return c.gate * random.log_sigmoid(); });
      return x;
    };
    q = draw(tokens * c.q_heads() * K, c.type), k = draw(tokens * H * K, c.type), v = draw(tokens * H * V, c.type);
    d_output = draw(tokens * H * V, c.type), d_final = draw(N * H * K * V, Type::f32), initial = draw(N * H * K * V, Type::f32);
    for (int64_t row = 0; row < tokens * H; ++row) {  // keys of norm 1
      const int64_t from = c.repeats_keys ? row % H : row;
      double norm = 0;
      for (int64_t i = 0; i < K; ++i) norm += k[from * K + i] * k[from * K + i];
      for (int64_t i = 0; i < K; ++i) k.set(row * K + i, k[from * K + i] / std::sqrt(norm));
    }
    if (c.gates == Gates::head) head = gates(tokens * H);
    if (c.gates == Gates::key) key = gates(tokens * H * K);
    if (c.gates == Gates::constant) constant = gates(N * H);
    if (c.erases == Erases::beta) {
      beta = Array(tokens * H, c.type), beta.fill([&] { return 2 * random.uniform(); });
    } else {
      erase = Array(tokens * H * K, c.type);
      for (int64_t i = 0; i < tokens * H * K; ++i) erase.set(i, k[i] * random.uniform());
    }
    if (c.erases == Erases::erase_and_write) write = Array(tokens * H * V, c.type), write.fill([&] { return random.uniform(); });
    scale = Array(N), scale.fill([&] { return 0.5 + random.uniform(); });
    output = Array(tokens * H * V, c.type), final_state = Array(N * H * K * V), d_initial = Array(N * H * K * V), d_scale = Array(N * H);
    dq = Array(tokens * H * K, c.q_heads() == H ? c.type : Type::f32), dk = Array(tokens * H * K, c.type), dv = Array(tokens * H * V, c.type);
    if (head.data()) d_head = Array(tokens * H);
    if (key.data()) d_key = Array(tokens * H * K);
    if (constant.data()) d_constant = Array(N * H);
    if (beta.data()) d_beta = Array(tokens * H);
    if (erase.data()) d_erase = Array(tokens * H * K);
    if (write.data()) d_write = Array(tokens * H * V);
  }

  void run(const DeltaCase& c, Pool& pool) {
    const int64_t tokens = c.B * c.T;
    const auto heads = [&](const Array& x, int64_t width) { return x.tensor(tokens ? x.count() / (tokens * width) : c.H, width); };
    glax::Problem p;
    p.B = c.B, p.T = c.T, p.N = c.N(), p.H = c.H, p.K = c.K, p.V = c.V, p.reverse = c.reverse, p.block = 1;
    if (!c.boundaries.empty()) p.boundaries = c.boundaries.data();
    if (!c.marks.empty()) p.marks = c.marks.data();
    p.q = heads(q, c.K), p.k = heads(k, c.K), p.v = heads(v, c.V), p.head = heads(head, 1), p.key = heads(key, c.K);
    p.beta = heads(beta, 1), p.erase = heads(erase, c.K), p.write = heads(write, c.V);
    p.constant = constant.floats(), p.initial = initial.floats(), p.scale = scale.floats();
    p.output = heads(output, c.V), p.final_state = final_state.floats();
    glax::run_delta(pool, p, false);
    p.d_output = heads(d_output, c.V), p.d_final = d_final.floats();
    p.dq = heads(dq, c.K), p.dk = heads(dk, c.K), p.dv = heads(dv, c.V);
    p.d_head = d_head.floats(), p.d_key = d_key.floats(), p.d_constant = d_constant.floats();
    p.d_beta = d_beta.floats(), p.d_erase = d_erase.floats(), p.d_write = d_write.floats();
    p.d_initial = d_initial.floats(), p.d_scale = d_scale.floats();
    glax::run_delta(pool, p, true);
  }

  std::map<std::string, const Array*> results() const {
    return {{"output", &output}, {"final_state", &final_state}, {"dq", &dq},         {"dk", &dk},
            {"dv", &dv},         {"d_head", &d_head},           {"d_key", &d_key},   {"d_constant", &d_constant},
            {"d_beta", &d_beta}, {"d_erase", &d_erase},         {"d_write", &d_write}, {"d_initial", &d_initial},
            {"d_scale", &d_scale}};
  }
  std::vector<Array*> by_token() { return {&q, &k, &v, &head, &key, &beta, &erase, &write, &d_output}; }
};

// Sets the numbers of one token.
void set_token(const DeltaCase& c, Array& x, int64_t b, int64_t t, double to) {
  const int64_t row = x.count() / (c.B * c.T);
  for (int64_t i = 0; i < row; ++i) x.set((b * c.T + t) * row + i, to);
}

Numbers zeros(int64_t count) { return Numbers(static_cast<size_t>(count)); }

// The same results by a scan in double precision, NaN where nothing is written.
Results delta_reference(const DeltaCase& c, const DeltaArrays& in) {
  const int64_t H = c.H, K = c.K, V = c.V, N = c.N();
  Results out;
  for (const auto& [name, array] : in.results())
    if (array->data()) out[name] = Numbers(size_t(array->count()), NOT_A_NUMBER);
  const auto write = [&](const char* name, int64_t at, double x) {
    if (out.count(name)) out[name][size_t(at)] = x;
  };
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t h = 0; h < H; ++h) {
      const int64_t head = n * H + h, first = c.boundaries.empty() ? 0 : c.boundaries[size_t(n)];
      const int64_t last = c.boundaries.empty() ? c.T : c.boundaries[size_t(n) + 1], b = c.boundaries.empty() ? n : 0;
      const std::vector<int64_t> scan = c.scan(b, first, last);
      std::vector<int64_t> rows;
      for (int64_t t : scan) rows.push_back((b * c.T + t) * H + h);
      const auto query = [&](int64_t row, int64_t x) { return in.q[(row / H * c.q_heads() + h * c.q_heads() / H) * K + x]; };
      const auto erase = [&](int64_t row, int64_t x) {
        return in.beta.data() ? in.beta[row] * in.k[row * K + x] : in.erase[row * K + x];
      };
      const auto factor = [&](int64_t row, int64_t y) {
        return in.beta.data() ? in.beta[row] : in.write.data() ? in.write[row * V + y] : 1;
      };
      const auto decay = [&](int64_t row, int64_t x) {
        return std::exp(in.head.data() ? in.head[row] : in.key.data() ? in.key[row * K + x] : in.constant.data() ? in.constant[head] : 0);
      };
      std::vector<Numbers> bars, writes;  // the decayed state and u of each token
      Numbers S = zeros(K * V);
      for (int64_t i = 0; i < K * V; ++i) S[size_t(i)] = in.initial[head * K * V + i];
      const Numbers* state = &S;
      std::vector<Numbers> states;
      states.reserve(rows.size());
      for (size_t s = 0; s < rows.size(); ++s) {
        const int64_t row = rows[s];
        const bool resets = c.resets(b, scan, s);
        Numbers bar = *state, u = zeros(V), after;
        for (int64_t i = 0; i < K * V; ++i) bar[size_t(i)] = resets ? 0 : bar[size_t(i)] * decay(row, i / V);
        for (int64_t y = 0; y < V; ++y) {
          u[size_t(y)] = factor(row, y) * in.v[row * V + y];
          for (int64_t x = 0; x < K; ++x) u[size_t(y)] -= bar[size_t(x * V + y)] * erase(row, x);
        }
        after = bar;
        for (int64_t i = 0; i < K * V; ++i) after[size_t(i)] += in.k[row * K + i / V] * u[size_t(i % V)];
        for (int64_t y = 0; y < V; ++y) {
          double o = 0;
          for (int64_t x = 0; x < K; ++x) o += in.scale[n] * query(row, x) * after[size_t(x * V + y)];
          write("output", row * V + y, o);
        }
        bars.push_back(bar), writes.push_back(u), states.push_back(after), state = &states.back();
      }
      Numbers G = zeros(K * V);
      for (int64_t i = 0; i < K * V; ++i) write("final_state", head * K * V + i, (*state)[size_t(i)]), G[size_t(i)] = in.d_final[head * K * V + i];
      double d_scale = 0, d_constant = 0;
      for (size_t s = rows.size(); s-- > 0;) {
        const int64_t row = rows[s];
        const bool resets = c.resets(b, scan, s);
        Numbers du = zeros(V);
        double d_head = 0, d_beta = 0;
        for (int64_t x = 0; x < K; ++x) {
          double of_q = 0;
          for (int64_t y = 0; y < V; ++y) of_q += states[s][size_t(x * V + y)] * in.d_output[row * V + y];
          write("dq", row * K + x, in.scale[n] * of_q), d_scale += query(row, x) * of_q;
          for (int64_t y = 0; y < V; ++y) G[size_t(x * V + y)] += in.scale[n] * query(row, x) * in.d_output[row * V + y];
        }
        for (int64_t y = 0; y < V; ++y) {
          for (int64_t x = 0; x < K; ++x) du[size_t(y)] += G[size_t(x * V + y)] * in.k[row * K + x];
          write("dv", row * V + y, factor(row, y) * du[size_t(y)]), write("d_write", row * V + y, in.v[row * V + y] * du[size_t(y)]);
          d_beta += in.v[row * V + y] * du[size_t(y)];
        }
        for (int64_t x = 0; x < K; ++x) {
          double of_k = 0, of_e = 0, of_gate = 0;
          for (int64_t y = 0; y < V; ++y) {
            double& g = G[size_t(x * V + y)];
            of_k += g * writes[s][size_t(y)], of_e -= bars[s][size_t(x * V + y)] * du[size_t(y)];
            g -= erase(row, x) * du[size_t(y)];
            of_gate += resets ? 0 : g * bars[s][size_t(x * V + y)];
            g = resets ? 0 : g * decay(row, x);
          }
          d_beta += in.k[row * K + x] * of_e, d_head += of_gate;
          write("dk", row * K + x, of_k + (in.beta.data() ? in.beta[row] * of_e : 0));
          write("d_erase", row * K + x, of_e), write("d_key", row * K + x, of_gate);
        }
        write("d_beta", row, d_beta), write("d_head", row, d_head), d_constant += d_head;
      }
      for (int64_t i = 0; i < K * V; ++i) write("d_initial", head * K * V + i, G[size_t(i)]);
      write("d_scale", head, d_scale), write("d_constant", head, d_constant);
    }
  }
  return out;
}

void check(Group& group, const DeltaCase& c) {
  DeltaArrays arrays(c);
  Pool pool(1);
  arrays.run(c, pool);
  for (const auto& [name, wanted] : delta_reference(c, arrays)) {
    const Array& got = *arrays.results().at(name);
    const bool single = name == "d_scale" || name == "d_constant";
    group.within(error_of(got.numbers(), wanted, (single ? 10 : 2) * bar_of(c.type, name[0] == 'd')), c.name() + ": " + name);
  }
}

// Rows in three runs with padding, which holds NaN. NaN in one run leaves the results of the others as they are.
void check_marks(Group& group, DeltaCase c) {
  constexpr int64_t first = 12, last = 20;  // of the second run of row 0
  c.B = 2, c.T = 33, c.marks.assign(size_t(c.B * c.T), glax::continues);
  for (int64_t t : {int64_t(0), int64_t(1), int64_t(30), int64_t(31), int64_t(32)}) c.marks[size_t(t)] = glax::padding;
  c.marks[size_t(c.reverse ? first - 1 : first)] = c.marks[size_t(c.reverse ? last : last + 1)] = glax::resets;
  c.marks[size_t(c.T + 9)] = glax::padding;
  const auto hold = [&](Array DeltaArrays::* spoilt, int64_t at) {
    DeltaArrays arrays(c);
    if (spoilt && !(arrays.*spoilt).data()) return;
    for (Array* x : arrays.by_token())
      for (int64_t b = 0; b < c.B && x->data(); ++b)
        for (int64_t t = 0; t < c.T; ++t)
          if (c.marks[size_t(b * c.T + t)] == glax::padding) set_token(c, *x, b, t, NOT_A_NUMBER);
    if (spoilt) set_token(c, arrays.*spoilt, 0, at, NOT_A_NUMBER);
    Pool pool(1);
    arrays.run(c, pool);
    for (auto [name, wanted] : delta_reference(c, arrays)) {
      Numbers got = arrays.results().at(name)->numbers();
      const bool sum = name == "d_scale" || name == "d_constant", state = name == "final_state" || name == "d_initial";
      const int64_t row = int64_t(got.size()) / (sum || state ? c.B : c.B * c.T), from = sum ? 0 : first * row;
      const int64_t until = sum ? row : (last + 1) * row;  // the run that is spoilt, or the sum of row 0
      for (int64_t i = from; i < until && spoilt && !state; ++i) got[size_t(i)] = wanted[size_t(i)] = 0;
      group.within(error_of(got, wanted, (sum ? 10 : 2) * bar_of(c.type, name[0] == 'd')),
                   c.name() + ": " + name + (spoilt ? " beside NaN" : ""));
    }
  };
  hold(nullptr, 0);
  for (int64_t at : {first, last})
    for (Array DeltaArrays::* x : {&DeltaArrays::q, &DeltaArrays::k, &DeltaArrays::v, &DeltaArrays::head, &DeltaArrays::key,
                                   &DeltaArrays::beta, &DeltaArrays::erase, &DeltaArrays::write, &DeltaArrays::d_output})
      hold(x, at);
}

void check_threads(Group& group, const DeltaCase& c) {
  const auto bits = [&](int threads) {
    DeltaArrays arrays(c);
    Pool pool(threads);
    arrays.run(c, pool);
    std::string all;
    for (const auto& [name, array] : arrays.results()) all += array->content();
    return all;
  };
  group.expect(bits(1) == bits(3), c.name() + ": with 3 threads results differ");
}

// A step from a pool equals a forward of one token.
void check_step(Group& group, const DeltaCase& c, Type state_type) {
  DeltaArrays arrays(c);
  const int64_t B = c.B, states = B * c.H * c.K * c.V;
  Array state(states, state_type), output(B * c.H * c.V, c.type);
  for (int64_t i = 0; i < states; ++i) state.set(i, arrays.initial[i]), arrays.initial.set(i, state[i]);
  Pool pool(2);
  const Results wanted = delta_reference(c, arrays);
  glax::Step p;
  std::vector<int32_t> slots(static_cast<size_t>(B));
  for (int64_t b = 0; b < B; ++b) slots[size_t(b)] = int32_t(b);
  p.B = B, p.H = c.H, p.K = c.K, p.V = c.V, p.P = B, p.slots = slots.data();
  p.q = arrays.q.tensor(c.q_heads(), c.K), p.k = arrays.k.tensor(c.H, c.K), p.v = arrays.v.tensor(c.H, c.V);
  p.head = arrays.head.tensor(c.H, 1), p.key = arrays.key.tensor(c.H, c.K), p.constant = arrays.constant.floats();
  p.beta = arrays.beta.tensor(c.H, 1), p.erase = arrays.erase.tensor(c.H, c.K), p.write = arrays.write.tensor(c.H, c.V);
  p.scale = arrays.scale.floats(), p.state = state.tensor(c.H, c.K * c.V), p.output = output.tensor(c.H, c.V);
  glax::run_delta_step(pool, p);
  group.within(error_of(output.numbers(), wanted.at("output"), 2 * bar_of(c.type, false)), c.name() + ": output of a step");
  group.within(error_of(state.numbers(), wanted.at("final_state"), 2 * bar_of(state_type, false)), c.name() + ": state of a step");
}

}  // namespace

void test_delta() {
  {
    Group group("delta rule: gates, widths and erasures");
    for (Gates gates : {Gates::none, Gates::constant, Gates::head, Gates::key}) {
      for (Erases erases : {Erases::beta, Erases::erase, Erases::erase_and_write}) {
        DeltaCase c;
        c.gates = gates, c.erases = erases;
        check(group, c);
        c.reverse = true, c.K = 33, c.V = 40, c.H = 1;
        check(group, c);
      }
      for (const auto& [K, V] : {std::pair<int64_t, int64_t>{1, 3}, {3, 1}, {70, 17}, {5, 100}}) {
        DeltaCase c;
        c.gates = gates, c.K = K, c.V = V, c.T = 18;
        check(group, c);
      }
    }
  }
  {
    Group group("delta rule: strong gates, long rows, packing");
    for (Gates gates : {Gates::constant, Gates::head, Gates::key}) {
      for (double gate : {0., 1e-6, 3., 20., 120., INFINITE}) {
        DeltaCase c;
        c.gates = gates, c.gate = gate, c.T = 50;
        check(group, c);
      }
      DeltaCase c;
      c.gates = gates, c.T = 600, c.H = 1, c.gate = 3;
      check(group, c);
      c.gate = 40;  // a block of every token: more groups of blocks than one
      check(group, c);
      c = {};
      c.gates = gates, c.boundaries = {0, 0, 1, 20, 20, 33}, c.query_heads = 1;
      check(group, c);
    }
    DeltaCase c;
    c.gates = Gates::none, c.repeats_keys = true, c.T = 70;
    check(group, c);
    for (Type type : {Type::bf16, Type::f16}) {
      c = {};
      c.type = type, c.erases = Erases::erase_and_write;
      check(group, c);
    }
    c = {};
    c.T = 0;
    check(group, c);
  }
  {
    Group group("delta rule: marks");
    for (Gates gates : {Gates::none, Gates::constant, Gates::head, Gates::key}) {
      for (Erases erases : {Erases::beta, Erases::erase, Erases::erase_and_write}) {
        DeltaCase c;
        c.gates = gates, c.erases = erases, c.K = 9, c.V = 5;
        check_marks(group, c);
        c.reverse = true;
        check_marks(group, c);
      }
    }
  }
  {
    Group group("delta rule: steps");
    for (Gates gates : {Gates::none, Gates::constant, Gates::head, Gates::key}) {
      for (Erases erases : {Erases::beta, Erases::erase_and_write}) {
        for (Type state : {Type::f32, Type::bf16, Type::f16}) {
          DeltaCase c;
          c.gates = gates, c.erases = erases, c.T = 1, c.B = 3, c.K = 19, c.V = 70;
          check_step(group, c, state);
        }
      }
    }
  }
  test_delta_threads();
}

void test_delta_threads() {
  Group group("delta rule: threads");
  for (int64_t H : {1, 3}) {
    DeltaCase c;
    c.H = H, c.V = 100, c.T = 300;
    check_threads(group, c);
    c.boundaries = {0, 100, 100, 300}, c.gates = Gates::key;
    check_threads(group, c);
  }
}
