// The recurrence token by token in double precision, and its gradient against time. It shares no code with the kernels.
#pragma once
#include <algorithm>
#include <functional>
#include <map>

#include "arrays.h"

enum class Gates { none, constant, head, key, value, key_and_value };

inline const char* name_of(Gates gates) {
  static const char* names[] = {"no gates", "constant gates", "head gates", "key gates", "value gates", "key and value gates"};
  return names[int(gates)];
}
constexpr Gates ALL_GATES[] = {Gates::none, Gates::constant, Gates::head, Gates::key, Gates::value, Gates::key_and_value};

inline double mild(Random& random) { return random.log_sigmoid(); }

struct Case {
  Gates gates = Gates::none;
  int64_t K = 16, V = 16, T = 37, B = 1, H = 2, block = 16;
  int64_t query_heads = 0, key_heads = 0, value_heads = 0;  // 0: H
  Type type = Type::f32, gate_type = Type::f32;
  bool reverse = false, initial = true;
  std::vector<int32_t> boundaries, marks;  // [T], of every row
  std::function<double(Random&)> gate = mild;
  bool extreme = false;  // a few gates of -100 or -inf among mild ones, which have a bar of their own

  bool packed() const { return !boundaries.empty(); }
  int64_t N() const { return packed() ? int64_t(boundaries.size()) - 1 : B; }
  bool has(Gates one, Gates other) const { return gates == one || gates == other; }
  // The tokens of sequence n in the order of its scan, clipped to the arrays.
  std::vector<int64_t> tokens(int64_t n) const {
    const int64_t first = packed() ? std::clamp<int64_t>(boundaries[n], 0, T) : 0;
    const int64_t last = packed() ? std::clamp<int64_t>(boundaries[n + 1], 0, T) : T;
    std::vector<int64_t> found;
    for (int64_t t = first; t < last; ++t)
      if (marks.empty() || marks[size_t(t)] != glax::padding) found.push_back(t);
    if (reverse) std::reverse(found.begin(), found.end());
    return found;
  }
  // Whether a token of a scan starts from a state of zeros: it is marked, or padding lies before it.
  bool resets(const std::vector<int64_t>& scan, size_t s) const {
    return !marks.empty() && s > 0 && (marks[size_t(scan[s])] == glax::resets || std::abs(scan[s] - scan[s - 1]) > 1);
  }
  // The gradient of a query, key or value that heads share is a sum over these heads, in float32.
  Type gradient_type(int64_t heads) const { return heads && heads != H ? Type::f32 : type; }
  std::string name() const {
    const auto number = [](const char* of, int64_t x) { return std::string(" ") + of + std::to_string(x); };
    return name_of(gates) + number("B", B) + number("T", T) + number("H", H) + number("K", K) + number("V", V) +
           number("N", N()) + number("block ", block) + (reverse ? " reverse" : "") + (initial ? " initial" : "") +
           (marks.empty() ? "" : " marks") +
           (type == Type::f32 ? "" : type == Type::bf16 ? " bfloat16" : " float16");
  }
};

struct Inputs {
  Array q, k, v, head, key, value, constant, initial, scale, d_output, d_final;
  std::vector<int32_t> boundaries;

  // Scales q, k, v and d_output by these factors, and the states accordingly.
  Inputs scaled(double by_q, double by_k, double by_v, double by_d) && {
    const auto scale_by = [](Array& x, double factor) {
      for (int64_t i = 0; i < x.count(); ++i) x.set(i, x[i] * factor);
    };
    scale_by(q, by_q), scale_by(k, by_k), scale_by(v, by_v), scale_by(d_output, by_d);
    scale_by(initial, by_k * by_v), scale_by(d_final, by_q * by_d);
    return std::move(*this);
  }

  Inputs(const Case& c, uint64_t seed) : boundaries(c.boundaries) {
    Random random{seed};
    boundaries.shrink_to_fit();
    const auto draw = [&](int64_t heads, int64_t width, Type type) {
      Array x(c.B * c.T * heads * width, type);
      x.fill([&] { return random.normal(); });
      return x;
    };
    const auto gates = [&](int64_t count, Type type) {
      Array x(count, type);
      x.fill([&] { return c.gate(random); });
      return x;
    };
    q = draw(c.query_heads ? c.query_heads : c.H, c.K, c.type), k = draw(c.key_heads ? c.key_heads : c.H, c.K, c.type);
    v = draw(c.value_heads ? c.value_heads : c.H, c.V, c.type), d_output = draw(c.H, c.V, c.type);
    if (c.gates == Gates::head) head = gates(c.B * c.T * c.H, c.gate_type);
    if (c.has(Gates::key, Gates::key_and_value)) key = gates(c.B * c.T * c.H * c.K, c.gate_type);
    if (c.has(Gates::value, Gates::key_and_value)) value = gates(c.B * c.T * c.H * c.V, c.gate_type);
    if (c.gates == Gates::constant) constant = gates(c.N() * c.H, Type::f32);
    if (c.initial) initial = Array(c.N() * c.H * c.K * c.V);
    initial.fill([&] { return random.normal(); });
    scale = Array(c.N()), scale.fill([&] { return (0.5 + random.uniform()) / std::sqrt(double(c.K)); });
    d_final = Array(c.N() * c.H * c.K * c.V), d_final.fill([&] { return random.normal(); });
    std::vector<bool> used(size_t(c.T), false);
    for (int64_t n = 0; n < c.N(); ++n)
      for (int64_t t : c.tokens(n)) used[size_t(t)] = true;
    for (Array* x : {&q, &k, &v, &head, &key, &value, &d_output})
      for (int64_t i = 0, row = c.T ? x->count() / (c.B * c.T) : 0; i < x->count(); ++i)
        if (!used[size_t(i / row % c.T)]) x->set(i, NOT_A_NUMBER);  // padding may hold anything
  }
};

// The results by name; NaN where kernels must not write.
using Results = std::map<std::string, Numbers>;

// The sums of x [tokens, H, width] over consecutive heads, [tokens, heads, width].
inline Numbers summed_heads(const Numbers& x, int64_t H, int64_t heads, int64_t width) {
  if (heads == 0 || heads == H) return x;
  const size_t row = size_t(H * width), each = row / size_t(heads);
  Numbers sums(x.size() / size_t(H) * size_t(heads));
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t at = i / row * size_t(heads * width) + i % row / each * size_t(width) + i % size_t(width);
    sums[at] = i % row % each < size_t(width) ? x[i] : sums[at] + x[i];
  }
  return sums;
}

inline Results reference(const Case& c, const Inputs& in) {
  const int64_t H = c.H, K = c.K, V = c.V, N = c.N(), tokens = c.B * c.T;
  Results out;
  const auto unwritten = [&](const char* name, int64_t count) {
    return (out[name] = Numbers(size_t(count), NOT_A_NUMBER)).data();
  };
  double *o = unwritten("output", tokens * H * V), *final_state = unwritten("final_state", N * H * K * V);
  double *dq = unwritten("dq", tokens * H * K), *dk = unwritten("dk", tokens * H * K), *dv = unwritten("dv", tokens * H * V);
  double* d_head = c.has(Gates::head, Gates::constant) ? unwritten("d_head", tokens * H) : nullptr;
  double* d_key = in.key.data() ? unwritten("d_key", tokens * H * K) : nullptr;
  double* d_value = in.value.data() ? unwritten("d_value", tokens * H * V) : nullptr;
  double* d_constant = c.gates == Gates::constant ? unwritten("d_constant", N * H) : nullptr;
  double* d_initial = c.initial ? unwritten("d_initial", N * H * K * V) : nullptr;
  double* d_scale = unwritten("d_scale", N * H);
  // Element 0 of the row of x's head that head h of H reads at token t.
  const auto row = [&](const Array& x, int64_t width, int64_t b, int64_t t, int64_t h) {
    const int64_t heads = x.count() / (tokens * width);
    return ((b * c.T + t) * heads + h / (H / heads)) * width;
  };
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t h = 0; h < H; ++h) {
      const int64_t b = c.packed() ? 0 : n, head = n * H + h;
      const double scale = in.scale[n];
      const std::vector<int64_t> scan = c.tokens(n);
      std::vector<Numbers> states(1, Numbers(size_t(K * V))), decays;  // before each token; of each element at each token
      for (int64_t i = 0; i < K * V && c.initial; ++i) states[0][size_t(i)] = in.initial[head * K * V + i];
      for (size_t s = 0; s < scan.size(); ++s) {
        const int64_t t = scan[s];
        const bool resets = c.resets(scan, s);
        const int64_t q = row(in.q, K, b, t, h), k = row(in.k, K, b, t, h), v = row(in.v, V, b, t, h);
        const int64_t full = (b * c.T + t) * H + h;  // row of an array that has all heads
        const double of_head = in.head.data() ? in.head[full] : in.constant.data() ? in.constant[head] : 0;
        Numbers state(size_t(K * V)), decay(size_t(K * V)), of_value(size_t(V), 1);
        for (int64_t y = 0; y < V && d_value; ++y) of_value[size_t(y)] = std::exp(in.value[full * V + y]);
        for (int64_t y = 0; y < V; ++y) o[full * V + y] = 0;
        for (int64_t x = 0; x < K; ++x) {
          const double of_key = std::exp(of_head + (d_key ? in.key[full * K + x] : 0));
          const double kx = in.k[k + x], qx = in.q[q + x] * scale;
          for (int64_t y = 0; y < V; ++y) {
            const size_t i = size_t(x * V + y);
            decay[i] = of_key * of_value[size_t(y)];
            state[i] = (resets ? 0 : decay[i] * states.back()[i]) + kx * in.v[v + y];
            o[full * V + y] += qx * state[i];
          }
        }
        states.push_back(std::move(state)), decays.push_back(std::move(decay));
      }
      Numbers dS(size_t(K * V));
      for (int64_t i = 0; i < K * V; ++i) {
        final_state[head * K * V + i] = states.back()[size_t(i)], dS[size_t(i)] = in.d_final[head * K * V + i];
      }
      d_scale[head] = 0;
      if (d_constant) d_constant[head] = 0;
      for (size_t s = scan.size(); s-- > 0;) {
        const int64_t t = scan[s], full = (b * c.T + t) * H + h;
        const bool resets = c.resets(scan, s);
        const int64_t q = row(in.q, K, b, t, h), k = row(in.k, K, b, t, h), v = row(in.v, V, b, t, h);
        double of_head = 0;
        for (int64_t y = 0; y < V; ++y) dv[full * V + y] = 0;
        for (int64_t y = 0; y < V && d_value; ++y) d_value[full * V + y] = 0;
        for (int64_t x = 0; x < K; ++x) {
          double of_q = 0, of_k = 0, of_key = 0;
          const double qx = in.q[q + x], kx = in.k[k + x];
          for (int64_t y = 0; y < V; ++y) {
            const size_t i = size_t(x * V + y);
            const double d = in.d_output[full * V + y];
            of_q += states[s + 1][i] * d;
            dS[i] += scale * qx * d;
            of_k += dS[i] * in.v[v + y];
            dv[full * V + y] += dS[i] * kx;
            dS[i] = resets ? 0 : dS[i] * decays[s][i];
            const double of_gate = resets ? 0 : dS[i] * states[s][i];
            of_key += of_gate;
            if (d_value) d_value[full * V + y] += of_gate;
          }
          dq[full * K + x] = scale * of_q, dk[full * K + x] = of_k, d_scale[head] += qx * of_q, of_head += of_key;
          if (d_key) d_key[full * K + x] = of_key;
        }
        if (d_head) d_head[full] = of_head;
        if (d_constant) d_constant[head] += of_head;
      }
      for (int64_t i = 0; i < K * V && d_initial; ++i) d_initial[head * K * V + i] = dS[size_t(i)];
    }
  }
  out["dq"] = summed_heads(out["dq"], H, c.query_heads, K), out["dk"] = summed_heads(out["dk"], H, c.key_heads, K);
  out["dv"] = summed_heads(out["dv"], H, c.value_heads, V);
  return out;
}
