// One token of each sequence from a stored state and its replay ring, against a loop over tokens in double precision.
#include "../../glax/_src/kernels/cpu/native/replay_tasks.h"
#include "checks.h"

namespace {

enum class Erases { nothing, beta, erase, erase_and_write };

struct ReplayCase {
  Gates gates = Gates::key;
  Erases erases = Erases::nothing;
  bool along = false, before_decay = false;
  int64_t H = 2, K = 16, V = 16, P = 5, places = 4, replay = 5;
  int64_t query_heads = 0, key_heads = 0, value_heads = 0;  // 0: H
  Type type = Type::f32, state_type = Type::f32, ring_type = Type::f32;
  std::vector<int32_t> slots{3, -1, 0, 5, 4, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  std::vector<int32_t> lengths{4, 0, 2, 1, 0};
  double gate = 1;  // times log-sigmoid
  int threads = 1;

  bool has(Gates one, Gates other) const { return gates == one || gates == other; }
  std::string name() const {
    const auto number = [](const char* of, int64_t x) { return std::string(" ") + of + std::to_string(x); };
    return name_of(gates) + number("erases ", int(erases)) + (along ? " along" : "") + (before_decay ? " before decay" : "") +
           number("H", H) + number("K", K) + number("V", V) + number("places ", places) + number("replay ", replay) +
           number("types ", int(type)) + number("", int(state_type)) + number("", int(ring_type)) + " gate " + std::to_string(gate);
  }
};

// The arrays of a call. A token's number stands behind those of the rings' places.
struct ReplayArrays {
  Array q, k, v, head, key, value, constant, scale, beta, erase, write, along, state, output;
  Array ring_key, ring_value, ring_head, ring_row, ring_column, ring_along, ring_erased;
  std::vector<int32_t> slots, length, drafted;

  explicit ReplayArrays(const ReplayCase& c) : slots(c.slots), length(c.lengths), drafted(size_t(c.P), 3) {
    Random random{11};
    const int64_t B = int64_t(c.slots.size()), H = c.H, K = c.K, V = c.V, tokens = c.P * c.places;
    const auto normal = [&](int64_t count, Type type) {
      Array x(count, type);
      x.fill([&] { return random.normal(); });
      return x;
    };
    const auto gates = [&](int64_t count, Type type = Type::f32) {
      Array x(count, type);
      x.fill([&] { return c.gate * random.log_sigmoid(); });
      return x;
    };
    const int64_t hk = heads(c, c.key_heads), hv = heads(c, c.value_heads), ring_hv = c.erases == Erases::nothing ? hv : H;
    q = normal(B * heads(c, c.query_heads) * K, c.type), k = normal(B * hk * K, c.type), v = normal(B * hv * V, c.type);
    ring_key = normal(tokens * hk * K, c.ring_type);
    ring_value = normal(tokens * ring_hv * V, c.erases == Erases::nothing ? c.ring_type : Type::f32);
    if (c.gates == Gates::head) head = gates(B * H, c.type);
    if (c.gates == Gates::constant) constant = gates(B * H);
    if (c.gates == Gates::head || c.gates == Gates::constant) ring_head = gates(tokens * H);
    if (c.has(Gates::key, Gates::key_and_value)) key = gates(B * H * K, c.type), ring_row = gates(tokens * H * K);
    if (c.has(Gates::value, Gates::key_and_value)) value = gates(B * H * V, c.type), ring_column = gates(tokens * H * V);
    const auto share = [&] { return random.uniform() / double(K); };
    if (c.erases == Erases::beta) beta = Array(B * H, c.type), beta.fill(share);
    if (c.erases == Erases::erase || c.erases == Erases::erase_and_write) erase = Array(B * H * K, c.type), erase.fill(share);
    if (c.erases == Erases::erase_and_write) write = Array(B * H * V, c.type), write.fill([&] { return random.uniform(); });
    if (c.along) along = normal(B * H * K, c.type), ring_along = normal(tokens * H * K, Type::f32), ring_erased = normal(tokens * H * V, Type::f32);
    scale = Array(B), scale.fill([&] { return 0.5 + random.uniform(); });
    state = normal(c.P * H * K * V, c.state_type), output = Array(B * H * V, c.type);
  }

  static int64_t heads(const ReplayCase& c, int64_t heads) { return heads ? heads : c.H; }

  void run(const ReplayCase& c, Pool& pool) {
    const int64_t H = c.H, K = c.K, V = c.V, ring_hv = c.erases == Erases::nothing ? heads(c, c.value_heads) : H;
    glax::Replay p;
    p.B = int64_t(slots.size()), p.H = H, p.K = K, p.V = V, p.P = c.P, p.slots = slots.data();
    p.q = q.tensor(heads(c, c.query_heads), K), p.k = k.tensor(heads(c, c.key_heads), K), p.v = v.tensor(heads(c, c.value_heads), V);
    p.head = head.tensor(H, 1), p.key = key.tensor(H, K), p.value = value.tensor(H, V), p.constant = constant.floats();
    p.beta = beta.tensor(H, 1), p.erase = erase.tensor(H, K), p.write = write.tensor(H, V), p.along = along.tensor(H, K);
    p.scale = scale.floats(), p.state = state.tensor(H, K * V), p.output = output.tensor(H, V);
    p.before_decay = c.before_decay, p.places = c.places, p.replay = c.replay, p.length = length.data(), p.drafted = drafted.data();
    p.ring_key = ring_key.tensor(heads(c, c.key_heads), K), p.ring_value = ring_value.tensor(ring_hv, V);
    p.ring_head = ring_head.tensor(H, 1), p.ring_row = ring_row.tensor(H, K), p.ring_column = ring_column.tensor(H, V);
    p.ring_along = ring_along.tensor(H, K), p.ring_erased = ring_erased.tensor(H, V);
    glax::run_replay(pool, p);
  }
};

// S decayed by a log for each row and column, and the terms k u^T and, with `along`, b y^T added.
struct Loop {
  int64_t K, V;
  Numbers S;

  template <class Log>
  void decay(const Log& log) {
    for (int64_t i = 0; i < K * V; ++i) S[size_t(i)] *= std::exp(log(i / V, i % V));
  }
  template <class Key, class Value>
  void add(const Key& key, const Value& value) {
    for (int64_t i = 0; i < K * V; ++i) S[size_t(i)] += key(i / V) * value(i % V);
  }
  template <class Key>
  Numbers read(const Key& key) const {
    Numbers found(static_cast<size_t>(V));
    for (int64_t i = 0; i < K * V; ++i) found[size_t(i % V)] += key(i / V) * S[size_t(i)];
    return found;
  }
};

// The state of head h of a slot after its ring.
Loop behind_ring(const ReplayCase& c, const ReplayArrays& in, int64_t slot, int64_t h) {
  const int64_t K = c.K, V = c.V, H = c.H, hk = ReplayArrays::heads(c, c.key_heads);
  const int64_t hv = c.erases == Erases::nothing ? ReplayArrays::heads(c, c.value_heads) : H;
  Loop loop{K, V, Numbers(size_t(K * V))};
  for (int64_t i = 0; i < K * V; ++i) loop.S[size_t(i)] = in.state[(slot * H + h) * K * V + i];
  for (int64_t t = 0; t < c.lengths[size_t(slot)]; ++t) {
    const int64_t at = slot * c.places + t, own = at * H + h;
    loop.decay([&](int64_t x, int64_t y) {
      return (in.ring_head.data() ? in.ring_head[own] : 0) + (in.ring_row.data() ? in.ring_row[own * K + x] : 0) +
             (in.ring_column.data() ? in.ring_column[own * V + y] : 0);
    });
    loop.add([&](int64_t x) { return in.ring_key[(at * hk + h * hk / H) * K + x]; },
             [&](int64_t y) { return in.ring_value[(at * hv + h * hv / H) * V + y]; });
    if (c.along) loop.add([&](int64_t x) { return in.ring_along[own * K + x]; }, [&](int64_t y) { return in.ring_erased[own * V + y]; });
  }
  return loop;
}

// Returns the output of one head, and advances its state.
Numbers token(const ReplayCase& c, const ReplayArrays& in, int64_t b, int64_t h, Loop& loop) {
  const int64_t K = c.K, V = c.V, H = c.H, own = b * H + h;
  const auto shared = [&](const Array& x, int64_t heads, int64_t width, int64_t i) { return x[(b * heads + h * heads / H) * width + i]; };
  const int64_t hq = ReplayArrays::heads(c, c.query_heads), hk = ReplayArrays::heads(c, c.key_heads), hv = ReplayArrays::heads(c, c.value_heads);
  const auto key = [&](int64_t x) { return shared(in.k, hk, K, x); };
  const auto erase = [&](int64_t x) { return in.beta.data() ? in.beta[own] * key(x) : in.erase.data() ? in.erase[own * K + x] : 0; };
  Numbers erased = loop.read(erase);
  loop.decay([&](int64_t x, int64_t y) {
    return (in.head.data() ? in.head[own] : 0) + (in.constant.data() ? in.constant[own] : 0) +
           (in.key.data() ? in.key[own * K + x] : 0) + (in.value.data() ? in.value[own * V + y] : 0);
  });
  if (!c.before_decay) erased = loop.read(erase);
  const auto value = [&](int64_t y) {
    const double w = in.beta.data() ? in.beta[own] : in.write.data() ? in.write[own * V + y] : 1;
    return w * shared(in.v, hv, V, y) - (c.along ? 0 : erased[size_t(y)]);
  };
  loop.add(key, value);
  if (c.along) loop.add([&](int64_t x) { return in.along[own * K + x]; }, [&](int64_t y) { return -erased[size_t(y)]; });
  return loop.read([&](int64_t x) { return in.scale[b] * shared(in.q, hq, K, x); });
}

// The output; the states behind their rings; the states that are not due, which keep their bits; and the lengths.
void check(Group& group, const ReplayCase& c) {
  ReplayArrays arrays(c);
  const int64_t H = c.H, K = c.K, V = c.V, B = int64_t(c.slots.size());
  Numbers wanted_output(size_t(B * H * V)), wanted_states, wanted_stored = arrays.state.numbers();
  std::vector<int32_t> lengths = c.lengths, drafted(size_t(c.P), 3);
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = c.slots[size_t(b)];
    if (slot < 0 || slot >= c.P) continue;
    const bool is_full = c.lengths[size_t(slot)] + 1 >= c.replay;
    lengths[size_t(slot)] = is_full ? 0 : c.lengths[size_t(slot)] + 1, drafted[size_t(slot)] = 0;
    for (int64_t h = 0; h < H; ++h) {
      Loop loop = behind_ring(c, arrays, slot, h);
      const Numbers output = token(c, arrays, b, h, loop);
      std::copy(output.begin(), output.end(), wanted_output.begin() + (b * H + h) * V);
      wanted_states.insert(wanted_states.end(), loop.S.begin(), loop.S.end());
      if (is_full) std::copy(loop.S.begin(), loop.S.end(), wanted_stored.begin() + (slot * H + h) * K * V);
    }
  }
  Pool pool(c.threads);
  arrays.run(c, pool);
  ReplayCase after = c;
  after.lengths = arrays.length;
  Numbers states;
  for (int32_t slot : c.slots) {
    for (int64_t h = 0; h < H && slot >= 0 && slot < c.P; ++h) {
      const Loop loop = behind_ring(after, arrays, slot, h);
      states.insert(states.end(), loop.S.begin(), loop.S.end());
    }
  }
  const double rounding = std::max(bar_of(c.state_type, false), bar_of(c.ring_type, false));
  group.within(error_of(arrays.output.numbers(), wanted_output, 2 * bar_of(c.type, false)), c.name() + ": output");
  group.within(error_of(states, wanted_states, 2 * std::max(rounding, bar_of(c.type, false))), c.name() + ": states behind rings");
  group.within(error_of(arrays.state.numbers(), wanted_stored, 2 * rounding), c.name() + ": stored states");
  group.expect(arrays.length == lengths && arrays.drafted == drafted, c.name() + ": lengths or drafts");
}

// The bits of all that a call writes.
std::string content_of(const ReplayCase& c) {
  ReplayArrays x(c);
  Pool pool(c.threads);
  x.run(c, pool);
  std::string all;
  for (const Array* each : {&x.output, &x.state, &x.ring_key, &x.ring_value, &x.ring_row}) all += each->content();
  return all + std::string(x.length.begin(), x.length.end());
}

// States of 8 bits: a stored state has the error of its rests, and an output has none beside the rounded numbers that it reads.
void check_8_bits(Group& group, Type type, int64_t K, int64_t V) {
  const int64_t H = 2, P = 2, places = 3, scales = K % 32 ? 1 : K / 32, numbers = P * H * K * V;
  const double factor = type == Type::i8 ? 254 : 28, largest = type == Type::i8 ? 127 : 448;
  Random random{13};
  std::vector<char> values(static_cast<size_t>(numbers), 0), rests = values;
  Array scale(P * H * scales), q(P * H * K), k(P * H * K), v(P * H * V), one(P), output(P * H * V), ring_key(P * places * H * K),
      ring_value(P * places * H * V);
  scale.fill([] { return 1; }), one.fill([] { return 1; });
  for (Array* x : {&q, &k, &v, &ring_key, &ring_value}) x->fill([&] { return random.normal(); });
  std::vector<int32_t> length(P, places), drafted(P, 0);
  glax::Replay p;
  p.B = P, p.H = H, p.K = K, p.V = V, p.P = P, p.before_decay = false, p.places = places, p.replay = places + 1;
  p.q = q.tensor(H, K), p.k = k.tensor(H, K), p.v = v.tensor(H, V), p.scale = one.floats(), p.output = output.tensor(H, V);
  p.state.data = values.data(), p.state.type = type, p.state.heads = H, p.state.width = K * V;
  p.rests = rests.data(), p.scale_of_rows = scale.floats(), p.scales = scales;
  p.ring_key = ring_key.tensor(H, K), p.ring_value = ring_value.tensor(H, V), p.length = length.data(), p.drafted = drafted.data();
  Pool pool(1);
  glax::run_replay(pool, p);  // writes the states, from zeros
  const auto decoded = [&](char x) {
    if (type == Type::i8) return double(int8_t(x));
    const int bits = uint8_t(x), exponent = (bits >> 3) & 15, rest = bits & 7;
    return std::ldexp(rest + (exponent ? 8 : 0), (exponent ? exponent : 1) - 10) * (bits & 128 ? -1 : 1);
  };
  Numbers wanted(static_cast<size_t>(numbers)), got = wanted, read(size_t(P * H * V));
  for (int64_t i = 0; i < numbers; ++i) {
    const int64_t y = i % V, x = i / V % K, h = i / (V * K) % H, n = i / (V * K * H), own = n * H + h;
    for (int64_t t = 0; t < places; ++t)
      wanted[size_t(i)] += ring_key[((n * places + t) * H + h) * K + x] * ring_value[((n * places + t) * H + h) * V + y];
    wanted[size_t(i)] += k[own * K + x] * v[own * V + y];
    const double of_rows = scale[own * scales + x * scales / K];
    got[size_t(i)] = of_rows * (decoded(values[size_t(i)]) + decoded(rests[size_t(i)]) / factor);
    read[size_t(own * V + y)] += q[own * K + x] * (of_rows * decoded(values[size_t(i)]) + k[own * K + x] * v[own * V + y]);
  }
  const std::string name = (type == Type::i8 ? "int8 K" : "float8 K") + std::to_string(K) + " V" + std::to_string(V);
  group.within(error_of(got, wanted, type == Type::i8 ? 5e-5 : 2e-3), name + ": written");
  for (int64_t i = 0, own; i < numbers; ++i) {
    own = i / (V * K);
    const double of_rows = scale[own * scales + i / V % K * scales / K];
    group.expect(std::abs(wanted[size_t(i)]) <= of_rows * largest * (1 + 1e-5), name + ": a scale is too small");
  }
  length.assign(size_t(P), 0);
  glax::run_replay(pool, p);  // reads them, without their rests
  group.within(error_of(output.numbers(), read, 1e-5), name + ": read");
  // A number that is not finite spoils those of its scale alone.
  length.assign(size_t(P), places);
  k.set(0, INFINITE);
  glax::run_replay(pool, p);
  bool right = std::isnan(scale[0]);
  for (int64_t i = 1; i < scale.count(); ++i) right &= std::isfinite(scale[i]);
  group.expect(right, name + ": scales beside a number that is not finite");
}

}  // namespace

void test_replay() {
  {
    Group group("replay: gates, erasures and widths");
    const int64_t widths[][2] = {{1, 3}, {16, 17}, {40, 100}, {128, 128}, {9, 300}};
    for (Gates gates : ALL_GATES) {
      for (Erases erases : {Erases::nothing, Erases::beta, Erases::erase, Erases::erase_and_write}) {
        for (bool before_decay : {false, true}) {
          for (bool along : {false, true}) {
            const bool given = erases == Erases::erase || erases == Erases::erase_and_write;
            if ((before_decay || along) && !given) continue;
            ReplayCase c;
            c.gates = gates, c.erases = erases, c.before_decay = before_decay, c.along = along, c.K = 21, c.V = 35;
            check(group, c);
          }
        }
      }
      for (const auto& [K, V] : widths) {
        ReplayCase c;
        c.gates = gates, c.K = K, c.V = V, c.erases = V == 100 ? Erases::beta : Erases::nothing;
        check(group, c);
      }
    }
  }
  {
    Group group("replay: rings, heads, types and strong gates");
    for (int64_t places : {1, 7, 40}) {
      for (int64_t replay : {int64_t(1), places, places + 1}) {
        ReplayCase c;
        c.places = places, c.replay = replay, c.erases = Erases::beta;
        c.lengths.assign(size_t(c.P), int32_t(std::min(places, replay - 1)));
        check(group, c);
        c.lengths[3] = 0;
        check(group, c);
      }
    }
    const int64_t heads[][3] = {{1, 4, 4}, {4, 2, 1}, {2, 1, 4}};
    for (const auto& [q, k, v] : heads) {
      for (Erases erases : {Erases::nothing, Erases::erase_and_write}) {
        ReplayCase c;
        c.erases = erases, c.H = 4, c.query_heads = q, c.key_heads = k, c.value_heads = v, c.K = 5, c.V = 18;
        check(group, c);
      }
    }
    for (Type type : {Type::bf16, Type::f16}) {
      for (int part = 0; part < 3; ++part) {
        ReplayCase c;
        c.gates = Gates::key_and_value, c.K = 33, c.V = 70;
        (part == 0 ? c.state_type : c.ring_type) = type;
        if (part == 2) c.type = c.state_type = type;
        check(group, c);
        c.erases = Erases::beta;
        check(group, c);
      }
    }
    for (Gates gates : ALL_GATES) {
      for (double gate : {0., 1e-6, 20., 120., INFINITE}) {
        ReplayCase c;
        c.gates = gates, c.gate = gate;
        check(group, c);
        c.erases = Erases::erase, c.before_decay = true;
        check(group, c);
      }
    }
  }
  {
    Group group("replay: 8 bits");
    const int64_t widths[][2] = {{64, 40}, {32, 16}, {7, 3}, {1, 1}};
    for (Type type : {Type::i8, Type::f8})
      for (const auto& [K, V] : widths) check_8_bits(group, type, K, V);
  }
  test_replay_threads();
}

void test_replay_threads() {
  Group group("replay: threads");
  for (int64_t H : {1, 6}) {
    ReplayCase c;
    c.H = H, c.K = 128, c.V = 300, c.erases = Erases::beta;
    const std::string wanted = content_of(c);
    c.threads = 3;
    group.expect(content_of(c) == wanted, c.name() + ": with 3 threads results differ");
  }
}
