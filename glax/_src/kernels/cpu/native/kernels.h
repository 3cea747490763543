// The kernels: which walks they take, over what. Included once by each instruction set's file.

// Row t of a [B, T, heads, width] array for a piece and head h of H, from column `first`.
inline Rows rows_of(const Problem& p, const Tensor& x, const Piece& n, int64_t h, int64_t first, int64_t width, float factor = 1) {
  const int64_t stride = x.heads * x.width * x.bytes(), head = h * x.heads / p.H;
  char* data = x.data ? x.data + n.example * p.T * stride + (head * x.width + first) * x.bytes() : nullptr;
  return {data, stride, x.type, width, factor};
}

inline Rows written_rows_of(const Problem& p, const Tensor& x, const Piece& n, int64_t h, int64_t first, int64_t width, float factor = 1) {
  return rows_of(p, x, n, h, first, width, factor).to_write(p.B * p.T * x.heads * x.width * x.bytes());
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

// The walks of some heads, side by side over the same tokens.
struct Walks {
  Walk walks[Heads::most];

  Walks(Scratch& scratch, const Problem& p, const Piece& n, Heads heads, bool columns_are_keys, int64_t first, int64_t last) {
    for (int64_t i = 0; i < heads.count(); ++i) {
      Walk& walk = walks[i];
      walk.rows = side_of(p, !columns_are_keys, n, heads.first + i, 0, columns_are_keys ? p.V : p.K);
      walk.columns = side_of(p, columns_are_keys, n, heads.first + i, first, last - first);
      if (i == 0) {
        walk.take(scratch, p.block);
      } else {
        walk.take_beside(scratch, walks[0]);
      }
    }
  }
  Walk& operator()(int64_t i) { return walks[i]; }
};

constexpr int64_t stretch = 512;  // tokens over which a gate's gradient telescopes

inline int64_t scratch_bytes(const Problem& p, int64_t heads, int64_t longest) {
  const auto need = [&](bool columns_are_keys) {
    Scratch scratch{nullptr};
    const int64_t columns = columns_are_keys ? p.K : p.V;
    Walks walks(scratch, p, {}, {0, heads}, columns_are_keys, 0, columns);
    const Walk& walk = walks(0);
    for (int64_t h = 0; h < heads; ++h) {
      if (walk.columns.kind != Side::none) scratch.floats((longest + stretch - 1) / stretch * walk.state_size());
      scratch.floats(2 * (columns + group)), scratch.floats((LANES + 2) * (columns / group + 1));  // the gradients' sums
      scratch.floats(2 * walk.rows.across()), scratch.floats(2 * walk.columns.across());           // the edges' decays
    }
    return scratch.used + heads * 256;
  };
  return need(true) > need(false) ? need(true) : need(false);
}

//     a = k, b = scale q, x = v, y = o
inline bool forward(const Problem& p, const Piece& n, Heads heads, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first;
  bool sound = true;
  const auto state = [&](int64_t i) { return (heads.first + i) * p.K * p.V + first; };
  Walks walks(scratch, p, n, heads, false, first, last);
  for (int64_t i = 0; i < heads.count(); ++i) {
    const int64_t h = heads.first + i;
    walks(i).begin(n.initial ? n.initial + state(i) : nullptr, p.V, 1, p.limit);
    walks(i).operands = {rows_of(p, p.k, n, h, 0, p.K), rows_of(p, p.q, n, h, 0, p.K, p.scale[n.sequence]),
                         rows_of(p, p.v, n, h, first, width), {}, {}, {written_rows_of(p, p.output, n, h, first, width)}};
  }
  walk_side_by_side<Sums::after>(
      heads.count(), walks, order_of(p, n), true,
      [&](int64_t i, int64_t j, int64_t, int64_t t) {
        const Walk& walk = walks(i);
        walk.operands.written[0].write(walk.y_block + j * walk.across(), t);
      },
      [&](int64_t i) {
        sound &= walks(i).sound();
        if (n.final_state) walks(i).end(n.final_state + state(i), p.V, 1);
      });
  streams_end();
  return sound;
}

// What the piece's own tokens leave in the state, walking with time and, where the piece has d_initial, in dL/dS against it; and
// the decay of what was there before: of rows to n.decay [H, K + V], of columns behind them.
inline bool edges(const Problem& p, const Piece& n, Heads heads, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first, count = heads.count();
  const auto state = [&](int64_t i) { return (heads.first + i) * p.K * p.V + first; };
  Walks walks(scratch, p, n, heads, false, first, last);
  const Order order = order_of(p, n);

  bool sound = true;
  double *by_row[Heads::most], *by_column[Heads::most];
  const auto doubles = [&](int64_t count) { return reinterpret_cast<double*>(scratch.floats(2 * count)); };
  for (int64_t i = 0; i < count; ++i) {
    Walk& walk = walks(i);
    by_row[i] = doubles(walk.rows.across()), by_column[i] = doubles(walk.columns.across());
    for (int64_t r = 0; r < walk.rows.across(); ++r) by_row[i][r] = 0;
    for (int64_t c = 0; c < walk.columns.across(); ++c) by_column[i][c] = 0;
    walk.begin(nullptr, p.V, 1, p.limit);
    walk.operands = {rows_of(p, p.k, n, heads.first + i, 0, p.K), {}, rows_of(p, p.v, n, heads.first + i, first, width), {}, {}, {}};
  }
  const auto decay_of = [](const Side& side, const double* sums, int64_t c) {
    return __builtin_exp(sums[side.kind == Side::channel ? c : 0]);
  };
  walk_side_by_side<Sums::none>(
      count, walks, order, true,
      [&](int64_t i, int64_t, int64_t w, int64_t) { walks(i).rows.add_to(by_row[i], w), walks(i).columns.add_to(by_column[i], w); },
      [&](int64_t i) {
        sound &= walks(i).sound();
        walks(i).end(n.final_state + state(i), p.V, 1);
        double* decay = n.decay + (heads.first + i) * (p.K + p.V);
        for (int64_t r = 0; r < p.K && first == 0; ++r) decay[r] = decay_of(walks(i).rows, by_row[i], r);
        for (int64_t c = 0; c < width; ++c) decay[p.K + first + c] = decay_of(walks(i).columns, by_column[i], c);
      });

  if (!n.d_initial) return sound;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t h = heads.first + i;
    walks(i).begin(nullptr, p.V, 1, p.limit);
    walks(i).operands = {rows_of(p, p.q, n, h, 0, p.K, p.scale[n.sequence]), {}, rows_of(p, p.d_output, n, h, first, width), {}, {}, {}};
  }
  walk_side_by_side<Sums::none>(
      count, walks, order.backwards(), true, [](int64_t, int64_t, int64_t, int64_t) {},
      [&](int64_t i) {
        sound &= walks(i).sound();
        walks(i).end(n.d_initial + state(i), p.V, 1);
      });
  return sound;
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
  Rows y_out, dx_out;           // where y_out.factor * (y + own x) and dx + own z go; no data: nowhere
  Rows d_channels;              // the gate's gradient: a number a column, or ...
  float* d_scalar = nullptr;    // ... at token 0, one for each group of columns, `partial` floats apart
  int64_t d_stride = 0;         // floats from token to token
  int64_t partial = 0;
  float* d_constant = nullptr;  // the sum of d_scalar over tokens, for each group, `heads` floats apart
  float* d_scale = nullptr;     // the sum of z (y + own x), likewise
  int64_t heads = 0;
  const float *initial, *d_final;  // columns of states
  float* d_initial = nullptr;

  // Of the walk over them: sums [width], or [groups] for a scalar gate; [groups]; [groups, LANES]; the states behind each stretch,
  // without its last token's own.
  double *running, *total;
  float *scale_sums, *states;

  bool walks_forward() const { return y_out.data || gated() || d_scale; }
  bool gated() const { return d_channels.data || d_scalar; }

  void take(Scratch& scratch, const Walk& walk, int64_t stretches) {
    const int64_t width = walk.columns.width, groups = (width + group - 1) / group;
    running = reinterpret_cast<double*>(scratch.floats(2 * width)), total = reinterpret_cast<double*>(scratch.floats(2 * groups));
    scale_sums = scratch.floats(groups * LANES), states = scratch.floats(gated() ? stretches * walk.state_size() : 0);
    for (int64_t g = 0; g < groups; ++g) total[g] = 0;
    for (int64_t i = 0; i < groups * LANES; ++i) scale_sums[i] = 0;
  }

  // use(i) for each vector of columns in group g
  template <class Use>
  static void each_in(const Walk& walk, int64_t g, const Use& use) {
    for (int64_t i = g * group; i < Walk::smallest(walk.across(), (g + 1) * group); i += LANES) use(i);
  }

  // Token t walked with time.
  void take_y(Walk& walk, int64_t j, int64_t w, int64_t t) {
    float *y = walk.y_block + j * walk.across(), *terms = walk.terms;
    const Row x_row = walk.x.row(w), z_row = walk.z.row(w);
    const vec own = all(walk.own[j]), z_factor = all(z.factor), y_factor = all(y_out.factor);
    for (int64_t g = 0; g * group < walk.columns.width; ++g) {
      vec gate_sum = {}, scale_sum = {};
      each_in(walk, g, [&](int64_t i) {
        const vec z_here = z_row(i), decayed = load(y + i), whole = decayed + own * x_row(i);
        const vec term = z_here * z_factor * decayed;
        gate_sum += term, scale_sum += z_here * whole;
        store(y + i, whole * y_factor);
        if (d_channels.data) store(terms + i, term);
      });
      store(scale_sums + g * LANES, load(scale_sums + g * LANES) + scale_sum);
      if (d_scalar) d_scalar[g * partial + t * d_stride] = sum(gate_sum);
    }
    if (d_channels.data) d_channels.write(terms, t);
    if (y_out.data) y_out.write(y, t);
  }

  // Token t walked against time.
  void take_dx(Walk& walk, int64_t j, int64_t w, int64_t t, bool last) {
    float *dx = walk.y_block + j * walk.across(), *terms = walk.terms;
    const Row x_row = walk.z.row(w), z_row = walk.x.row(w);
    const vec own = all(walk.own[j] * z.factor), decayed = all(!last);
    for (int64_t g = 0; g * group < walk.columns.width; ++g) {
      vec gate_sum = {};
      each_in(walk, g, [&](int64_t i) {
        const vec d = load(dx + i), term = x_row(i) * d * decayed;
        gate_sum += term;
        store(dx + i, d + own * z_row(i));
        if (d_channels.data) store(terms + i, term);
      });
      if (d_scalar) {
        float* d = d_scalar + g * partial + t * d_stride;
        *d = float(running[g] += double(*d) - double(sum(gate_sum)));
        total[g] += running[g];
      }
    }
    if (d_channels.data) {
      const float* from_y = walk.more.row(w).floats();
      double* sums = running;
#pragma GCC ivdep
      for (int64_t i = 0; i < walk.columns.width; ++i) terms[i] = float(sums[i] += double(from_y[i]) - double(terms[i]));
      d_channels.write(terms, t);
    }
    dx_out.write(dx, t);
  }

  void keep_state(Walk& walk, int64_t i) { walk.settle(states + i * walk.state_size()); }

  // The sums of S dS behind stretch i.
  void begin_sums(Walk& walk, int64_t i) {
    const float* kept = states + i * walk.state_size();
    for (int64_t c = 0; c < walk.columns.width; ++c) running[c] = 0;
    walk.rows.form_pending(), walk.columns.form_pending();
    const Side::Factors by_row = walk.rows.of_row(walk.rows.pending), by_column = walk.columns.of_row(walk.columns.pending);
    walk.each_run([&](int64_t r, int64_t c, const float* dS, int64_t n) {
      const float* S = kept + (dS - walk.state);
      const double row = by_row.at(r);
      for (int64_t x = 0; x < n; ++x) running[c + x] += double(S[x]) * (double(dS[x]) * row * double(by_column.at(c + x)));
    });
    for (int64_t g = 0; d_scalar && g * group < walk.columns.width; ++g) {
      double sum = 0;
      for (int64_t c = g * group; c < Walk::smallest(walk.columns.width, (g + 1) * group); ++c) sum += running[c];
      running[g] = sum;
    }
  }

  void end() const {
    for (int64_t g = 0; d_constant && g * group < z.width; ++g) d_constant[g * heads] = float(total[g]);
    for (int64_t g = 0; d_scale && g * group < z.width; ++g) d_scale[g * heads] = sum(load(scale_sums + g * LANES));
  }
};

// Element (r, c) of a state lies at r * by_row + c * by_column.
inline bool gradient_of_columns(Walks& walks, int64_t heads, const Order& order, Columns* columns, int64_t by_row, int64_t by_column,
                                float limit, Scratch& scratch) {
  bool sound = true;
  const bool gated = columns->gated();
  const int64_t stretches = gated ? (order.length + stretch - 1) / stretch : 1;
  const auto part = [&](int64_t i) {
    return gated ? order.part(i * stretch, Walk::smallest((i + 1) * stretch, order.length)) : order;
  };
  for (int64_t h = 0; h < heads; ++h) columns[h].take(scratch, walks(h), stretches);

  if (columns->walks_forward()) {
    for (int64_t h = 0; h < heads; ++h) {
      const Columns& c = columns[h];
      walks(h).begin(c.initial, by_row, by_column, limit);
      walks(h).operands = {c.a, c.b, c.x, c.z, {}, {c.y_out, c.d_channels}};
    }
    for (int64_t i = 0; i < stretches; ++i)
      walk_side_by_side<Sums::before>(
          heads, walks, part(i), !gated,
          [&](int64_t h, int64_t j, int64_t w, int64_t t) { columns[h].take_y(walks(h), j, w, t); },
          [&](int64_t h) {
            sound &= walks(h).sound();
            if (gated) columns[h].keep_state(walks(h), i), walks(h).enter_last();
          });
  }

  for (int64_t h = 0; h < heads; ++h) {
    const Columns& c = columns[h];
    walks(h).begin(c.d_final, by_row, by_column, limit);
    walks(h).operands = {c.b, c.a, c.z, c.x, c.d_channels, {c.dx_out}};
  }
  for (int64_t i = stretches; i-- > 0;) {
    const Order here = part(i);
    for (int64_t h = 0; gated && h < heads; ++h) columns[h].begin_sums(walks(h), i);
    walk_side_by_side<Sums::before>(
        heads, walks, here.backwards(), true,
        [&](int64_t h, int64_t j, int64_t w, int64_t t) { columns[h].take_dx(walks(h), j, w, t, t == here.at(here.length - 1)); },
        [](int64_t) {});
  }
  for (int64_t h = 0; h < heads; ++h) {
    sound &= walks(h).sound();
    if (columns[h].d_initial) walks(h).end(columns[h].d_initial, by_row, by_column);
    columns[h].end();
  }
  streams_end();
  return sound;
}

// Of [B, T, H, channels] gradients of a gate.
inline Rows gate_rows_of(const Problem& p, float* x, const Piece& n, int64_t h, int64_t channels, int64_t first, int64_t width) {
  return written_rows_of(p, {reinterpret_cast<char*>(x), Type::f32, p.H, channels}, n, h, first, width);
}

inline bool gradient_of_keys(const Problem& p, const Piece& n, Heads heads, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  Walks walks(scratch, p, n, heads, true, first, last);
  const int64_t width = last - first;
  Columns columns[Heads::most];
  for (int64_t h = heads.first; h < heads.last; ++h) {
    const int64_t state = h * p.K * p.V + first * p.V, row = n.example * p.T * p.H + h;
    Columns& c = columns[h - heads.first];
    c.a = rows_of(p, p.v, n, h, 0, p.V), c.b = rows_of(p, p.d_output, n, h, 0, p.V);
    c.x = rows_of(p, p.k, n, h, first, width), c.z = rows_of(p, p.q, n, h, first, width, p.scale[n.sequence]);
    c.y_out = written_rows_of(p, p.dq, n, h, first, width, p.scale[n.sequence]), c.dx_out = written_rows_of(p, p.dk, n, h, first, width);
    c.partial = p.B * p.T * p.H, c.heads = p.pieces * p.H;
    if (p.d_key) {
      c.d_channels = gate_rows_of(p, p.d_key, n, h, p.K, first, width);
    } else if (p.d_head) {
      c.d_scalar = p.d_head + first / group * c.partial + row, c.d_stride = p.H;
    }
    const int64_t sums = first / group * c.heads + n.index * p.H + h;
    c.d_constant = p.d_constant ? p.d_constant + sums : nullptr, c.d_scale = p.d_scale + sums;
    c.initial = n.initial ? n.initial + state : nullptr, c.d_final = n.d_final + state;
  }
  return gradient_of_columns(walks, heads.count(), order_of(p, n), columns, 1, p.V, p.limit, scratch);
}

inline bool gradient_of_values(const Problem& p, const Piece& n, Heads heads, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  Walks walks(scratch, p, n, heads, false, first, last);
  const int64_t width = last - first;
  Columns columns[Heads::most];
  for (int64_t h = heads.first; h < heads.last; ++h) {
    const int64_t state = h * p.K * p.V + first;
    Columns& c = columns[h - heads.first];
    c.a = rows_of(p, p.k, n, h, 0, p.K), c.b = rows_of(p, p.q, n, h, 0, p.K, p.scale[n.sequence]);
    c.x = rows_of(p, p.v, n, h, first, width), c.z = rows_of(p, p.d_output, n, h, first, width);
    c.dx_out = written_rows_of(p, p.dv, n, h, first, width);
    if (p.d_value) c.d_channels = gate_rows_of(p, p.d_value, n, h, p.V, first, width);
    c.initial = n.initial ? n.initial + state : nullptr, c.d_final = n.d_final + state;
    c.d_initial = n.d_initial ? n.d_initial + state : nullptr;
  }
  return gradient_of_columns(walks, heads.count(), order_of(p, n), columns, p.V, 1, p.limit, scratch);
}
