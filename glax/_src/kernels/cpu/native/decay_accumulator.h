// Accumulates the log decays of one side of the state (rows or columns): G = sum of logs, P = e^G. scan.h has the formulas.

constexpr int64_t TILE = 2 * LANES;  // columns of a register tile

// The log decays of the state's rows or columns since the state was last scaled.
struct DecayAccumulator {
  enum Kind { none, scalar, channel } kind = none;
  int64_t width;    // of the state on this side
  RowView gate;     // logarithms, of width 1 for a scalar
  float limit;      // of |G|
  Window logs;      // [block, across]: the gate before each token of the scan, from token `window` on
  int64_t window;
  int64_t ungated;  // tokens of the window before the scan's first gate, 0 or 1
  float* zeros;     // [across]: the gate of that token
  float* sums;      // [block, across]: G, rounded to float32
  float* rests;     // [block, across]: the rounding error of sums. Together G is exact to 2^-40 and P to 2 ulp, after any number of tokens
  float* products;  // [block, across]: P
  float* inverses;  // [block, across]: 1 / P
  float* entries;   // [block, across]: the factor of the state where G restarts
  float* carry;     // [across]: G before the block; after the last block, G not yet applied to the state
  float* rest;      // [across]: the rounding error of carry
  float* pending;   // [across]: P of carry, to recover the state
  bool* restarts;   // [block, tiles]: where G of a tile of columns restarts; only [0] for rows
  bool no_restarts;  // whether G restarted at most at the first token of the previous block

  int64_t across() const { return kind == scalar ? LANES : padded(width); }
  int64_t tiles() const { return (across() + TILE - 1) / TILE; }

  void allocate(Scratch& scratch, int64_t block) {
    logs.allocate(scratch, block, across());
    zeros = scratch.floats(across());
    for (float** rows : {&sums, &rests, &products, &inverses, &entries}) *rows = scratch.floats(block * across());
    restarts = reinterpret_cast<bool*>(scratch.floats(block * tiles()));
    pending = scratch.floats(across());
    allocate_own(scratch);
  }
  // Allocates what outlives a block.
  void allocate_own(Scratch& scratch) { carry = scratch.floats(across()), rest = scratch.floats(across()); }

  void begin(float largest) {
    limit = largest, no_restarts = true, reset();
    for (int64_t c = 0; c < across(); ++c) zeros[c] = 0;
  }
  void reset() {
    for (int64_t c = 0; c < across(); ++c) carry[c] = rest[c] = 0;
  }

  // Reads the gates before tokens [from, from + tokens) of the scan.
  void fill(const Order& order, int64_t from, int64_t tokens) {
    if (kind == none) return;
    window = from, ungated = (order.late || order.fresh) && from == 0;
    logs.fill(gate, order, from - order.late, tokens, true, ungated);
    if (kind == scalar)
      for (int64_t j = ungated; j < tokens; ++j) store(logs.copies + j * across(), broadcast(logs.row(j).at(0)));
  }
  const float* log(int64_t w) const { return w < ungated ? zeros : logs.row(w).floats(); }

  const float* sums_before(int64_t j) const { return j == 0 ? carry : sums + (j - 1) * across(); }

  // Adds token i of the scan, j of its block, to G of channels [first, last). Returns false if some |G| exceeds `most`: the caller then
  // discards the row.
  bool extend(int64_t i, int64_t j, int64_t first, int64_t last, float most) {
    const float *gates = log(i - window), *before = sums_before(j);
    const float* rest_before = j == 0 ? rest : rests + (j - 1) * across();
    vec low = {}, high = {};
    for (int64_t c = first; c < last; c += LANES) {
      const vec x = load(before + c), y = load(gates + c), sum = x + y, added = sum - x;
      low = minimum(sum, low), high = maximum(sum, high);
      store(sums + j * across() + c, sum);
      store(rests + j * across() + c, load(rest_before + c) + ((x - (sum - added)) + (y - added)));
    }
    return !any((low < broadcast(-most)) | (high > broadcast(most)));
  }

  // After `extend` returned false: saves e^G as the factor of the state and sets G to 0.
  void restart(int64_t j, int64_t first, int64_t last) {
    for (int64_t c = j * across() + first; c < j * across() + last; c += LANES) {
      const vec rounded = exponential(load(sums + c)), taken = load(rests + c);
      // The rounding error within a block is up to 5e-5. A gate of -inf makes it NaN.
      store(entries + c, rounded + rounded * choose(taken == taken, taken, vec{}));
      store(sums + c, vec{}), store(rests + c, vec{});
    }
  }

  // Moves what float32 can hold of the rounding error `taken` into `sum`. The errors of equal gates have one sign: without this step they
  // would grow with the number of tokens until they lost digits themselves.
  static void renormalize(vec& sum, vec& taken) {
    const vec whole = sum + taken;
    taken += sum - whole, sum = whole;
  }

  // Computes P and 1 / P of token j of a block, from G of channels [c, c + LANES) and its rounding error.
  void form(int64_t j, int64_t c, vec sum, vec taken) {
    const vec rounded = exponential_of_small(sum), decay = rounded + rounded * taken;
    store(products + j * across() + c, decay), store(inverses + j * across() + c, reciprocal(decay));
  }

  // Computes P for a whole block in one loop: the latencies of the exponentials overlap.
  void form_products(int64_t tokens) {
    for (int64_t j = 0; j < tokens; ++j)
      for (int64_t c = 0; c < across(); c += LANES) form(j, c, load(sums + j * across() + c), load(rests + j * across() + c));
    for (int64_t c = 0; c < across(); c += LANES) {
      vec sum = load(sums + (tokens - 1) * across() + c), taken = load(rests + (tokens - 1) * across() + c);
      renormalize(sum, taken);
      store(carry + c, sum), store(rest + c, taken);
    }
  }

  // Extends G by all tokens of a block after its first, token i of the scan, and computes P, with the sums in registers. Returns false if
  // some |G| exceeds the limit: the caller then discards the result and extends token by token.
  bool extend_and_form_products(int64_t i, int64_t tokens) {
    vec low = {}, high = {};
    for (int64_t c = 0; c < across(); c += LANES) {
      vec sum = load(sums + c), taken = load(rests + c);
      form(0, c, sum, taken);
      for (int64_t j = 1; j < tokens; ++j) {
        const vec x = sum, y = load(logs.row(i + j - window).floats() + c);
        sum = x + y;
        const vec added = sum - x;
        taken += (x - (sum - added)) + (y - added);
        low = minimum(sum, low), high = maximum(sum, high);
        form(j, c, sum, taken);
      }
      renormalize(sum, taken);
      store(carry + c, sum), store(rest + c, taken);
    }
    return !any((low < broadcast(-limit)) | (high > broadcast(limit)));
  }

  // For rows: returns how many of the scan's tokens [i, i + tokens) the block takes. The first token may use half of the limit, which
  // leaves room for the others.
  int64_t advance(int64_t i, int64_t tokens) {
    if (kind == none) return tokens;
    restarts[0] = !extend(i, 0, 0, across(), limit / 2);
    if (restarts[0]) restart(0, 0, across());
    if (no_restarts && extend_and_form_products(i, tokens)) return tokens;
    int64_t n = 1;
    while (n < tokens && extend(i + n, n, 0, across(), limit)) ++n;
    form_products(n);
    no_restarts = n == tokens;
    return n;
  }

  // For columns: computes P of the block's tokens, each tile with its own restarts.
  void advance_tiles(int64_t i, int64_t tokens) {
    if (kind == none) return;
    bool still = true;
    for (int64_t j = 0; j < tokens; ++j) {
      const float most = j == 0 ? limit / 2 : limit;
      const bool in_range = extend(i + j, j, 0, across(), most);
      for (int64_t tile = 0; tile < tiles(); ++tile) {
        const int64_t first = tile * TILE, last = first + TILE < across() ? first + TILE : across();
        bool& restarts_at = restarts[j * tiles() + tile];
        restarts_at = !in_range && !extend(i + j, j, first, last, most);
        if (restarts_at) restart(j, first, last);
      }
      if (j > 0) {
        still = still && in_range;
      } else if (no_restarts && extend_and_form_products(i, tokens)) {
        __builtin_memset(restarts + tiles(), false, (tokens - 1) * tiles());
        return;
      }
    }
    form_products(tokens);
    no_restarts = still;
  }

  bool restarts_at(int64_t j, int64_t tile) const { return kind != none && restarts[j * tiles() + (kind == scalar ? 0 : tile)]; }

  // total [across] += the gate before row w of the window, in float64, since a segment's decay sums over all of its tokens.
  void add_to(double* total, int64_t w) const {
    if (kind == none) return;
    const float* gates = log(w);
    for (int64_t c = 0; c < across(); ++c) total[c] += double(gates[c]);
  }

  // After the last block: adds the gate of the last token where decays apply after the step.
  void finish(const Order& order) {
    if (kind == none || !order.late || order.length == 0) return;
    fill(order, order.length, 1);
    for (int64_t c = 0; c < across(); c += LANES) {
      const vec x = load(carry + c), y = load(log(0) + c), sum = x + y, added = sum - x;
      const vec taken = load(rest + c) + ((x - (sum - added)) + (y - added));
      store(carry + c, sum), store(rest + c, choose(taken == taken, taken, vec{}));  // a gate of -inf makes it NaN
    }
  }

  // Computes P of the decay not yet applied to the state.
  void form_pending() {
    for (int64_t c = 0; kind != none && c < across(); c += LANES) {
      const vec rounded = exponential(load(carry + c));
      store(pending + c, rounded + rounded * load(rest + c));
    }
  }

  // A factor for each channel, or one for all channels.
  struct Factors {
    const float* row;
    int64_t step;  // floats from channel to channel, 1 or 0

    vec operator()(int64_t c) const { return load(row + c * step); }
    float at(int64_t c) const { return row[c * step]; }
  };
  Factors product(int64_t j) const { return of_row(products + j * across()); }
  Factors inverse(int64_t j) const { return of_row(inverses + j * across()); }
  Factors of_row(const float* row) const {
    static const vec one = broadcast(1);
    return kind == none ? Factors{reinterpret_cast<const float*>(&one), 0} : Factors{row, kind == channel};
  }
};
