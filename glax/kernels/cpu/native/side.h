// The gate of one side of the state: the sums of its logarithms, and the decays that they stand for. walk.h has the formulas.

constexpr int64_t TILE = 2 * LANES;  // columns that are walked at a time, their sums in registers

// The gate of the state's rows or columns, and the decays since the state was last scaled.
struct Side {
  enum Kind { none, scalar, channel } kind = none;
  int64_t width;    // of the state on this side
  Rows gate;        // logarithms, of width 1 for a scalar
  float limit;      // of |G|
  int64_t window;   // the walk's token whose gate is row 0 of logs
  float* logs;      // [block, across]: before each token of the window
  float* sums;      // [block, across]: G, rounded; what rounding took is in ...
  float* rests;     // [block, across]: ... so that G is good to 2^-48, and P to an ulp or two, after any number of tokens
  float* products;  // [block, across]: P
  float* inverses;  // [block, across]: 1 / P
  float* entries;   // [block, across]: what the state is scaled by where G starts afresh
  float* carry;     // [across]: G before the block; behind the last one, P, which the state has yet to meet
  float* rest;      // [across]: of carry
  bool* fresh;      // [block, tiles]: where G of the columns starts afresh; [0] for rows

  int64_t across() const { return kind == scalar ? LANES : padded(width); }
  int64_t tiles() const { return (across() + TILE - 1) / TILE; }

  void take(Scratch& scratch, int64_t block) {
    for (float** rows : {&logs, &sums, &rests, &products, &inverses, &entries}) *rows = scratch.floats(block * across());
    fresh = reinterpret_cast<bool*>(scratch.floats(block * tiles()));
    take_own(scratch);
  }
  // What outlives a block.
  void take_own(Scratch& scratch) { carry = scratch.floats(across()), rest = scratch.floats(across()); }

  void begin(float largest) { limit = largest, forget(); }
  void forget() {
    for (int64_t c = 0; c < across(); ++c) carry[c] = rest[c] = 0;
  }

  // The gates before the walk's tokens [from, from + tokens).
  void fill(const Order& order, int64_t from, int64_t tokens) {
    if (kind == none) return;
    window = from;
    for (int64_t j = 0; j < tokens; ++j) {
      float* row = logs + j * across();
      const int64_t i = from + j - order.late;
      if (i < 0) {
        for (int64_t c = 0; c < across(); c += LANES) store(row + c, vec{});
        continue;
      }
      widen(gate.at(order.at(i)), gate.type, gate.width, row);
      if (kind == scalar) store(row, all(row[0]));
    }
  }

  const float* sums_before(int64_t j) const { return j == 0 ? carry : sums + (j - 1) * across(); }

  // Adds token i of the walk, j of its block, to G of channels [first, last). False if one would pass `most`: nothing is done.
  bool extend(int64_t i, int64_t j, int64_t first, int64_t last, float most) {
    const float *log = logs + (i - window) * across(), *before = sums_before(j);
    const float* rest_before = j == 0 ? rest : rests + (j - 1) * across();
    vec low = {}, high = {};
    for (int64_t c = first; c < last; c += LANES) {
      const vec x = load(before + c), y = load(log + c), sum = x + y, added = sum - x;
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
      // After 400 tokens of one gate 5e-5 may have been taken. -inf leaves no number there.
      store(entries + c, rounded + rounded * choose(taken == taken, taken, vec{}));
      store(sums + c, vec{}), store(rests + c, vec{});
    }
  }

  // P of a block: all at once, since an exponential takes long but many overlap.
  void close(int64_t tokens) {
    if (kind == none) return;
    for (int64_t c = 0; c < tokens * across(); c += LANES) {
      const vec rounded = exponential_of_small(load(sums + c)), decay = rounded + rounded * load(rests + c);
      store(products + c, decay), store(inverses + c, all(1) / decay);
    }
    __builtin_memcpy(carry, sums + (tokens - 1) * across(), across() * 4);
    __builtin_memcpy(rest, rests + (tokens - 1) * across(), across() * 4);
  }

  // A block's first token may use half of the limit, so that its others have room too.
  float most(int64_t j) const { return j == 0 ? limit / 2 : limit; }

  // As the gate of rows: false if the block ends before this token.
  bool advance(int64_t i, int64_t j) {
    if (kind == none) return true;
    const bool within = extend(i, j, 0, across(), most(j));
    if (j > 0) return within;
    fresh[0] = !within;
    if (!within) restart(j, 0, across());
    return true;
  }

  // As the gate of columns.
  void advance_tiles(int64_t i, int64_t j) {
    if (kind == none) return;
    const bool within = extend(i, j, 0, across(), most(j));
    for (int64_t tile = 0; tile < tiles(); ++tile) {
      const int64_t first = tile * TILE, last = first + TILE < across() ? first + TILE : across();
      bool& starts = fresh[j * tiles() + tile];
      starts = !within && !extend(i, j, first, last, most(j));
      if (starts) restart(j, first, last);
    }
  }

  bool starts(int64_t j, int64_t tile) const { return kind != none && fresh[j * tiles() + (kind == scalar ? 0 : tile)]; }

  // total [across] += the gate before row w of the window.
  void add_to(float* total, int64_t w) const {
    if (kind == none) return;
    for (int64_t c = 0; c < across(); c += LANES) store(total + c, load(total + c) + load(logs + w * across() + c));
  }

  // After the last block: the decay of the last token too, where decays come late.
  void finish(const Order& order) {
    if (kind == none) return;
    const bool last = order.late && order.length > 0;
    if (last) fill(order, order.length, 1);
    for (int64_t c = 0; c < across(); c += LANES) {
      const vec rounded = exponential(last ? load(carry + c) + load(logs + c) : load(carry + c));
      store(carry + c, rounded + rounded * load(rest + c));
    }
  }

  vec of(const float* across_row, int64_t c) const {
    return kind == none ? all(1) : kind == scalar ? load(across_row) : load(across_row + c);
  }
  vec product(int64_t j, int64_t c) const { return of(products + j * across(), c); }
  vec inverse(int64_t j, int64_t c) const { return of(inverses + j * across(), c); }
};
