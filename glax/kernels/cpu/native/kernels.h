// The kernels: which walks they take, over what. Included once by each instruction set's file.

// Row t of a [B, T, heads, width] array for sequence n and head h of H, from column `first`.
inline Rows rows_of(const Problem& p, const Tensor& x, int64_t n, int64_t h, int64_t first, int64_t width, float factor = 1) {
  const int64_t example = p.boundaries ? 0 : n, head = h * x.heads / p.H;
  const int64_t stride = x.heads * x.width * x.bytes();
  char* data = x.data ? x.data + example * p.T * stride + (head * x.width + first) * x.bytes() : nullptr;
  return {data, stride, x.type, width, factor};
}

inline Order order_of(const Problem& p, int64_t n) {
  int64_t begin = 0, end = p.T;
  if (p.boundaries) {  // their values may be anything where the caller could not see them
    begin = Walk::smallest(p.boundaries[n] < 0 ? 0 : p.boundaries[n], p.T);
    end = Walk::smallest(p.boundaries[n + 1], p.T);
  }
  const int64_t length = end > begin ? end - begin : 0;
  return p.reverse ? Order{begin + length - 1, length, -1, false} : Order{begin, length, 1, false};
}

// The gate of the state's K side (a channel's, a head's or a constant one) or of its V side, from channel `first`.
inline Side side_of(const Problem& p, bool key_side, int64_t n, int64_t h, int64_t first, int64_t width) {
  Side side;
  side.width = width;
  const Tensor& channels = key_side ? p.key : p.value;
  if (channels.data) {
    side.kind = Side::channel, side.gate = rows_of(p, channels, n, h, first, width);
  } else if (key_side && p.head.data) {
    side.kind = Side::scalar, side.gate = rows_of(p, p.head, n, h, 0, 1);
  } else if (key_side && p.constant) {
    side.kind = Side::scalar;
    side.gate = {const_cast<char*>(reinterpret_cast<const char*>(p.constant + n * p.H + h)), 0, Type::f32, 1};
  }
  return side;
}

inline Walk walk_of(const Problem& p, int64_t n, int64_t h, bool columns_are_keys, int64_t first, int64_t last) {
  Walk walk;
  walk.rows = side_of(p, !columns_are_keys, n, h, 0, columns_are_keys ? p.V : p.K);
  walk.columns = side_of(p, columns_are_keys, n, h, first, last - first);
  return walk;
}

inline int64_t scratch_bytes(const Problem& p) {
  const auto need = [&](bool columns_are_keys) {
    Scratch scratch{nullptr};
    const int64_t columns = columns_are_keys ? p.K : p.V;
    walk_of(p, 0, 0, columns_are_keys, 0, columns).take(scratch, p.block);
    scratch.floats(2 * columns), scratch.floats(4 * (columns / group + 1));  // the gradients' sums
    return scratch.used + 256;
  };
  return need(true) > need(false) ? need(true) : need(false);
}

//     a = k, b = scale q, x = v, y = o
inline void forward(const Problem& p, int64_t n, int64_t h, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first, at = (n * p.H + h) * p.K * p.V + first;
  Walk walk = walk_of(p, n, h, false, first, last);
  walk.take(scratch, p.block);
  walk.begin(p.initial ? p.initial + at : nullptr, p.V, 1);
  const Rows output = rows_of(p, p.output, n, h, first, width);
  const Walk::Operands operands{
      rows_of(p, p.k, n, h, 0, p.K), rows_of(p, p.q, n, h, 0, p.K, p.scale[n]), rows_of(p, p.v, n, h, first, width), {}, {}, {output}};
  walk.run<false>(order_of(p, n), operands, [&](int64_t j, int64_t, int64_t t) {
    narrow(walk.y_block + j * walk.across(), output.at(t), output.type, width);
  });
  walk.end(p.final_state + at, p.V, 1);
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
// gates are strong they are all but the whole of each term, and their rounding would drown the rest. Sums run in float64.
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
  double *running = doubles(width), *total = doubles(groups), *scale_total = doubles(groups);
  const auto by_group = [&](const float* terms, const auto& use) {
    for (int64_t g = 0; g < groups; ++g) {
      float sum = 0;
      for (int64_t i = g * group; i < Walk::smallest(width, (g + 1) * group); ++i) sum += terms[i];
      use(g, sum);
    }
  };
  float* terms = walk.terms;
  const Rows d_channels{reinterpret_cast<char*>(c.d_channels), c.d_stride * 4, Type::f32, width};

  if (c.walks_forward()) {
    walk.begin(initial, by_row, by_column);
    walk.run<true>(order, {c.a, c.b, c.x, c.z, {}, {c.y_out, d_channels}}, [&](int64_t j, int64_t w, int64_t t) {
      float* y = walk.y_block + j * walk.across();
      const float *x = walk.x.row(w), *z = walk.z.row(w);
      const vec own = all(walk.own[j]), factor = all(c.z.factor);
      if (c.d_channels || c.d_scalar) {
        for (int64_t i = 0; i < walk.across(); i += LANES) store(terms + i, load(z + i) * factor * load(y + i));
        if (c.d_channels) __builtin_memcpy(c.d_channels + t * c.d_stride, terms, width * 4);
        if (c.d_scalar) by_group(terms, [&](int64_t g, float sum) { c.d_scalar[g * c.partial + t * c.d_stride] = sum; });
      }
      for (int64_t i = 0; i < walk.across(); i += LANES) store(y + i, load(y + i) + own * load(x + i));
      if (c.d_scale) {
        for (int64_t i = 0; i < walk.across(); i += LANES) store(terms + i, load(z + i) * load(y + i));
        by_group(terms, [&](int64_t g, float sum) { scale_total[g] += double(sum); });
      }
      if (c.y_out.data) {
        for (int64_t i = 0; i < walk.across(); i += LANES) store(y + i, load(y + i) * all(c.y_out.factor));
        narrow(y, c.y_out.at(t), c.y_out.type, width);
      }
    }, false);
    for (int64_t i = 0; i < width; ++i) {
      double at_end = 0;
      for (int64_t r = 0; r < walk.rows.width; ++r)
        at_end += double(walk.final_element(r, i)) * double(d_final[r * by_row + i * by_column]);
      running[c.d_channels ? i : i / group] += at_end;
    }
  }

  walk.begin(d_final, by_row, by_column);
  walk.run<true>(order.backwards(), {c.b, c.a, c.z, c.x, d_channels, {c.dx_out}}, [&](int64_t j, int64_t w, int64_t t) {
    float* dx = walk.y_block + j * walk.across();
    const float *x = walk.z.row(w), *z = walk.x.row(w);
    const vec own = all(walk.own[j] * c.z.factor);
    if (c.d_channels || c.d_scalar) {
      const vec decayed = all(t != order.at(order.length - 1));
      for (int64_t i = 0; i < walk.across(); i += LANES) store(terms + i, load(x + i) * load(dx + i) * decayed);
      if (c.d_channels) {
        float* d = c.d_channels + t * c.d_stride;
        const float* r = walk.more.row(w);
        for (int64_t i = 0; i < width; ++i) d[i] = float(running[i] += double(r[i]) - double(terms[i]));
      } else {
        by_group(terms, [&](int64_t g, float sum) {
          float* d = c.d_scalar + g * c.partial + t * c.d_stride;
          *d = float(running[g] += double(*d) - double(sum));
          total[g] += running[g];
        });
      }
    }
    for (int64_t i = 0; i < walk.across(); i += LANES) store(dx + i, load(dx + i) + own * load(z + i));
    narrow(dx, c.dx_out.at(t), c.dx_out.type, width);
  });
  if (d_initial) walk.end(d_initial, by_row, by_column);
  for (int64_t g = 0; g < groups; ++g) {
    if (c.d_constant) c.d_constant[g * c.heads] = float(total[g]);
    if (c.d_scale) c.d_scale[g * c.heads] = float(scale_total[g]);
  }
}

inline void gradient_of_keys(const Problem& p, int64_t n, int64_t h, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first, state = (n * p.H + h) * p.K * p.V + first * p.V;
  const int64_t row = (p.boundaries ? 0 : n) * p.T * p.H + h;
  Walk walk = walk_of(p, n, h, true, first, last);
  walk.take(scratch, p.block);
  Columns c;
  c.a = rows_of(p, p.v, n, h, 0, p.V), c.b = rows_of(p, p.d_output, n, h, 0, p.V);
  c.x = rows_of(p, p.k, n, h, first, width), c.z = rows_of(p, p.q, n, h, first, width, p.scale[n]);
  c.y_out = rows_of(p, p.dq, n, h, first, width, p.scale[n]), c.dx_out = rows_of(p, p.dk, n, h, first, width);
  c.partial = p.B * p.T * p.H, c.heads = p.N * p.H;
  if (p.d_key) {
    c.d_channels = p.d_key + row * p.K + first, c.d_stride = p.H * p.K;
  } else if (p.d_head) {
    c.d_scalar = p.d_head + first / group * c.partial + row, c.d_stride = p.H;
  }
  const int64_t sums = first / group * c.heads + n * p.H + h;
  c.d_constant = p.d_constant ? p.d_constant + sums : nullptr, c.d_scale = p.d_scale + sums;
  gradient_of_columns(walk, order_of(p, n), c, p.initial ? p.initial + state : nullptr, p.d_final + state, nullptr, 1, p.V,
                      scratch);
}

inline void gradient_of_values(const Problem& p, int64_t n, int64_t h, int64_t first, int64_t last, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  const int64_t width = last - first, state = (n * p.H + h) * p.K * p.V + first;
  Walk walk = walk_of(p, n, h, false, first, last);
  walk.take(scratch, p.block);
  Columns c;
  c.a = rows_of(p, p.k, n, h, 0, p.K), c.b = rows_of(p, p.q, n, h, 0, p.K, p.scale[n]);
  c.x = rows_of(p, p.v, n, h, first, width), c.z = rows_of(p, p.d_output, n, h, first, width);
  c.dx_out = rows_of(p, p.dv, n, h, first, width);
  c.d_stride = p.H * p.V;
  if (p.d_value) c.d_channels = p.d_value + ((p.boundaries ? 0 : n) * p.T * p.H + h) * p.V + first;
  gradient_of_columns(walk, order_of(p, n), c, p.initial ? p.initial + state : nullptr, p.d_final + state,
                      p.d_initial ? p.d_initial + state : nullptr, p.V, 1, scratch);
}
