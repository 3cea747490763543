// The gradient of the delta rule in every input, against time. delta_block.h has the forward's formulas and names.
//
// With S the state before a block, dS' = dL/dS' after it, z the rows -dx and then do, and x_i = w_i v_i - S^T (e_i P_i),
//
//     du_j   = dS'^T (k_j P_last / P_j) + sum_{i >= j} M_ij do_i          dx_j = du_j - sum_{i > j} L_ij dx_i
//     dL_ij  = -dx_i . u_j    dM_ij = do_i . u_j                          d(w_j v_j) = dx_j
//     de_i   = P_i (-S dx_i + sum_{j < i} dL_ij k_j / P_j)                dq_i = P_i (S do_i + sum_{j <= i} dM_ij k_j / P_j)
//     dk_j   = P_last / P_j dS' u_j + 1 / P_j sum_i (dL_ij e_i P_i + dM_ij q_i P_i)
//     dL/dS  = P_last dS' + sum_i (q_i P_i) do_i^T - (e_i P_i) dx_i^T
//
// The gradient of the log decays at token i is <S, dL/dS> less the sum over the block's earlier tokens of q dq - k dk + e de, all without
// the pair of a token with itself, which does not depend on the gates.
//
// A first pass saves the state before each stretch of tokens. The stretches are then computed from the last to the first: the blocks of a
// stretch run forward in groups, whose states before each block are saved, and then against time.

constexpr int64_t DELTA_STRETCH = 256;  // tokens
constexpr int64_t GROUP_BLOCKS = 16;    // blocks whose states are saved together; strong gates make a block of every token

struct DeltaGradient {
  DeltaScan scan;
  const Problem& p;
  const Segment& n;
  Order order;
  int64_t head = 0;
  float *stretches;             // the state before each stretch
  float *groups;                // the state before each group of a stretch
  float *blocks, *writes;       // the state before each block of a group, and its u
  float *d_state;               // dL/dS
  int64_t* begins;              // the first token of each block of a stretch, and the end
  int64_t blocks_in_stretch = 0;
  float *z, *du, *by_state, *by_key, *d_scores;  // rows of the current block
  float *dq, *dk, *de, *terms, *edge;
  RowView dq_out, dk_out, dv_out, d_key_out, d_erase_out, d_write_out, do_rows;
  double d_scale = 0, d_constant = 0;

  DeltaGradient(Scratch& scratch, const Problem& p, const Segment& n, int64_t longest) : p(p), n(n), order(order_of(p, n)) {
    scan.allocate(scratch, p.K, p.V);
    const DeltaBlock& block = scan.block;
    const int64_t state = scan.state_size(), rows = BLOCK_TOKENS + 3, all = 2 * BLOCK_TOKENS + 3;
    stretches = scratch.floats((longest + DELTA_STRETCH - 1) / DELTA_STRETCH * state);
    groups = scratch.floats((DELTA_STRETCH + GROUP_BLOCKS - 1) / GROUP_BLOCKS * state);
    blocks = scratch.floats(GROUP_BLOCKS * state), writes = scratch.floats((GROUP_BLOCKS * BLOCK_TOKENS + 3) * block.value_width);
    begins = reinterpret_cast<int64_t*>(scratch.floats(2 * (DELTA_STRETCH + 1)));
    d_state = scratch.floats(state);
    z = scratch.floats(all * block.value_width), du = scratch.floats(rows * block.value_width);
    by_state = scratch.floats(all * block.key_width), by_key = scratch.floats(rows * block.key_width);
    d_scores = scratch.floats(all * BLOCK_TOKENS);
    for (float** x : {&dq, &dk, &de, &terms}) *x = scratch.floats(rows * block.key_width);
    edge = scratch.floats(block.key_width);
  }

  Panels d_states() const { return state_at(d_state, p.K); }
  void copy_state(const float* from, float* to) const { __builtin_memcpy(to, from, scan.state_size() * 4); }

  // Runs the measured and filled block of the scan forward; the state before it, after `enter`, goes to `before` if that is not null.
  void run_block(float* before, float* u) {
    DeltaBlock& block = scan.block;
    block.enter(scan.states(), scan.panels());
    if (before) copy_state(scan.state, before);
    multiply(block.reads, block.key_width, block.tokens, scan.states(), p.K, scan.panels(), rows_at(scan.y, block.value_width));
    block.solve(scan.y, u);
    block.advance(scan.states(), u);
  }

  // The end of stretch i.
  int64_t stretch_end(int64_t i) const { return Scan::smallest((i + 1) * DELTA_STRETCH, order.length); }

  void save_stretches() {
    for (int64_t from = 0; from < order.length; from += scan.block.tokens) {
      if (from % DELTA_STRETCH == 0) copy_state(scan.state, stretches + from / DELTA_STRETCH * scan.state_size());
      scan.block.measure(order, from, stretch_end(from / DELTA_STRETCH) - from);
      scan.block.fill(order, from);
      run_block(nullptr, scan.u);
    }
  }

  // Computes stretch i, given dL/dS after it.
  void run_stretch(int64_t i) {
    const int64_t end = stretch_end(i), state = scan.state_size();
    blocks_in_stretch = 0;
    for (int64_t from = i * DELTA_STRETCH; from < end; from += scan.block.tokens) {
      begins[blocks_in_stretch++] = from;
      scan.block.measure(order, from, end - from);
    }
    begins[blocks_in_stretch] = end;
    const int64_t count = (blocks_in_stretch + GROUP_BLOCKS - 1) / GROUP_BLOCKS;
    copy_state(stretches + i * state, scan.state), copy_state(scan.state, groups);
    for (int64_t b = 0; b < (count - 1) * GROUP_BLOCKS; ++b) {
      if (b % GROUP_BLOCKS == 0) copy_state(scan.state, groups + b / GROUP_BLOCKS * state);
      fill_block(b), run_block(nullptr, scan.u);
    }
    if (count > 1) copy_state(scan.state, groups + (count - 1) * state);
    for (int64_t g = count; g-- > 0;) {
      copy_state(groups + g * state, scan.state);
      const int64_t first = g * GROUP_BLOCKS, last = Scan::smallest(first + GROUP_BLOCKS, blocks_in_stretch);
      for (int64_t b = first; b < last; ++b) fill_block(b), run_block(blocks + (b - first) * state, u_of(b - first));
      for (int64_t b = last; b-- > first;) fill_block(b), block_gradient(begins[b], blocks + (b - first) * state, u_of(b - first));
    }
  }

  float* u_of(int64_t b) const { return writes + b * BLOCK_TOKENS * scan.block.value_width; }

  void fill_block(int64_t b) {
    scan.block.measure(order, begins[b], begins[b + 1] - begins[b]);
    scan.block.fill(order, begins[b]);
  }

  // z = (-dx, do) of the filled block.
  void solve_against_time(int64_t from) {
    const DeltaBlock& block = scan.block;
    const int64_t tokens = block.tokens, width = block.value_width;
    float* d_outputs = z + tokens * width;
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t c = padded(p.V); c < width; ++c) d_outputs[i * width + c] = 0;
      widen(do_rows.at(order.at(from + i)), do_rows.type, p.V, d_outputs + i * width);
    }
    multiply(block.k_out, block.key_width, tokens, d_states(), p.K, scan.panels(), rows_at(du, width));
    for (int64_t c = 0; c < width; c += LANES) {
      for (int64_t j = tokens; j-- > 0;) {
        vec sum = load(du + j * width + c);
        for (int64_t i = j; i < tokens; ++i) sum += broadcast(block.shown(i, j)) * load(d_outputs + i * width + c);
        for (int64_t i = j + 1; i < tokens; ++i) sum += broadcast(block.erased(i, j)) * load(z + i * width + c);
        store(z + j * width + c, -sum);
      }
    }
  }

  void block_gradient(int64_t from, float* before, float* u) {
    DeltaBlock& block = scan.block;
    const int64_t tokens = block.tokens, width = block.key_width, panels = scan.panels();
    const Panels S = state_at(before, p.K), of_z = rows_at(z, block.value_width), of_u = rows_at(u, block.value_width);
    solve_against_time(from);
    dots(of_z, 2 * tokens, of_u, tokens, panels, d_scores, BLOCK_TOKENS);
    dots(of_z, 2 * tokens, S, p.K, panels, by_state, width);
    dots(of_u, tokens, d_states(), p.K, panels, by_key, width);
    add_outer(d_states(), padded_rows(p.K), panels, block.whole, block.rest, block.reads, width, of_z, 2 * tokens);
    form_edge(S);
    for (int64_t i = 0; i < tokens; ++i) form_rows(i);
    for (int64_t i = 0; i < tokens; ++i) write_rows(from + i, i);
    block.enter(d_states(), panels);
  }

  float d_erased(int64_t i, int64_t j) const { return d_scores[i * BLOCK_TOKENS + j]; }
  float d_shown(int64_t i, int64_t j) const { return d_scores[(scan.block.tokens + i) * BLOCK_TOKENS + j]; }

  // <S, dL/dS> before the block, summed over columns.
  void form_edge(const Panels& S) {
    if (scan.block.gates == DeltaBlock::none) return;
    for (int64_t r = 0; r < p.K; ++r) {
      vec sum_of_row = {};
      for (int64_t c = 0; c < scan.panels(); ++c)
        for (int64_t i = 0; i < TILE; i += LANES) sum_of_row += load(S.at(r, c) + i) * load(d_states().at(r, c) + i);
      edge[r] = sum(sum_of_row);
    }
    for (int64_t r = p.K; r < scan.block.key_width; ++r) edge[r] = 0;
  }

  // dq, dk, de and the gates' terms of token i, from the columns that it reads and those that read it.
  void form_rows(int64_t i) {
    const DeltaBlock& block = scan.block;
    const int64_t tokens = block.tokens, width = block.key_width, row = i * width;
    const vec own = broadcast(d_shown(i, i)), scale = broadcast(p.scale[n.sequence]);
    for (int64_t c = 0; c < p.K; c += LANES) {
      vec erased = load(by_state + row + c), shown = load(by_state + (tokens + i) * width + c), written = {};
      for (int64_t j = 0; j < i; ++j) {
        const vec key = load(block.k_in + j * width + c);
        erased += broadcast(d_erased(i, j)) * key, shown += broadcast(d_shown(i, j)) * key;
      }
      for (int64_t j = i + 1; j < tokens; ++j) {
        written += broadcast(d_erased(j, i)) * load(block.reads + j * width + c);
        written += broadcast(d_shown(j, i)) * load(block.reads + (tokens + j) * width + c);
      }
      const vec decay = block.factor(block.products, i, c), q = load(block.q + row + c) * scale, k = load(block.k + row + c);
      const vec of_e = decay * erased, of_q = decay * shown;
      const vec of_k = block.factor(block.lasts, i, c) * load(by_key + row + c) + block.factor(block.inverses, i, c) * written;
      store(terms + row + c, q * of_q - k * of_k + load(block.e + row + c) * of_e);
      store(de + row + c, of_e), store(dq + row + c, of_q + own * k), store(dk + row + c, of_k + own * q);
    }
  }

  // Writes the gradients of token i of the block, which is `at` in the scan.
  void write_rows(int64_t at, int64_t i) {
    const DeltaBlock& block = scan.block;
    const int64_t t = order.at(at), row = i * block.key_width, value_row = i * block.value_width;
    vec of_scale = {}, of_beta = {};
    for (int64_t c = 0; c < p.K; c += LANES) {
      const vec d = load(dq + row + c);
      of_scale += load(block.q + row + c) * d;
      of_beta += load(de + row + c) * load(block.k + row + c);
      store(dq + row + c, d * broadcast(p.scale[n.sequence]));
      if (block.beta_rows.data) store(dk + row + c, load(dk + row + c) + broadcast(block.betas[i]) * load(de + row + c));
    }
    d_scale += double(sum(of_scale));
    for (int64_t c = 0; c < p.V; c += LANES) {
      const vec dx = -load(z + value_row + c), v = load(block.v + value_row + c);
      of_beta += dx * v;
      const vec factor = block.beta_rows.data     ? broadcast(block.betas[i])
                         : block.write_rows.data ? load(block.w + value_row + c)
                                                 : broadcast(1);
      store(du + value_row + c, dx * factor);
      if (d_write_out.data) store(scan.y + value_row + c, dx * v);
    }
    dq_out.write(dq + row, t), dk_out.write(dk + row, t), dv_out.write(du + value_row, t);
    if (d_erase_out.data) d_erase_out.write(de + row, t);
    if (d_write_out.data) d_write_out.write(scan.y + value_row, t);
    if (p.d_beta) p.d_beta[(n.example * p.T + t) * p.H + head] = sum(of_beta);
    write_gate(t, i, !order.fresh || at > 0);
  }

  // Writes the gradient of token i's gate, which is `edge`, and takes the token's terms off it. Gates without `effect` have a gradient
  // of 0.
  void write_gate(int64_t t, int64_t i, bool effect) {
    if (scan.block.gates == DeltaBlock::none) return;
    for (int64_t c = 0; c < p.K && !effect; ++c) edge[c] = 0;
    const float* own = terms + i * scan.block.key_width;
    if (d_key_out.data) d_key_out.write(edge, t);
    vec of_head = {};
    for (int64_t c = 0; c < p.K; c += LANES) {
      of_head += load(edge + c);
      store(edge + c, load(edge + c) - load(own + c));
    }
    const float whole = sum(of_head);
    d_constant += double(whole);
    if (p.d_head) p.d_head[(n.example * p.T + t) * p.H + head] = whole;
  }

  void run(int64_t h) {
    const int64_t state = h * p.K * p.V;
    const auto rows = [&](const Tensor& x, int64_t width) { return written_rows_of(p, x, n, h, 0, width); };
    const auto gate_rows = [&](float* x, int64_t width) { return gate_rows_of(p, x, n, h, width, 0, width); };
    head = h, d_scale = d_constant = 0;
    dq_out = rows(p.dq, p.K), dk_out = rows(p.dk, p.K), dv_out = rows(p.dv, p.V);
    d_key_out = gate_rows(p.d_key, p.K), d_erase_out = gate_rows(p.d_erase, p.K), d_write_out = gate_rows(p.d_write, p.V);
    do_rows = rows_of(p, p.d_output, n, h, 0, p.V);
    scan.block.begin(p, n, h, 0);
    // Columns behind the last key, which dots() does not write.
    __builtin_memset(by_state, 0, 2 * BLOCK_TOKENS * scan.block.key_width * 4);
    __builtin_memset(by_key, 0, BLOCK_TOKENS * scan.block.key_width * 4);
    load_state(n.initial ? n.initial + state : nullptr, p.V, p.K, p.V, scan.states());
    save_stretches();
    load_state(n.d_final ? n.d_final + state : nullptr, p.V, p.K, p.V, d_states());
    for (int64_t i = (order.length + DELTA_STRETCH - 1) / DELTA_STRETCH; i-- > 0;) run_stretch(i);
    if (n.d_initial) save_state(d_states(), p.V, p.K, p.V, n.d_initial + state);
    p.d_scale[n.index * p.H + h] = float(d_scale);
    if (p.d_constant) p.d_constant[n.index * p.H + h] = float(d_constant);
  }
};

inline bool delta_gradient(const Problem& p, const Segment& n, Heads heads, int64_t, int64_t, void* memory) {
  Scratch scratch{static_cast<char*>(memory)};
  DeltaGradient gradient(scratch, p, n, n.length);
  for (int64_t h = heads.first; h < heads.last; ++h) gradient.run(h);
  streams_end();
  return true;
}

// The scratch of a task, in bytes. longest: tokens of the longest sequence.
inline int64_t delta_scratch_bytes(const Problem& p, int64_t longest, bool gradient) {
  Scratch scratch{nullptr};
  if (gradient) {
    DeltaGradient(scratch, p, {}, longest);
  } else {
    DeltaScan scan;
    scan.allocate(scratch, p.K, p.V);
  }
  return scratch.used + 256;
}
