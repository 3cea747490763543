// The forward and the boundary states of segments, as scans. Each instruction set's file includes this one.

// The rows of x [B, T, heads, width] for a segment and head h of H: columns [first, first + width).
inline RowView rows_of(const Problem& p, const Tensor& x, const Segment& n, int64_t h, int64_t first, int64_t width, float factor = 1) {
  const int64_t stride = x.heads * x.width * x.bytes(), head = h * x.heads / p.H;
  char* data = x.data ? x.data + n.example * p.T * stride + (head * x.width + first) * x.bytes() : nullptr;
  return {data, stride, x.type, width, factor};
}

// The same rows, for writing each of them whole.
inline RowView written_rows_of(const Problem& p, const Tensor& x, const Segment& n, int64_t h, int64_t first, int64_t width,
                               float factor = 1) {
  return rows_of(p, x, n, h, first, width, factor).to_write(p.B * p.T * x.heads * x.width * x.bytes());
}

// The order of a segment's tokens in the forward scan.
inline Order order_of(const Problem& p, const Segment& n) {
  return p.reverse ? Order{n.first + n.length - 1, n.length, -1, false, n.fresh} : Order{n.first, n.length, 1, false, n.fresh};
}

// The gate of the state's K side (per-key, per-head or constant) or of its V side (per-value), from channel `first`.
inline DecayAccumulator accumulator_of(const Problem& p, bool key_side, const Segment& n, int64_t h, int64_t first, int64_t width) {
  DecayAccumulator gate_sums;
  gate_sums.width = width;
  const Tensor& channels = key_side ? p.key : p.value;
  if (channels.data) {
    gate_sums.kind = DecayAccumulator::channel, gate_sums.gate = rows_of(p, channels, n, h, first, width);
  } else if (key_side && p.head.data) {
    gate_sums.kind = DecayAccumulator::scalar, gate_sums.gate = rows_of(p, p.head, n, h, 0, 1);
  } else if (key_side && p.constant) {
    gate_sums.kind = DecayAccumulator::scalar;
    gate_sums.gate = {const_cast<char*>(reinterpret_cast<const char*>(p.constant + n.sequence * p.H + h)), 0, Type::f32, 1};
  }
  return gate_sums;
}

// The scans of a task's heads over the same tokens.
struct HeadScans {
  Scan scans[Heads::most];

  HeadScans(Scratch& scratch, const Problem& p, const Segment& n, Heads heads, bool columns_are_keys, int64_t first, int64_t last) {
    for (int64_t i = 0; i < heads.count(); ++i) {
      Scan& scan = scans[i];
      scan.rows = accumulator_of(p, !columns_are_keys, n, heads.first + i, 0, columns_are_keys ? p.V : p.K);
      scan.columns = accumulator_of(p, columns_are_keys, n, heads.first + i, first, last - first);
      if (i == 0) {
        scan.allocate(scratch, p.block);
      } else {
        scan.allocate_sharing(scratch, scans[0]);
      }
    }
  }
  Scan& operator()(int64_t i) { return scans[i]; }
};

constexpr int64_t stretch = 512;  // tokens over which a gate's gradient telescopes

// The scratch of a task with `heads` heads, in bytes.
inline int64_t scratch_bytes(const Problem& p, int64_t heads, int64_t longest) {
  const auto need = [&](bool columns_are_keys) {
    Scratch scratch{nullptr};
    const int64_t columns = columns_are_keys ? p.K : p.V;
    HeadScans scans(scratch, p, {}, {0, heads}, columns_are_keys, 0, columns);
    const Scan& scan = scans(0);
    for (int64_t h = 0; h < heads; ++h) {
      if (scan.columns.kind != DecayAccumulator::none) scratch.floats((longest + stretch - 1) / stretch * scan.state_size());
      scratch.floats(2 * (columns + group)), scratch.floats((LANES + 2) * (columns / group + 1));  // sums of the gradients
      scratch.floats(2 * scan.rows.across()), scratch.floats(2 * scan.columns.across());           // decays of boundary states
    }
    return scratch.used + heads * 256;
  };
  return need(true) > need(false) ? need(true) : need(false);
}

// The forward: a = k, b = scale q, x = v, y = o.
inline bool forward(const Problem& p, const Segment& n, Heads heads, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first;
  bool in_range = true;
  const auto state = [&](int64_t i) { return (heads.first + i) * p.K * p.V + first; };
  HeadScans scans(scratch, p, n, heads, false, first, last);
  for (int64_t i = 0; i < heads.count(); ++i) {
    const int64_t h = heads.first + i;
    scans(i).begin(n.initial ? n.initial + state(i) : nullptr, p.V, 1, p.limit);
    scans(i).operands = {rows_of(p, p.k, n, h, 0, p.K), rows_of(p, p.q, n, h, 0, p.K, p.scale[n.sequence]),
                         rows_of(p, p.v, n, h, first, width), {}, {}, {written_rows_of(p, p.output, n, h, first, width)}};
  }
  scan_together<Sums::after>(
      heads.count(), scans, order_of(p, n), true,
      [&](int64_t i, int64_t j, int64_t, int64_t t) {
        const Scan& scan = scans(i);
        scan.operands.written[0].write(scan.y_block + j * scan.across(), t);
      },
      [&](int64_t i) {
        in_range &= scans(i).in_range();
        if (n.final_state) scans(i).end(n.final_state + state(i), p.V, 1);
      });
  streams_end();
  return in_range;
}

// Scans a segment from a zero state. Writes its final state, dL/dS before it where n.d_initial is not null, and the decay of what came
// before to n.decay [H, K + V]: rows first, then columns.
inline bool boundary_states(const Problem& p, const Segment& n, Heads heads, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first, count = heads.count();
  const auto state = [&](int64_t i) { return (heads.first + i) * p.K * p.V + first; };
  HeadScans scans(scratch, p, n, heads, false, first, last);
  const Order order = order_of(p, n);

  bool in_range = true;
  double *by_row[Heads::most], *by_column[Heads::most];
  const auto doubles = [&](int64_t count) { return reinterpret_cast<double*>(scratch.floats(2 * count)); };
  for (int64_t i = 0; i < count; ++i) {
    Scan& scan = scans(i);
    by_row[i] = doubles(scan.rows.across()), by_column[i] = doubles(scan.columns.across());
    for (int64_t r = 0; r < scan.rows.across(); ++r) by_row[i][r] = 0;
    for (int64_t c = 0; c < scan.columns.across(); ++c) by_column[i][c] = 0;
    scan.begin(nullptr, p.V, 1, p.limit);
    scan.operands = {rows_of(p, p.k, n, heads.first + i, 0, p.K), {}, rows_of(p, p.v, n, heads.first + i, first, width), {}, {}, {}};
  }
  const auto decay_of = [](const DecayAccumulator& gate_sums, const double* sums, int64_t c) {
    return __builtin_exp(sums[gate_sums.kind == DecayAccumulator::channel ? c : 0]);
  };
  scan_together<Sums::none>(
      count, scans, order, true,
      [&](int64_t i, int64_t, int64_t w, int64_t) { scans(i).rows.add_to(by_row[i], w), scans(i).columns.add_to(by_column[i], w); },
      [&](int64_t i) {
        in_range &= scans(i).in_range();
        scans(i).end(n.final_state + state(i), p.V, 1);
        double* decay = n.decay + (heads.first + i) * (p.K + p.V);
        for (int64_t r = 0; r < p.K && first == 0; ++r) decay[r] = decay_of(scans(i).rows, by_row[i], r);
        for (int64_t c = 0; c < width; ++c) decay[p.K + first + c] = decay_of(scans(i).columns, by_column[i], c);
      });

  if (!n.d_initial) return in_range;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t h = heads.first + i;
    scans(i).begin(nullptr, p.V, 1, p.limit);
    scans(i).operands = {rows_of(p, p.q, n, h, 0, p.K, p.scale[n.sequence]), {}, rows_of(p, p.d_output, n, h, first, width), {}, {}, {}};
  }
  scan_together<Sums::none>(
      count, scans, order.backwards(), true, [](int64_t, int64_t, int64_t, int64_t) {},
      [&](int64_t i) {
        in_range &= scans(i).in_range();
        scans(i).end(n.d_initial + state(i), p.V, 1);
      });
  return in_range;
}
