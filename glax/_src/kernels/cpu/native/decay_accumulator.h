// The gate of one side of the state: the sums of its logarithms, and the decays that they stand for. walk.h has the formulas.

constexpr int64_t TILE = 2 * LANES;  // columns that are walked at a time, their sums in registers

// The gate of the state's rows or columns, and the decays since the state was last scaled.
struct Side {
  enum Kind { none, scalar, channel } kind = none;
  int64_t width;    // of the state on this side
  Rows gate;        // logarithms, of width 1 for a scalar
  float limit;      // of |G|
  Window logs;      // [block, across]: before each token of the walk, from `window` on
  int64_t window;
  int64_t ungated;  // tokens of the window before the walk's first gate, none or one
  float* zeros;     // [across]: that one's
  float* sums;      // [block, across]: G, rounded; what rounding took is in ...
  float* rests;     // [block, across]: ... so that G is good to 2^-40, and P to an ulp or two, after any number of tokens
  float* products;  // [block, across]: P
  float* inverses;  // [block, across]: 1 / P
  float* entries;   // [block, across]: what the state is scaled by where G starts afresh
  float* carry;     // [across]: G before the block; behind the last one, G that the state has yet to meet
  float* rest;      // [across]: of carry
  float* pending;   // [across]: P of carry, for whoever needs the state itself
  bool* fresh;      // [block, tiles]: where G of the columns starts afresh; [0] for rows
  bool calm;        // whether G started afresh nowhere but at the first token of the block before

  int64_t across() const { return kind == scalar ? LANES : padded(width); }
  int64_t tiles() const { return (across() + TILE - 1) / TILE; }

  void take(Scratch& scratch, int64_t block) {
    logs.take(scratch, block, across());
    zeros = scratch.floats(across());
    for (float** rows : {&sums, &rests, &products, &inverses, &entries}) *rows = scratch.floats(block * across());
    fresh = reinterpret_cast<bool*>(scratch.floats(block * tiles()));
    pending = scratch.floats(across());
    take_own(scratch);
  }
  // What outlives a block.
  void take_own(Scratch& scratch) { carry = scratch.floats(across()), rest = scratch.floats(across()); }

  void begin(float largest) {
    limit = largest, calm = true, forget();
    for (int64_t c = 0; c < across(); ++c) zeros[c] = 0;
  }
  void forget() {
    for (int64_t c = 0; c < across(); ++c) carry[c] = rest[c] = 0;
  }

  // The gates before the walk's tokens [from, from + tokens).
  void fill(const Order& order, int64_t from, int64_t tokens) {
    if (kind == none) return;
    window = from, ungated = order.late && from == 0;
    logs.fill(gate, order, from - order.late, tokens, true, ungated);
    if (kind == scalar)
      for (int64_t j = ungated; j < tokens; ++j) store(logs.copies + j * across(), all(logs.row(j).at(0)));
  }
  const float* log(int64_t w) const { return w < ungated ? zeros : logs.row(w).floats(); }

  const float* sums_before(int64_t j) const { return j == 0 ? carry : sums + (j - 1) * across(); }

  // Adds token i of the walk, j of its block, to G of channels [first, last). False if one would pass `most`: nothing is done.
  bool extend(int64_t i, int64_t j, int64_t first, int64_t last, float most) {
    const float *gates = log(i - window), *before = sums_before(j);
    const float* rest_before = j == 0 ? rest : rests + (j - 1) * across();
    vec low = {}, high = {};
    for (int64_t c = first; c < last; c += LANES) {
      const vec x = load(before + c), y = load(gates + c), sum = x + y, added = sum - x;
      low = smaller(sum, low), high = larger(sum, high);
      store(sums + j * across() + c, sum);
      store(rests + j * across() + c, load(rest_before + c) + ((x - (sum - added)) + (y - added)));
    }
    return !any((low < all(-most)) | (high > all(most)));
  }

  // Behind an `extend` that returned false: the state meets all decays up to here, and G starts afresh.
  void restart(int64_t j, int64_t first, int64_t last) {
    for (int64_t c = j * across() + first; c < j * across() + last; c += LANES) {
      const vec rounded = exponential(load(sums + c)), taken = load(rests + c);
      // Within a block 5e-5 may have been taken. -inf leaves no number there.
      store(entries + c, rounded + rounded * choose(taken == taken, taken, vec{}));
      store(sums + c, vec{}), store(rests + c, vec{});
    }
  }

  // G in two parts, as far apart as float32 allows. Rests of equal gates have one sign: unless they join the sum at each block, they
  // grow with the number of tokens until they round as the sum did.
  static void part(vec& sum, vec& taken) {
    const vec whole = sum + taken;
    taken += sum - whole, sum = whole;
  }

  // P of token j of a block, from G of channels [c, c + LANES) and what rounding took of it.
  void form(int64_t j, int64_t c, vec sum, vec taken) {
    const vec rounded = exponential_of_small(sum), decay = rounded + rounded * taken;
    store(products + j * across() + c, decay), store(inverses + j * across() + c, reciprocal(decay));
  }

  // P of a block: all at once, since an exponential takes long but many overlap.
  void close(int64_t tokens) {
    for (int64_t j = 0; j < tokens; ++j)
      for (int64_t c = 0; c < across(); c += LANES) form(j, c, load(sums + j * across() + c), load(rests + j * across() + c));
    for (int64_t c = 0; c < across(); c += LANES) {
      vec sum = load(sums + (tokens - 1) * across() + c), taken = load(rests + (tokens - 1) * across() + c);
      part(sum, taken);
      store(carry + c, sum), store(rest + c, taken);
    }
  }

  // `extend` for all tokens of a block behind its first, token i of the walk, and `close`, with the sums in registers. False if one
  // passes the limit: nothing of it counts, and they are to be extended by one after the other.
  bool close_with_all(int64_t i, int64_t tokens) {
    vec low = {}, high = {};
    for (int64_t c = 0; c < across(); c += LANES) {
      vec sum = load(sums + c), taken = load(rests + c);
      form(0, c, sum, taken);
      for (int64_t j = 1; j < tokens; ++j) {
        const vec x = sum, y = load(logs.row(i + j - window).floats() + c);
        sum = x + y;
        const vec added = sum - x;
        taken += (x - (sum - added)) + (y - added);
        low = smaller(sum, low), high = larger(sum, high);
        form(j, c, sum, taken);
      }
      part(sum, taken);
      store(carry + c, sum), store(rest + c, taken);
    }
    return !any((low < all(-limit)) | (high > all(limit)));
  }

  // As the gate of rows: how many of the walk's tokens [i, i + tokens) the block takes. Its first may use half of the limit, so that
  // its others have room too.
  int64_t advance(int64_t i, int64_t tokens) {
    if (kind == none) return tokens;
    fresh[0] = !extend(i, 0, 0, across(), limit / 2);
    if (fresh[0]) restart(0, 0, across());
    if (calm && close_with_all(i, tokens)) return tokens;
    int64_t n = 1;
    while (n < tokens && extend(i + n, n, 0, across(), limit)) ++n;
    close(n);
    calm = n == tokens;
    return n;
  }

  // As the gate of columns, for that block.
  void advance_tiles(int64_t i, int64_t tokens) {
    if (kind == none) return;
    bool still = true;
    for (int64_t j = 0; j < tokens; ++j) {
      const float most = j == 0 ? limit / 2 : limit;
      const bool within = extend(i + j, j, 0, across(), most);
      for (int64_t tile = 0; tile < tiles(); ++tile) {
        const int64_t first = tile * TILE, last = first + TILE < across() ? first + TILE : across();
        bool& starts = fresh[j * tiles() + tile];
        starts = !within && !extend(i + j, j, first, last, most);
        if (starts) restart(j, first, last);
      }
      if (j > 0) {
        still = still && within;
      } else if (calm && close_with_all(i, tokens)) {
        __builtin_memset(fresh + tiles(), false, (tokens - 1) * tiles());
        return;
      }
    }
    close(tokens);
    calm = still;
  }

  bool starts(int64_t j, int64_t tile) const { return kind != none && fresh[j * tiles() + (kind == scalar ? 0 : tile)]; }

  // total [across] += the gate before row w of the window. In float64: a segment's decay is that of all its tokens.
  void add_to(double* total, int64_t w) const {
    if (kind == none) return;
    const float* gates = log(w);
    for (int64_t c = 0; c < across(); ++c) total[c] += double(gates[c]);
  }

  // After the last block: the decay of the last token too, where decays come late.
  void finish(const Order& order) {
    if (kind == none || !order.late || order.length == 0) return;
    fill(order, order.length, 1);
    for (int64_t c = 0; c < across(); c += LANES) {
      const vec x = load(carry + c), y = load(log(0) + c), sum = x + y, added = sum - x;
      const vec taken = load(rest + c) + ((x - (sum - added)) + (y - added));
      store(carry + c, sum), store(rest + c, choose(taken == taken, taken, vec{}));  // -inf leaves no number there
    }
  }

  // P of what the state has yet to meet.
  void form_pending() {
    for (int64_t c = 0; kind != none && c < across(); c += LANES) {
      const vec rounded = exponential(load(carry + c));
      store(pending + c, rounded + rounded * load(rest + c));
    }
  }

  // What stands at channel c of a row, or at every channel.
  struct Factors {
    const float* row;
    int64_t step;  // floats from channel to channel, 1 or 0

    vec operator()(int64_t c) const { return load(row + c * step); }
    float at(int64_t c) const { return row[c * step]; }
  };
  Factors product(int64_t j) const { return of_row(products + j * across()); }
  Factors inverse(int64_t j) const { return of_row(inverses + j * across()); }
  Factors of_row(const float* row) const {
    static const vec one = all(1);
    return kind == none ? Factors{reinterpret_cast<const float*>(&one), 0} : Factors{row, kind == channel};
  }
};
