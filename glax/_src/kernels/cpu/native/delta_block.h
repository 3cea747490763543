// A block of tokens of the delta rule: its rows, its decays, and the scores between its tokens.
//
//     S_bar_i = exp(gate_i) S_{i-1}        u_i = w_i v_i - S_bar_i^T e_i        S_i = S_bar_i + k_i u_i^T        o_i = scale * S_i^T q_i
//
// With S the state before the block, G_i the sum of log decays from the block's first token through token i, and P_i = e^G_i,
//
//     u_i = w_i v_i - S^T (e_i P_i) - sum_{j < i} L_ij u_j        L_ij = (e_i P_i) . (k_j / P_j)
//     o_i = S^T (q_i P_i) + sum_{j <= i} M_ij u_j                 M_ij = (q_i P_i) . (k_j / P_j)
//     S'  = P_last S + sum_j (k_j P_last / P_j) u_j^T
//
// The u_i follow one after the other, so that no inverse is formed. A block ends before |G| would exceed DECAY_LIMIT in any channel. A
// block whose first gate alone exceeds it begins with the state times e^gate, which may be 0, and with G = 0: no gate is clamped.
// The limit leaves 1e25 on either side of e^30 for the products of q, k and e, and keeps the rounding error of G below 2e-6.

constexpr int64_t BLOCK_TOKENS = 16;
constexpr float DECAY_LIMIT = 30;

struct DeltaBlock {
  enum Gates { none, scalar, channel } gates = none;
  int64_t K, V, key_width, value_width;   // widths padded to panels
  int64_t tokens = 0;
  bool enters = false;                    // whether the state is first scaled by `entry`
  RowView gate, q_rows, k_rows, v_rows, beta_rows, erase_rows, write_rows;
  float *sums;                            // [tokens, key_width]: G; a scalar fills the first element
  float *products, *inverses, *lasts;     // [tokens, key_width]: P, 1 / P, P_last / P; a scalar fills the first element
  float *entry, *whole, *rest;            // [key_width]: the factor of the state before the block, P_last = whole + rest
  float *q, *k, *e;                       // [tokens, key_width]; q is without the scale
  float *v, *w, *values;                  // [tokens, value_width]; values = w v
  float *reads;                           // [2 tokens, key_width]: e P, then scale q P
  float *k_in, *k_out;                    // [tokens, key_width]: k / P, k P_last / P
  float *scores;                          // [2 tokens, BLOCK_TOKENS]: L, then M; entries at j > i mean nothing
  float betas[BLOCK_TOKENS];

  void allocate(Scratch& scratch, int64_t keys, int64_t values_here) {
    K = keys, V = values_here, key_width = paneled(K), value_width = paneled(V);
    // Tiles of dots() read and write up to 3 rows more.
    for (float** rows : {&sums, &products, &inverses, &lasts, &q, &k, &e, &k_in, &k_out})
      *rows = scratch.floats((BLOCK_TOKENS + 3) * key_width);
    for (float** rows : {&v, &w, &values}) *rows = scratch.floats((BLOCK_TOKENS + 3) * value_width);
    for (float** row : {&entry, &whole, &rest}) *row = scratch.floats(key_width);
    reads = scratch.floats((2 * BLOCK_TOKENS + 3) * key_width), scores = scratch.floats((2 * BLOCK_TOKENS + 3) * BLOCK_TOKENS);
  }

  // Sets the rows of head h: columns [first, first + V) of the values.
  void begin(const Problem& p, const Segment& n, int64_t h, int64_t first) {
    q_rows = rows_of(p, p.q, n, h, 0, K, p.scale[n.sequence]), k_rows = rows_of(p, p.k, n, h, 0, K);
    v_rows = rows_of(p, p.v, n, h, first, V), beta_rows = rows_of(p, p.beta, n, h, 0, 1);
    erase_rows = rows_of(p, p.erase, n, h, 0, K), write_rows = rows_of(p, p.write, n, h, first, V);
    const DecayAccumulator side = accumulator_of(p, true, n, h, 0, K);
    gate = side.gate, gates = side.kind == DecayAccumulator::none ? none : side.kind == DecayAccumulator::scalar ? scalar : channel;
    // The padding of rows stays zero; so does the padding of a state's factors.
    for (float* rows : {q, k, e, k_in, k_out}) __builtin_memset(rows, 0, BLOCK_TOKENS * key_width * 4);
    __builtin_memset(reads, 0, 2 * BLOCK_TOKENS * key_width * 4);
    for (float* rows : {v, w, values}) __builtin_memset(rows, 0, BLOCK_TOKENS * value_width * 4);
    for (float* row : {entry, whole, rest}) __builtin_memset(row, 0, key_width * 4);
  }

  int64_t gate_width() const { return gates == channel ? padded(K) : LANES; }

  // Sums the gates of a block that begins at token `from` of the scan, and sets how many of at most `most` tokens it takes.
  void measure(const Order& order, int64_t from, int64_t most) {
    enters = false;
    tokens = most < BLOCK_TOKENS ? most : BLOCK_TOKENS;
    if (gates == none) return;
    for (int64_t j = 0; j < tokens; ++j) {
      float* row = sums + j * key_width;
      widen(gate.at(order.at(from + j)), gate.type, gate.width, row);
      // The gates of a token that resets the state have no effect, whatever they hold.
      if (order.fresh && from + j == 0) __builtin_memset(row, 0, gate_width() * 4);
      if (gates == scalar) store(row, broadcast(row[0]));
      if (extend(row, j)) continue;
      if (j > 0) {
        tokens = j;
        return;
      }
      enters = true;
      for (int64_t c = 0; c < gate_width(); c += LANES) store(entry + c, exponential(load(row + c))), store(row + c, vec{});
    }
  }

  // Adds the sum before token j to its gates. Returns whether every |G| is within the limit.
  bool extend(float* row, int64_t j) const {
    vec low = {}, high = {};
    for (int64_t c = 0; c < gate_width(); c += LANES) {
      const vec sum = j == 0 ? load(row + c) : load(row + c - key_width) + load(row + c);
      low = minimum(sum, low), high = maximum(sum, high);
      store(row + c, sum);
    }
    return !any((low < broadcast(-DECAY_LIMIT)) | (high > broadcast(DECAY_LIMIT)));
  }

  // Forms P and its quotients, and the factors of the state.
  void form_decays() {
    const float* last = sums + (tokens - 1) * key_width;
    for (int64_t j = 0; j < tokens && gates != none; ++j) {
      for (int64_t c = 0; c < gate_width(); c += LANES) {
        const int64_t i = j * key_width + c;
        const vec sum = load(sums + i);
        store(products + i, exponential_of_small(sum)), store(inverses + i, exponential_of_small(-sum));
        store(lasts + i, exponential_of_small(load(last + c) - sum));
      }
    }
    if (gates == none) {
      for (int64_t c = 0; c < K; ++c) whole[c] = 1;
      return;
    }
    for (int64_t c = 0; c < gate_width(); c += LANES) split_decay(load(last + c), whole + c, rest + c);
    if (gates == channel) {
      for (int64_t c = K; c < padded(K); ++c) whole[c] = rest[c] = 0;
    } else {
      const float factor = whole[0], small = rest[0], of_entry = entry[0];
      for (int64_t c = 0; c < key_width; ++c) whole[c] = factor, rest[c] = small, entry[c] = of_entry;
    }
  }

  // The factor of token j, channels [c, c + LANES), out of `products`, `inverses` or `lasts`.
  vec factor(const float* factors, int64_t j, int64_t c) const {
    if (gates == none) return broadcast(1);
    return gates == channel ? load(factors + j * key_width + c) : broadcast(factors[j * key_width]);
  }

  // Reads the rows of the measured block and multiplies them by their decays.
  void fill(const Order& order, int64_t from) {
    form_decays();
    for (int64_t j = 0; j < tokens; ++j) {
      const int64_t t = order.at(from + j), row = j * key_width, value_row = j * value_width;
      widen(q_rows.at(t), q_rows.type, K, q + row), widen(k_rows.at(t), k_rows.type, K, k + row);
      widen(v_rows.at(t), v_rows.type, V, v + value_row);
      if (beta_rows.data) {
        float beta[LANES] = {};
        widen(beta_rows.at(t), beta_rows.type, 1, beta);
        betas[j] = beta[0];
        for (int64_t c = 0; c < K; c += LANES) store(e + row + c, broadcast(betas[j]) * load(k + row + c));
        for (int64_t c = 0; c < V; c += LANES) store(values + value_row + c, broadcast(betas[j]) * load(v + value_row + c));
      } else {
        widen(erase_rows.at(t), erase_rows.type, K, e + row);
        if (write_rows.data) widen(write_rows.at(t), write_rows.type, V, w + value_row);
        for (int64_t c = 0; c < V; c += LANES) {
          const vec x = load(v + value_row + c);
          store(values + value_row + c, write_rows.data ? x * load(w + value_row + c) : x);
        }
      }
      const vec scale = broadcast(q_rows.factor);
      for (int64_t c = 0; c < K; c += LANES) {
        const vec decay = factor(products, j, c), scaled = scale * load(q + row + c), key = load(k + row + c);
        store(reads + row + c, decay * load(e + row + c));
        store(reads + (tokens + j) * key_width + c, decay * scaled);
        store(k_in + row + c, key * factor(inverses, j, c)), store(k_out + row + c, key * factor(lasts, j, c));
      }
    }
    dots(rows_at(reads, key_width), 2 * tokens, rows_at(k_in, key_width), tokens, key_width / TILE, scores, BLOCK_TOKENS);
  }

  float erased(int64_t i, int64_t j) const { return scores[i * BLOCK_TOKENS + j]; }             // L_ij
  float shown(int64_t i, int64_t j) const { return scores[(tokens + i) * BLOCK_TOKENS + j]; }   // M_ij

  // Scales the state where the block begins with a gate beyond the limit.
  void enter(const Panels& state, int64_t panels) const {
    for (int64_t c = 0; enters && c < panels; ++c)
      for (int64_t r = 0; r < K; ++r)
        for (int64_t i = 0; i < TILE; i += LANES) store(state.at(r, c) + i, load(state.at(r, c) + i) * broadcast(entry[r]));
  }

  // u [tokens, value_width] from y = S^T (e P).
  void solve(const float* y, float* u) const {
    for (int64_t c = 0; c < value_width; c += LANES) {
      for (int64_t i = 0; i < tokens; ++i) {
        vec sum = load(values + i * value_width + c) - load(y + i * value_width + c);
        for (int64_t j = 0; j < i; ++j) sum -= broadcast(erased(i, j)) * load(u + j * value_width + c);
        store(u + i * value_width + c, sum);
      }
    }
  }

  // The state after the block.
  void advance(const Panels& state, float* u) const {
    add_outer(state, padded_rows(K), value_width / TILE, whole, rest, k_out, key_width, rows_at(u, value_width), tokens);
  }
};

// Copies columns [first, first + V) of a state [K, all] into panels, or zeros if `from` is null.
inline void load_state(const float* from, int64_t all, int64_t K, int64_t V, const Panels& state) {
  const int64_t panels = paneled(V) / TILE;
  __builtin_memset(state.data, 0, panels * state.panel * 4);
  for (int64_t c = 0; from && c < panels; ++c)
    for (int64_t r = 0; r < K; ++r)
      __builtin_memcpy(state.at(r, c), from + r * all + c * TILE, (V - c * TILE < TILE ? V - c * TILE : TILE) * 4);
}

inline void save_state(const Panels& state, int64_t all, int64_t K, int64_t V, float* to) {
  for (int64_t c = 0; c * TILE < V; ++c)
    for (int64_t r = 0; r < K; ++r)
      __builtin_memcpy(to + r * all + c * TILE, state.at(r, c), (V - c * TILE < TILE ? V - c * TILE : TILE) * 4);
}
