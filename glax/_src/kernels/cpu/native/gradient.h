// The gradients, as scans with time and against it. Each instruction set's file includes this one.

// Two gradients from the columns of one state, and the gradient of the columns' gate. With dS = dL/dS scanned against time,
//
//     y_i = S^T b_i  (the gradient of z)        dx_i = dS^T a_i        own part of each: (a_i . b_i) x_i and (a_i . b_i) z_i
//
//     columns of keys:     a = v, b = do, x = k, z = scale q:       y = dq / scale, dx = dk
//     columns of values:   a = k, b = scale q, x = v, z = do:       y = o,          dx = dv
//
// The gradient of a column's log decay at token t telescopes: it is the sum over t and later tokens of z y - x dx, each without its own
// part, plus the column's sum of S dS at the end, without the last token's own part. The own parts do not depend on decays. With strong
// gates they dominate each term, and their rounding would exceed the remainder. Sums are float64 and restart from S dS every `stretch`
// tokens, so that the rounding error does not grow with T.
struct ColumnGradient {
  RowView a, b, x, z;
  RowView y_out, dx_out;        // outputs y_out.factor * (y + own x) and dx + own z; null data: not written
  RowView d_channels;           // the gate's gradient, one number for each column; or
  float* d_scalar = nullptr;    // at token 0, one number for each group of columns, `partial` floats apart
  int64_t d_stride = 0;         // floats from token to token
  int64_t partial = 0;
  float* d_constant = nullptr;  // the sum of d_scalar over tokens, for each group, `heads` floats apart
  float* d_scale = nullptr;     // the sum of z (y + own x), likewise
  int64_t heads = 0;
  int64_t fresh = -1;              // the token whose gate has no gradient
  const float *initial, *d_final;  // columns of states
  float* d_initial = nullptr;

  // running: [width], or [groups] for a scalar gate; total: [groups]; scale_sums: [groups, LANES]; states: the state after each stretch,
  // without its last token's own part.
  double *running, *total;
  float *scale_sums, *states;

  bool runs_forward() const { return y_out.data || gated() || d_scale; }
  bool gated() const { return d_channels.data || d_scalar; }

  void allocate(Scratch& scratch, const Scan& scan, int64_t stretches) {
    const int64_t width = scan.columns.width, groups = (width + group - 1) / group;
    running = reinterpret_cast<double*>(scratch.floats(2 * width)), total = reinterpret_cast<double*>(scratch.floats(2 * groups));
    scale_sums = scratch.floats(groups * LANES), states = scratch.floats(gated() ? stretches * scan.state_size() : 0);
    for (int64_t g = 0; g < groups; ++g) total[g] = 0;
    for (int64_t i = 0; i < groups * LANES; ++i) scale_sums[i] = 0;
  }

  // Calls use(i) for each vector of columns in group g.
  template <class Use>
  static void for_each_vector(const Scan& scan, int64_t g, const Use& use) {
    for (int64_t i = g * group; i < Scan::smallest(scan.across(), (g + 1) * group); i += LANES) use(i);
  }

  // Consumes y of token t, in the scan with time.
  void consume_y(Scan& scan, int64_t j, int64_t w, int64_t t) {
    float *y = scan.y_block + j * scan.across(), *terms = scan.terms;
    const Row x_row = scan.x.row(w), z_row = scan.z.row(w);
    const vec own = broadcast(scan.own[j]), z_factor = broadcast(z.factor), y_factor = broadcast(y_out.factor);
    for (int64_t g = 0; g * group < scan.columns.width; ++g) {
      vec gate_sum = {}, scale_sum = {};
      for_each_vector(scan, g, [&](int64_t i) {
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

  // Consumes dx of token t, in the scan against time.
  void consume_dx(Scan& scan, int64_t j, int64_t w, int64_t t, bool last) {
    float *dx = scan.y_block + j * scan.across(), *terms = scan.terms;
    const Row x_row = scan.z.row(w), z_row = scan.x.row(w);
    const vec own = broadcast(scan.own[j] * z.factor), decayed = broadcast(!last);
    for (int64_t g = 0; g * group < scan.columns.width; ++g) {
      vec gate_sum = {};
      for_each_vector(scan, g, [&](int64_t i) {
        const vec d = load(dx + i), term = x_row(i) * d * decayed;
        gate_sum += term;
        store(dx + i, d + own * z_row(i));
        if (d_channels.data) store(terms + i, term);
      });
      if (d_scalar) {
        float* d = d_scalar + g * partial + t * d_stride;
        *d = float(running[g] += double(*d) - double(sum(gate_sum)));
        if (t == fresh) {
          *d = 0;
        } else {
          total[g] += running[g];
        }
      }
    }
    if (d_channels.data) {
      const float* from_y = scan.more.row(w).floats();
      double* sums = running;
#pragma GCC ivdep
      for (int64_t i = 0; i < scan.columns.width; ++i) terms[i] = float(sums[i] += double(from_y[i]) - double(terms[i]));
      for (int64_t i = 0; t == fresh && i < scan.columns.width; ++i) terms[i] = 0;
      d_channels.write(terms, t);
    }
    dx_out.write(dx, t);
  }

  void save_state(Scan& scan, int64_t i) { scan.apply_decay(states + i * scan.state_size()); }

  // Sets the running sums to those of S dS after stretch i.
  void begin_sums(Scan& scan, int64_t i) {
    const float* saved = states + i * scan.state_size();
    for (int64_t c = 0; c < scan.columns.width; ++c) running[c] = 0;
    scan.rows.form_pending(), scan.columns.form_pending();
    const DecayAccumulator::Factors by_row = scan.rows.of_row(scan.rows.pending), by_column = scan.columns.of_row(scan.columns.pending);
    scan.for_each_run([&](int64_t r, int64_t c, const float* dS, int64_t n) {
      const float* S = saved + (dS - scan.state);
      const double row = by_row.at(r);
      for (int64_t x = 0; x < n; ++x) running[c + x] += double(S[x]) * (double(dS[x]) * row * double(by_column.at(c + x)));
    });
    for (int64_t g = 0; d_scalar && g * group < scan.columns.width; ++g) {
      double sum = 0;
      for (int64_t c = g * group; c < Scan::smallest(scan.columns.width, (g + 1) * group); ++c) sum += running[c];
      running[g] = sum;
    }
  }

  void end() const {
    for (int64_t g = 0; d_constant && g * group < z.width; ++g) d_constant[g * heads] = float(total[g]);
    for (int64_t g = 0; d_scale && g * group < z.width; ++g) d_scale[g * heads] = sum(load(scale_sums + g * LANES));
  }
};

// Runs the scans of ColumnGradient for some heads. Element (r, c) of a state is at r * by_row + c * by_column.
inline bool gradient_of_columns(HeadScans& scans, int64_t heads, const Order& order, ColumnGradient* columns, int64_t by_row,
                                int64_t by_column, float limit, Scratch& scratch) {
  bool in_range = true;
  const bool gated = columns->gated();
  const int64_t stretches = gated ? (order.length + stretch - 1) / stretch : 1;
  const auto part = [&](int64_t i) {
    return gated ? order.slice(i * stretch, Scan::smallest((i + 1) * stretch, order.length)) : order;
  };
  for (int64_t h = 0; h < heads; ++h) {
    columns[h].allocate(scratch, scans(h), stretches);
    if (order.fresh && order.length > 0) columns[h].fresh = order.at(0);
  }

  if (columns->runs_forward()) {
    for (int64_t h = 0; h < heads; ++h) {
      const ColumnGradient& c = columns[h];
      scans(h).begin(c.initial, by_row, by_column, limit);
      scans(h).operands = {c.a, c.b, c.x, c.z, {}, {c.y_out, c.d_channels}};
    }
    for (int64_t i = 0; i < stretches; ++i)
      scan_together<Sums::before>(
          heads, scans, part(i), !gated,
          [&](int64_t h, int64_t j, int64_t w, int64_t t) { columns[h].consume_y(scans(h), j, w, t); },
          [&](int64_t h) {
            in_range &= scans(h).in_range();
            if (gated) columns[h].save_state(scans(h), i), scans(h).add_last_token();
          });
  }

  for (int64_t h = 0; h < heads; ++h) {
    const ColumnGradient& c = columns[h];
    scans(h).begin(c.d_final, by_row, by_column, limit);
    scans(h).operands = {c.b, c.a, c.z, c.x, c.d_channels, {c.dx_out}};
  }
  for (int64_t i = stretches; i-- > 0;) {
    const Order here = part(i);
    for (int64_t h = 0; gated && h < heads; ++h) columns[h].begin_sums(scans(h), i);
    scan_together<Sums::before>(
        heads, scans, here.backwards(), true,
        [&](int64_t h, int64_t j, int64_t w, int64_t t) { columns[h].consume_dx(scans(h), j, w, t, t == here.at(here.length - 1)); },
        [](int64_t) {});
  }
  for (int64_t h = 0; h < heads; ++h) {
    in_range &= scans(h).in_range();
    if (columns[h].d_initial) scans(h).end(columns[h].d_initial, by_row, by_column);
    columns[h].end();
  }
  streams_end();
  return in_range;
}

// The rows of a gate's gradient x [B, T, H, channels].
inline RowView gate_rows_of(const Problem& p, float* x, const Segment& n, int64_t h, int64_t channels, int64_t first, int64_t width) {
  return written_rows_of(p, {reinterpret_cast<char*>(x), Type::f32, p.H, channels}, n, h, first, width);
}

// The rows of a gradient x [B, T, heads, width] for head h. Consecutive heads that share a row are summed there: the first writes, and
// the others, which the same task scans after it, add.
inline RowView summed_rows_of(const Problem& p, const Tensor& x, const Segment& n, int64_t h, int64_t first, int64_t width,
                              float factor = 1) {
  if (x.heads == p.H) return written_rows_of(p, x, n, h, first, width, factor);
  RowView rows = rows_of(p, x, n, h, first, width, factor);
  rows.adds = h % (p.H / x.heads) != 0;
  return rows;
}

// The gradients of q, k and the K side's gate: columns are keys.
inline bool gradient_of_keys(const Problem& p, const Segment& n, Heads heads, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  HeadScans scans(scratch, p, n, heads, true, first, last);
  const int64_t width = last - first;
  ColumnGradient columns[Heads::most];
  for (int64_t h = heads.first; h < heads.last; ++h) {
    const int64_t state = h * p.K * p.V + first * p.V, row = n.example * p.T * p.H + h;
    ColumnGradient& c = columns[h - heads.first];
    c.a = rows_of(p, p.v, n, h, 0, p.V), c.b = rows_of(p, p.d_output, n, h, 0, p.V);
    c.x = rows_of(p, p.k, n, h, first, width), c.z = rows_of(p, p.q, n, h, first, width, p.scale[n.sequence]);
    c.y_out = summed_rows_of(p, p.dq, n, h, first, width, p.scale[n.sequence]), c.dx_out = summed_rows_of(p, p.dk, n, h, first, width);
    c.partial = p.B * p.T * p.H, c.heads = p.segments * p.H;
    if (p.d_key) {
      c.d_channels = gate_rows_of(p, p.d_key, n, h, p.K, first, width);
    } else if (p.d_head) {
      c.d_scalar = p.d_head + first / group * c.partial + row, c.d_stride = p.H;
    }
    const int64_t sums = first / group * c.heads + n.index * p.H + h;
    c.d_constant = p.d_constant ? p.d_constant + sums : nullptr, c.d_scale = p.d_scale + sums;
    c.initial = n.initial ? n.initial + state : nullptr, c.d_final = n.d_final ? n.d_final + state : nullptr;
  }
  return gradient_of_columns(scans, heads.count(), order_of(p, n), columns, 1, p.V, p.limit, scratch);
}

// The gradients of v, the V side's gate and the initial state: columns are values.
inline bool gradient_of_values(const Problem& p, const Segment& n, Heads heads, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  HeadScans scans(scratch, p, n, heads, false, first, last);
  const int64_t width = last - first;
  ColumnGradient columns[Heads::most];
  for (int64_t h = heads.first; h < heads.last; ++h) {
    const int64_t state = h * p.K * p.V + first;
    ColumnGradient& c = columns[h - heads.first];
    c.a = rows_of(p, p.k, n, h, 0, p.K), c.b = rows_of(p, p.q, n, h, 0, p.K, p.scale[n.sequence]);
    c.x = rows_of(p, p.v, n, h, first, width), c.z = rows_of(p, p.d_output, n, h, first, width);
    c.dx_out = summed_rows_of(p, p.dv, n, h, first, width);
    if (p.d_value) c.d_channels = gate_rows_of(p, p.d_value, n, h, p.V, first, width);
    c.initial = n.initial ? n.initial + state : nullptr, c.d_final = n.d_final ? n.d_final + state : nullptr;
    c.d_initial = n.d_initial ? n.d_initial + state : nullptr;
  }
  return gradient_of_columns(scans, heads.count(), order_of(p, n), columns, p.V, 1, p.limit, scratch);
}
