// The kernels: which walks they take, over what. Included once by each instruction set's file.

// Row t of a [B, T, heads, width] array for a piece and head h of H, from column `first`.
inline Rows rows_of(const Problem& p, const Tensor& x, const Piece& n, int64_t h, int64_t first, int64_t width, float factor = 1) {
  const int64_t stride = x.heads * x.width * x.bytes(), head = h * x.heads / p.H;
  char* data = x.data ? x.data + n.example * p.T * stride + (head * x.width + first) * x.bytes() : nullptr;
  return {data, stride, x.type, width, factor};
}

inline Order order_of(const Problem& p, const Piece& n) {
  return p.reverse ? Order{n.first + n.length - 1, n.length, -1, false} : Order{n.first, n.length, 1, false};
}

// The gate of the state's K side (a channel's, a head's or a constant one) or of its V side, from channel `first`.
inline Side side_of(const Problem& p, bool key_side, const Piece& n, int64_t h, int64_t first, int64_t width) {
  Side side;
  side.width = width;
  const Tensor& channels = key_side ? p.key : p.value;
  if (channels.data) {
    side.kind = Side::channel, side.gate = rows_of(p, channels, n, h, first, width);
  } else if (key_side && p.head.data) {
    side.kind = Side::scalar, side.gate = rows_of(p, p.head, n, h, 0, 1);
  } else if (key_side && p.constant) {
    side.kind = Side::scalar;
    side.gate = {const_cast<char*>(reinterpret_cast<const char*>(p.constant + n.sequence * p.H + h)), 0, Type::f32, 1};
  }
  return side;
}

inline Walk walk_of(const Problem& p, const Piece& n, int64_t h, bool columns_are_keys, int64_t first, int64_t last) {
  Walk walk;
  walk.rows = side_of(p, !columns_are_keys, n, h, 0, columns_are_keys ? p.V : p.K);
  walk.columns = side_of(p, columns_are_keys, n, h, first, last - first);
  return walk;
}

constexpr int64_t stretch = 512;  // tokens over which a gate's gradient telescopes

inline int64_t scratch_bytes(const Problem& p) {
  const auto need = [&](bool columns_are_keys) {
    Scratch scratch{nullptr};
    const int64_t columns = columns_are_keys ? p.K : p.V;
    Walk walk = walk_of(p, {}, 0, columns_are_keys, 0, columns);
    walk.take(scratch, p.block);
    if (walk.columns.kind != Side::none) scratch.floats((p.T + stretch - 1) / stretch * walk.state_size());
    scratch.floats(2 * (columns + group)), scratch.floats((LANES + 2) * (columns / group + 1));  // the gradients' sums
    scratch.floats(walk.rows.across()), scratch.floats(walk.columns.across());                   // the edges' decays
    return scratch.used + 256;
  };
  return need(true) > need(false) ? need(true) : need(false);
}

//     a = k, b = scale q, x = v, y = o
inline void forward(const Problem& p, const Piece& n, int64_t h, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first, state = h * p.K * p.V + first;
  Walk walk = walk_of(p, n, h, false, first, last);
  walk.take(scratch, p.block);
  walk.begin(n.initial ? n.initial + state : nullptr, p.V, 1);
  const Rows output = rows_of(p, p.output, n, h, first, width);
  const Walk::Operands operands{rows_of(p, p.k, n, h, 0, p.K), rows_of(p, p.q, n, h, 0, p.K, p.scale[n.sequence]),
                                rows_of(p, p.v, n, h, first, width), {}, {}, {output}};
  walk.run<Sums::after>(order_of(p, n), operands, [&](int64_t j, int64_t, int64_t t) {
    narrow(walk.y_block + j * walk.across(), output.at(t), output.type, width);
  });
  if (n.final_state) walk.end(n.final_state + state, p.V, 1);
}

// What the piece's own tokens leave in the state, walking with time and, where the piece has d_initial, in dL/dS against it; and
// the decay of what was there before: of rows to n.decay [H, K + V], of columns behind them.
inline void edges(const Problem& p, const Piece& n, int64_t h, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first, state = h * p.K * p.V + first;
  Walk walk = walk_of(p, n, h, false, first, last);
  walk.take(scratch, p.block);
  const Order order = order_of(p, n);
  const Rows k = rows_of(p, p.k, n, h, 0, p.K), v = rows_of(p, p.v, n, h, first, width);

  float *by_row = scratch.floats(walk.rows.across()), *by_column = scratch.floats(walk.columns.across());
  for (int64_t r = 0; r < walk.rows.across(); ++r) by_row[r] = 0;
  for (int64_t c = 0; c < walk.columns.across(); ++c) by_column[c] = 0;
  walk.begin(nullptr, p.V, 1);
  walk.run<Sums::none>(order, {k, {}, v, {}, {}, {}}, [&](int64_t, int64_t w, int64_t) {
    walk.rows.add_to(by_row, w), walk.columns.add_to(by_column, w);
  });
  walk.end(n.final_state + state, p.V, 1);
  float* decay = n.decay + h * (p.K + p.V);
  const auto decay_of = [](const Side& side, const float* sums, int64_t c) {
    return exponential(all(sums[side.kind == Side::channel ? c : 0]))[0];
  };
  for (int64_t r = 0; r < p.K && first == 0; ++r) decay[r] = decay_of(walk.rows, by_row, r);
  for (int64_t c = 0; c < width; ++c) decay[p.K + first + c] = decay_of(walk.columns, by_column, c);

  if (!n.d_initial) return;
  const Rows q = rows_of(p, p.q, n, h, 0, p.K, p.scale[n.sequence]), d_output = rows_of(p, p.d_output, n, h, first, width);
  walk.begin(nullptr, p.V, 1);
  walk.run<Sums::none>(order.backwards(), {q, {}, d_output, {}, {}, {}}, [](int64_t, int64_t, int64_t) {});
  walk.end(n.d_initial + state, p.V, 1);
}

// The two gradients that the columns of one state yield, and their gate's. With dS = dL/dS walking against time,
//
//     y_i = S^T b_i        dz of z . y           dx_i = dS^T a_i            own part (a_i . b_i) times x_i, z_i
//
//     columns of keys:     a = v, b = do, x = k, z = scale q:       y = dq / scale, dx = dk
//     columns of values:   a = k, b = scale q, x = v, z = do:       y = o,          dx = dv
//
// The gradient of a column's log decay at token t telescopes: the sum over t and the tokens behind it of z y - x dx, each without
// its own part, and of the column of S dS at the end, without that of the last token. No decay touches the parts left out; where
// gates are strong they are all but the whole of each term, and their rounding would drown the rest. Sums run in float64, and
// start afresh from S dS every `stretch` tokens, so that their rounding does not grow with T.
struct Columns {
  Rows a, b, x, z;
  Rows y_out, dx_out;         // where y_out.factor * (y + own x) and dx + own z go; no data: nowhere
  float* d_channels = nullptr;  // the gate's gradient at token 0: a number a column, or ...
  float* d_scalar = nullptr;    // ... one for each group of columns, `partial` floats apart
  int64_t d_stride = 0;         // floats from token to token
  int64_t partial = 0;
  float* d_constant = nullptr;  // the sum of d_scalar over tokens, for each group, `heads` floats apart
  float* d_scale = nullptr;     // the sum of z (y + own x), likewise
  int64_t heads = 0;

  bool walks_forward() const { return y_out.data || d_channels || d_scalar || d_scale; }
};

inline void gradient_of_columns(Walk& walk, const Order& order, const Columns& c, const float* initial, const float* d_final,
                                float* d_initial, int64_t by_row, int64_t by_column, Scratch& scratch) {
  const int64_t width = walk.columns.width, groups = (width + group - 1) / group;
  const auto doubles = [&](int64_t count) {
    double* x = reinterpret_cast<double*>(scratch.floats(2 * count));
    for (int64_t i = 0; i < count; ++i) x[i] = 0;
    return x;
  };
  // [width], or [groups] for a scalar gate
  double *running = doubles(width), *total = doubles(groups);
  float *terms = walk.terms, *scale_sums = scratch.floats(groups * LANES);
  for (int64_t i = 0; i < groups * LANES; ++i) scale_sums[i] = 0;
  // use(i) for each vector of columns in group g
  const auto each_in = [&](int64_t g, const auto& use) {
    for (int64_t i = g * group; i < Walk::smallest(walk.across(), (g + 1) * group); i += LANES) use(i);
  };
  const bool gated = c.d_channels || c.d_scalar;
  const Rows d_channels{reinterpret_cast<char*>(c.d_channels), c.d_stride * 4, Type::f32, width};
  const int64_t stretches = gated ? (order.length + stretch - 1) / stretch : 1;
  const auto part = [&](int64_t i) {
    return gated ? order.part(i * stretch, Walk::smallest((i + 1) * stretch, order.length)) : order;
  };
  float* states = scratch.floats(gated ? stretches * walk.state_size() : 0);  // behind each stretch, without its last token's own

  if (c.walks_forward()) {
    walk.begin(initial, by_row, by_column);
    const Walk::Operands operands{c.a, c.b, c.x, c.z, {}, {c.y_out, d_channels}};
    const auto use = [&](int64_t j, int64_t w, int64_t t) {
      float* y = walk.y_block + j * walk.across();
      const float *x = walk.x.row(w), *z = walk.z.row(w);
      const vec own = all(walk.own[j]), z_factor = all(c.z.factor), y_factor = all(c.y_out.factor);
      for (int64_t g = 0; g < groups; ++g) {
        vec gate_sum = {}, scale_sum = {};
        each_in(g, [&](int64_t i) {
          const vec z_here = load(z + i), decayed = load(y + i), whole = decayed + own * load(x + i);
          const vec term = z_here * z_factor * decayed;
          gate_sum += term, scale_sum += z_here * whole;
          store(terms + i, term), store(y + i, whole * y_factor);
        });
        store(scale_sums + g * LANES, load(scale_sums + g * LANES) + scale_sum);
        if (c.d_scalar) c.d_scalar[g * c.partial + t * c.d_stride] = sum(gate_sum);
      }
      if (c.d_channels) narrow(terms, d_channels.at(t), Type::f32, width);
      if (c.y_out.data) narrow(y, c.y_out.at(t), c.y_out.type, width);
    };
    for (int64_t i = 0; i < stretches; ++i) {
      walk.run<Sums::before>(part(i), operands, use, !gated);
      if (!gated) continue;
      __builtin_memcpy(states + i * walk.state_size(), walk.state, walk.state_size() * 4);
      walk.enter_last(operands);
    }
  }

  walk.begin(d_final, by_row, by_column);
  for (int64_t stretch_left = stretches; stretch_left-- > 0;) {
    const Order here = part(stretch_left);
    if (gated) {
      for (int64_t i = 0; i < width; ++i) running[i] = 0;
      for (int64_t i = 0; i < width; ++i) {
        const float* s = states + stretch_left * walk.state_size() + (walk.place(0, i) - walk.state);
        for (int64_t r = 0; r < walk.rows.width; ++r)
          running[c.d_channels ? i : i / group] += double(s[walk.place(r, i) - walk.place(0, i)]) * double(*walk.place(r, i));
      }
    }
    walk.run<Sums::before>(here.backwards(), {c.b, c.a, c.z, c.x, d_channels, {c.dx_out}}, [&](int64_t j, int64_t w, int64_t t) {
      float* dx = walk.y_block + j * walk.across();
      const float *x = walk.z.row(w), *z = walk.x.row(w);
      const vec own = all(walk.own[j] * c.z.factor), decayed = all(t != here.at(here.length - 1));
      for (int64_t g = 0; g < groups; ++g) {
        vec gate_sum = {};
        each_in(g, [&](int64_t i) {
          const vec d = load(dx + i), term = load(x + i) * d * decayed;
          gate_sum += term;
          store(terms + i, term), store(dx + i, d + own * load(z + i));
        });
        if (c.d_scalar) {
          float* d = c.d_scalar + g * c.partial + t * c.d_stride;
          *d = float(running[g] += double(*d) - double(sum(gate_sum)));
          total[g] += running[g];
        }
      }
      if (c.d_channels) {
        float* d = c.d_channels + t * c.d_stride;
        const float* from_y = walk.more.row(w);
#pragma GCC ivdep
        for (int64_t i = 0; i < width; ++i) d[i] = float(running[i] += double(from_y[i]) - double(terms[i]));
      }
      narrow(dx, c.dx_out.at(t), c.dx_out.type, width);
    });
  }
  if (d_initial) walk.end(d_initial, by_row, by_column);
  for (int64_t g = 0; g < groups; ++g) {
    if (c.d_constant) c.d_constant[g * c.heads] = float(total[g]);
    if (c.d_scale) c.d_scale[g * c.heads] = sum(load(scale_sums + g * LANES));
  }
}

inline void gradient_of_keys(const Problem& p, const Piece& n, int64_t h, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first, state = h * p.K * p.V + first * p.V, row = n.example * p.T * p.H + h;
  Walk walk = walk_of(p, n, h, true, first, last);
  walk.take(scratch, p.block);
  Columns c;
  c.a = rows_of(p, p.v, n, h, 0, p.V), c.b = rows_of(p, p.d_output, n, h, 0, p.V);
  c.x = rows_of(p, p.k, n, h, first, width), c.z = rows_of(p, p.q, n, h, first, width, p.scale[n.sequence]);
  c.y_out = rows_of(p, p.dq, n, h, first, width, p.scale[n.sequence]), c.dx_out = rows_of(p, p.dk, n, h, first, width);
  c.partial = p.B * p.T * p.H, c.heads = p.pieces * p.H;
  if (p.d_key) {
    c.d_channels = p.d_key + row * p.K + first, c.d_stride = p.H * p.K;
  } else if (p.d_head) {
    c.d_scalar = p.d_head + first / group * c.partial + row, c.d_stride = p.H;
  }
  const int64_t sums = first / group * c.heads + n.index * p.H + h;
  c.d_constant = p.d_constant ? p.d_constant + sums : nullptr, c.d_scale = p.d_scale + sums;
  gradient_of_columns(walk, order_of(p, n), c, n.initial ? n.initial + state : nullptr, n.d_final + state, nullptr, 1, p.V,
                      scratch);
}

inline void gradient_of_values(const Problem& p, const Piece& n, int64_t h, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first, state = h * p.K * p.V + first;
  Walk walk = walk_of(p, n, h, false, first, last);
  walk.take(scratch, p.block);
  Columns c;
  c.a = rows_of(p, p.k, n, h, 0, p.K), c.b = rows_of(p, p.q, n, h, 0, p.K, p.scale[n.sequence]);
  c.x = rows_of(p, p.v, n, h, first, width), c.z = rows_of(p, p.d_output, n, h, first, width);
  c.dx_out = rows_of(p, p.dv, n, h, first, width);
  c.d_stride = p.H * p.V;
  if (p.d_value) c.d_channels = p.d_value + (n.example * p.T * p.H + h) * p.V + first;
  gradient_of_columns(walk, order_of(p, n), c, n.initial ? n.initial + state : nullptr, n.d_final + state,
                      n.d_initial ? n.d_initial + state : nullptr, p.V, 1, scratch);
}
