// One token of each of B sequences, their states in a pool.
#include "checks.h"

namespace {

struct StepCase {
  Gates gates = Gates::none;
  int64_t H = 2, K = 16, V = 16, P = 5;
  int64_t query_heads = 0, key_heads = 0, value_heads = 0;  // 0: H
  Type type = Type::f32, state_type = Type::f32;
  std::vector<int32_t> slots{3, -1, 0, 5, 4, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  bool in_order = false;  // no slots: sequence b has state b
  double gate = 1;        // times log-sigmoid

  std::string name() const {
    return std::string(name_of(gates)) + " H" + std::to_string(H) + " K" + std::to_string(K) + " V" + std::to_string(V) +
           " state type " + std::to_string(int(state_type)) + (in_order ? " in order" : "");
  }
};

void check(Group& group, const StepCase& c) {
  Random random{3};
  const int64_t B = c.in_order ? c.P : int64_t(c.slots.size()), H = c.H, K = c.K, V = c.V;
  const auto draw = [&](int64_t count, Type type) {
    Array x(count, type);
    x.fill([&] { return random.normal(); });
    return x;
  };
  const auto gates = [&](int64_t count) {
    Array x(count, c.type);
    x.fill([&] { return c.gate * random.log_sigmoid(); });
    return x;
  };
  const int64_t q_heads = c.query_heads ? c.query_heads : H, k_heads = c.key_heads ? c.key_heads : H;
  const int64_t v_heads = c.value_heads ? c.value_heads : H;
  const Array q = draw(B * q_heads * K, c.type), k = draw(B * k_heads * K, c.type), v = draw(B * v_heads * V, c.type);
  Array head, key, value, constant, scale(B), state = draw(c.P * H * K * V, c.state_type), output(B * H * V, c.type);
  if (c.gates == Gates::head) head = gates(B * H);
  if (c.gates == Gates::constant) constant = Array(B * H), constant.fill([&] { return c.gate * random.log_sigmoid(); });
  if (c.gates == Gates::key || c.gates == Gates::key_and_value) key = gates(B * H * K);
  if (c.gates == Gates::value || c.gates == Gates::key_and_value) value = gates(B * H * V);
  scale.fill([&] { return random.uniform(); });

  const Numbers before = state.numbers();
  Numbers wanted_state = before, wanted_output(size_t(B * H * V));
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = c.in_order ? b : c.slots[size_t(b)];
    for (int64_t h = 0; h < H && slot >= 0 && slot < c.P; ++h) {
      const int64_t full = b * H + h;
      const auto row = [&](int64_t heads, int64_t width) { return (b * heads + h / (H / heads)) * width; };
      for (int64_t x = 0; x < K; ++x) {
        for (int64_t y = 0; y < V; ++y) {
          double gate = head.data() ? head[full] : constant.data() ? constant[full] : 0;
          gate += (key.data() ? key[full * K + x] : 0) + (value.data() ? value[full * V + y] : 0);
          double& s = wanted_state[size_t(((slot * H + h) * K + x) * V + y)];
          s = std::exp(gate) * s + k[row(k_heads, K) + x] * v[row(v_heads, V) + y];
          wanted_output[size_t(full * V + y)] += scale[b] * q[row(q_heads, K) + x] * s;
        }
      }
    }
  }

  glax::Step p;
  p.B = B, p.H = H, p.K = K, p.V = V, p.P = c.P;
  const std::vector<int32_t> slots(c.slots);
  if (!c.in_order) p.slots = slots.data();
  p.q = q.tensor(q_heads, K), p.k = k.tensor(k_heads, K), p.v = v.tensor(v_heads, V);
  p.head = head.tensor(H, 1), p.key = key.tensor(H, K), p.value = value.tensor(H, V);
  p.constant = constant.floats(), p.scale = scale.floats();
  p.state = state.tensor(H, K * V), p.output = output.tensor(H, V);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h) glax::kernels().step(p, b, h);

  group.within(error_of(output.numbers(), wanted_output, bar_of(c.type, false)), c.name() + ": output");
  group.within(error_of(state.numbers(), wanted_state, bar_of(c.state_type, false)), c.name() + ": state");
  bool zero = true, untouched = true;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = c.in_order ? b : c.slots[size_t(b)];
    for (int64_t i = 0; i < H * V && (slot < 0 || slot >= c.P); ++i) zero &= output[b * H * V + i] == 0;
  }
  for (int64_t i = 0, size = H * K * V; i < state.count(); ++i) {
    const bool used = c.in_order || std::count(c.slots.begin(), c.slots.end(), i / size);
    untouched &= used || state[i] == before[size_t(i)];
  }
  group.expect(zero, c.name() + ": the output of a sequence that is not there is not 0");
  group.expect(untouched, c.name() + ": a state of no sequence was changed");
}

// Several tokens of each sequence: the outputs, with the states written or not, against a loop.
void check_tokens(Group& group, const StepCase& c, int64_t T, bool writes) {
  Random random{5};
  const int64_t B = c.slots.size(), H = c.H, K = c.K, V = c.V, rows = B * T;
  const auto draw = [&](int64_t count, Type type, bool is_gate = false) {
    Array x(count, type);
    x.fill([&] { return is_gate ? c.gate * random.log_sigmoid() : random.normal(); });
    return x;
  };
  Array q = draw(rows * H * K, c.type), k = draw(rows * H * K, c.type), v = draw(rows * H * V, c.type);
  Array head, key, value, constant, scale(B), state = draw(c.P * H * K * V, c.state_type), output(rows * H * V, c.type);
  if (c.gates == Gates::head) head = draw(rows * H, c.type, true);
  if (c.gates == Gates::constant) constant = draw(B * H, Type::f32, true);
  if (c.gates == Gates::key || c.gates == Gates::key_and_value) key = draw(rows * H * K, c.type, true);
  if (c.gates == Gates::value || c.gates == Gates::key_and_value) value = draw(rows * H * V, c.type, true);
  scale.fill([&] { return random.uniform(); });
  for (int64_t i = 0; i < rows * H * K; ++i)
    if (i / (H * K) % T % 3 == 1) q.set(i, 0);  // a token without a query

  const Numbers before = state.numbers();
  Numbers wanted = before, wanted_output(size_t(rows * H * V));
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = c.slots[size_t(b)];
    for (int64_t i = 0; i < T * H * K * V && slot >= 0 && slot < c.P; ++i) {
      const int64_t y = i % V, x = i / V % K, h = i / (V * K) % H, t = i / (V * K * H), full = (b * T + t) * H + h;
      double gate = head.data() ? head[full] : constant.data() ? constant[b * H + h] : 0;
      gate += (key.data() ? key[full * K + x] : 0) + (value.data() ? value[full * V + y] : 0);
      double& s = wanted[size_t(((slot * H + h) * K + x) * V + y)];
      s = std::exp(gate) * s + k[full * K + x] * v[full * V + y];
      wanted_output[size_t(full * V + y)] += scale[b] * q[full * K + x] * s;
    }
  }
  glax::Step p;
  p.B = B, p.T = T, p.H = H, p.K = K, p.V = V, p.P = c.P, p.slots = c.slots.data(), p.writes = writes;
  p.q = q.tensor(H, K), p.k = k.tensor(H, K), p.v = v.tensor(H, V);
  p.head = head.tensor(H, 1), p.key = key.tensor(H, K), p.value = value.tensor(H, V);
  p.constant = constant.floats(), p.scale = scale.floats();
  p.state = state.tensor(H, K * V), p.output = output.tensor(H, V);
  Pool pool(2);
  glax::run_tokens(pool, p);
  const std::string name = c.name() + " T" + std::to_string(T);
  group.within(error_of(output.numbers(), wanted_output, bar_of(c.type, false)), name + ": output");
  group.within(error_of(state.numbers(), writes ? wanted : before, bar_of(c.state_type, false)), name + ": state");
}

void test_tokens() {
  Group group("tokens of a pool");
  const int64_t widths[][2] = {{1, 3}, {16, 17}, {40, 100}, {128, 128}, {20, 300}};
  for (const auto& [K, V] : widths) {
    for (Gates gates : ALL_GATES) {
      StepCase c;
      c.gates = gates, c.K = K, c.V = V;
      for (int64_t T : {1, 2, 9}) check_tokens(group, c, T, T != 2);
    }
  }
  for (Type type : {Type::bf16, Type::f16}) {
    StepCase c;
    c.gates = Gates::key_and_value, c.type = type, c.K = 33, c.V = 70;
    check_tokens(group, c, 5, true);
    c.type = Type::f32, c.state_type = type;
    check_tokens(group, c, 5, true);
  }
  for (Gates gates : ALL_GATES) {
    for (double gate : {0., 1e-6, 20., 120., INFINITE}) {
      StepCase c;
      c.gates = gates, c.gate = gate;
      check_tokens(group, c, 64, true);
    }
  }
}

}  // namespace

void test_steps() {
  test_tokens();
  Group group("steps");
  const int64_t widths[][2] = {{1, 3}, {3, 1}, {16, 17}, {17, 16}, {40, 100}, {100, 40}, {128, 128}, {300, 20}, {20, 300}};
  for (const auto& [K, V] : widths) {
    for (Gates gates : ALL_GATES) {
      StepCase c;
      c.gates = gates, c.K = K, c.V = V, c.in_order = K == 17;
      check(group, c);
    }
  }
  for (Type type : {Type::bf16, Type::f16}) {
    for (Type state_type : {Type::f32, type}) {
      for (Gates gates : ALL_GATES) {
        StepCase c;
        c.gates = gates, c.type = type, c.state_type = state_type, c.K = 33, c.V = 37;
        check(group, c);
        c.type = Type::f32, c.V = 64;
        check(group, c);
      }
    }
  }
  const int64_t heads[][3] = {{1, 4, 4}, {4, 2, 1}, {2, 1, 4}};
  for (const auto& [q, k, v] : heads) {
    StepCase c;
    c.gates = Gates::key, c.H = 4, c.query_heads = q, c.key_heads = k, c.value_heads = v, c.K = 5, c.V = 18;
    check(group, c);
  }
  for (Gates gates : ALL_GATES) {
    for (double gate : {0., 1e-6, 20., 120., INFINITE}) {
      StepCase c;
      c.gates = gates, c.gate = gate;
      check(group, c);
    }
  }
}
