// One walk over the tokens of a sequence and head, which every kernel is made of: included once by each instruction set's file.
//
//     S_i = exp(row gate_i) S_{i-1} exp(column gate_i) + a_i x_i^T            y_i = S_i^T b_i          (or of S_i before its own a_i x_i^T)
//
// The forward has a = k, b = scale q, x = v, y = o; each gradient is this walk with other roles, some against time.
//
// With G_i the sum of log decays through token i since the state was last scaled, and P_i = e^G_i,
//
//     S'_i = S_i / P_i:        S'_i = S'_{i-1} + (a_i / P_i) (x_i / P_i)^T        y_i = P_i S'_i^T (b_i P_i)
//
// (each P on its own side) costs two multiply-adds for an element of the state and a token, whatever the gates. Before |G| passes a
// limit the state is scaled by P and G starts afresh; so a decay of any size, 0 too, meets the state itself, and nothing is clamped.
// Mild gates are summed over many tokens before one rounds to float32 beside 1, and no state is scaled but where G starts afresh: a
// factor next to 1 that a state meets again and again would round alike each time.
//
// Numbers are inflated by up to 1 / P = e^40, or shrunk by P. Where float32's range does not hold them so, |G| is at most 1: `sound` finds
// what overflowed, `is_faint` what would underflow. The bounds stand in glax/_src/kernels/common/limits.py.
//
// Tokens go by blocks, which end where the rows start afresh. Columns do so within a block, each tile for itself: no column's
// rounding depends on which others are walked with it.

constexpr int64_t DEPTH = 256;          // rows that are walked at a time
constexpr int64_t STRIDE = DEPTH + 16;  // of a and b in scratch: known to the compiler, and no multiple of a page

// Which state y_i is formed of: S_i, S_i without its own a_i x_i^T, or none, where only the last state is wanted.
enum class Sums { after, before, none };

// The registers' part: COUNT tokens over `depth` rows of WIDTH vectors of columns. Two multiply-adds an element and token;
// the state is read and written once for all tokens. Several rows go by without a branch: with one at each row, for lines to fetch,
// the same loop reaches three quarters of the multiply-adds' peak instead of nine tenths.
//   state: [depth, WIDTH vectors]   a, b: [COUNT, STRIDE]   x: [COUNT, TILE]   y: [COUNT, across]
template <int COUNT, int WIDTH, Sums SUMS, int SCALED>
inline void tile(float* state, int64_t depth, const float* a, const float* b, const float* x, float* y, int64_t across,
                 bool more, const float* row_entry, int64_t row_step, const float* column_entry, Ahead& ahead) {
  vec sums[COUNT][WIDTH];
#pragma GCC unroll 8
  for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 2
    for (int w = 0; w < WIDTH; ++w) sums[t][w] = more ? load(y + t * across + w * LANES) : vec{};
  vec added[COUNT][WIDTH];
#pragma GCC unroll 8
  for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 2
    for (int w = 0; w < WIDTH; ++w) added[t][w] = load(x + t * TILE + w * LANES);

  const auto row = [&](int64_t r) __attribute__((always_inline)) {
    vec s[WIDTH];
#pragma GCC unroll 2
    for (int w = 0; w < WIDTH; ++w) {
      s[w] = load(state + (r * WIDTH + w) * LANES);
      if (SCALED >= 1) s[w] *= all(row_entry[r * row_step]);
      if (SCALED >= 2) s[w] *= load(column_entry + w * LANES);
    }
#pragma GCC unroll 8
    for (int t = 0; t < COUNT; ++t) {
      const vec in = all(a[t * STRIDE + r]), out = all(b[t * STRIDE + r]);
#pragma GCC unroll 2
      for (int w = 0; w < WIDTH; ++w) {
        if (SUMS == Sums::before) sums[t][w] += out * s[w];
        s[w] += in * added[t][w];
        if (SUMS == Sums::after) sums[t][w] += out * s[w];
      }
    }
#pragma GCC unroll 2
    for (int w = 0; w < WIDTH; ++w) store(state + (r * WIDTH + w) * LANES, s[w]);
  };
  int64_t r = 0;
  for (; r + Ahead::rows <= depth; r += Ahead::rows) {
    ahead.fetch();
#pragma GCC unroll 4
    for (int64_t i = 0; i < Ahead::rows; ++i) row(r + i);
  }
  for (; r < depth; ++r) row(r);

#pragma GCC unroll 8
  for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 2
    for (int w = 0; w < WIDTH; ++w) store(y + t * across + w * LANES, sums[t][w]);
}

// Columns [first, first + width) of one sequence and head's state, and the walks over it.
struct Walk {
  Side rows, columns;
  int64_t block;
  float* state;             // [tiles, rows, TILE]
  float *a_block, *b_block; // [row parts, block, STRIDE]
  float* x_block;           // [tiles, block, TILE]
  float* y_block;           // [block, columns padded]
  float* own;               // [block]: a . b of each token
  float* terms;             // [columns padded], for who reads y
  float widest;             // |G| of rows, at most
  vec doubt;                // 0, or NaN in some lane once a y / P has overflowed
  Window a, b, x, z, more;  // z and more: rows that who reads y needs
  int64_t last_row, last;   // of the windows and of the block, once that is done
  Ahead ahead;

  // Which rows this pass reads, and which it writes.
  struct Operands {
    Rows a, b, x, z, more, written[2];
  } operands;

  int64_t across() const { return padded(columns.width); }
  int64_t tile_count() const { return (across() + TILE - 1) / TILE; }
  int64_t tile_width(int64_t i) const { return smallest(TILE, across() - i * TILE); }
  static int64_t smallest(int64_t x, int64_t y) { return x < y ? x : y; }

  void take(Scratch& scratch, int64_t tokens) {
    block = tokens;
    const int64_t parts = (rows.width + DEPTH - 1) / DEPTH, tiles = tile_count();
    rows.take(scratch, block), columns.take(scratch, block);
    a_block = scratch.floats(parts * block * STRIDE), b_block = scratch.floats(parts * block * STRIDE);
    x_block = scratch.floats(tiles * block * TILE), y_block = scratch.floats(block * across());
    own = scratch.floats(block);
    // Nine arrays at most; a line of the narrowest dtype holds 16 elements.
    const int64_t widest = rows.width > columns.width ? rows.width : columns.width;
    ahead.take(scratch, block * 9 * (widest / 16 + 1));
    terms = scratch.floats(across());
    a.take(scratch, block, rows.width), b.take(scratch, block, rows.width);
    x.take(scratch, block, columns.width), z.take(scratch, block, columns.width), more.take(scratch, block, columns.width);
    state = scratch.floats(tiles * rows.width * TILE);
  }

  // Another head's walk with the same shapes, by turns with this one: it shares all that does not outlive a block.
  void take_beside(Scratch& scratch, const Walk& other) {
    const Side by_row = rows, by_column = columns;
    *this = other;
    rows.gate = by_row.gate, columns.gate = by_column.gate;
    rows.take_own(scratch), columns.take_own(scratch);
    state = scratch.floats(tile_count() * rows.width * TILE);
  }

  float* place(int64_t r, int64_t c) {
    const int64_t i = c / TILE;
    return state + i * rows.width * TILE + r * tile_width(i) + c % TILE;
  }

  // The state from memory, zeros without one: element (r, c) at from[r * by_row + c * by_column].
  void begin(const float* from, int64_t by_row, int64_t by_column, float limit) {
    widest = rows.kind != Side::none && columns.kind != Side::none ? limit / 2 : limit;
    rows.begin(widest), columns.begin(widest), doubt = vec{};
    __builtin_memset(state, 0, state_size() * 4);
    if (!from) return;
    each_run([&](int64_t r, int64_t c, float* s, int64_t n) {
      const float* row = from + r * by_row + c * by_column;
      if (by_column == 1) __builtin_memcpy(s, row, n * 4);
      for (int64_t i = 0; by_column != 1 && i < n; ++i) s[i] = row[i * by_column];
    });
  }

  void end(float* to, int64_t by_row, int64_t by_column) {
    if (gated()) settle(state);
    rows.forget(), columns.forget();
    each_run([&](int64_t r, int64_t c, const float* s, int64_t n) {
      float* row = to + r * by_row + c * by_column;
      if (by_column == 1) __builtin_memcpy(row, s, n * 4);
      for (int64_t i = 0; by_column != 1 && i < n; ++i) row[i * by_column] = s[i];
    });
  }

  // use(r, c, s, n) for elements (r, c) to (r, c + n) of the state, which lie side by side from s on.
  template <class Use>
  void each_run(const Use& use) {
    for (int64_t i = 0; i < tile_count(); ++i) {
      const int64_t first = i * TILE, across = tile_width(i), width = smallest(across, columns.width - first);
      float* s = state + first * rows.width;
      for (int64_t r = 0; r < rows.width; ++r) use(r, first, s + r * across, width);
    }
  }

  int64_t state_size() const { return rows.width * across(); }

  bool gated() const { return rows.kind != Side::none || columns.kind != Side::none; }

  // The state itself, in the order of `state`: times the decays that it has not met yet.
  void settle(float* to) {
    rows.form_pending(), columns.form_pending();
    const Side::Factors by_row = rows.of_row(rows.pending), by_column = columns.of_row(columns.pending);
    for (int64_t i = 0; i < tile_count(); ++i)
      for (int64_t r = 0; r < rows.width; ++r) {
        const vec row = all(by_row.at(r));
        const int64_t at = place(r, i * TILE) - state;
        for (int64_t c = 0; c < tile_width(i); c += LANES)
          store(to + at + c, load(state + at + c) * row * by_column(i * TILE + c));
      }
  }

  // At the end: whether all that was inflated stayed in range.
  bool sound() const {
    vec wrong = doubt;
    for (int64_t i = 0; gated() && i < state_size(); i += LANES) wrong += load(state + i) * vec{};
    return !any(wrong != wrong);
  }

  void fill(const Order& order, int64_t from, int64_t tokens) {
    rows.fill(order, from, tokens), columns.fill(order, from, tokens);
    a.fill(operands.a, order, from, tokens), b.fill(operands.b, order, from, tokens), x.fill(operands.x, order, from, tokens);
    z.fill(operands.z, order, from, tokens), more.fill(operands.more, order, from, tokens, true);
  }

  // Has the rows that `next` needs of tokens [from, to) fetched while this state is multiplied.
  void look_ahead(const Walk& next, const Order& order, int64_t from, int64_t to) {
    const Operands& o = next.operands;
    ahead.next = ahead.last = ahead.lines;
    for (const Rows* rows : {&o.a, &o.b, &o.x, &o.z, &o.more, &next.rows.gate, &next.columns.gate, &o.written[0], &o.written[1]})
      if (!rows->streamed) ahead.add(*rows, order, from, smallest(to, order.length));
    ahead.spread((to - from) / TOKENS * tile_count() * (rows.width / Ahead::rows));
  }

  // Tokens [from, from + tokens) of the walk, a block at most. finish(j, w, t) is called for each: row j of y_block is its y, products
  // of the columns' gates included, row w of x, z and more are its own. Unless `last_enters`, the state ends without the last token's
  // own a x^T, until `enter_last`.
  template <Sums SUMS, class Finish>
  void run(const Order& order, int64_t from, int64_t tokens, const Finish& finish, bool last_enters) {
    if (SUMS != Sums::none && tokens > 0) rows.limit = is_faint(b.row(0)) ? widest * (limits::narrow / limits::wide) : widest;
    for (int64_t w = 0, n; w < tokens; w += n) {
      n = rows.advance(from + w, tokens - w);
      columns.advance_tiles(from + w, n);
      for (int64_t j = 0; j < n; ++j) gather<SUMS>(j, w + j, last_enters || from + w + j + 1 < order.length);
      for (int64_t c = 0; c < tile_count(); ++c) {
        if (tile_width(c) == TILE) {
          multiply<2, SUMS>(c, n);
        } else {
          multiply<1, SUMS>(c, n);
        }
      }
      for (int64_t j = 0; j < n; ++j) {
        float* y = y_block + j * across();
        if (columns.kind != Side::none) {
          const Side::Factors product = columns.product(j);
          for (int64_t c = 0; c < across(); c += LANES) {
            const vec inflated = load(y + c);
            doubt += inflated * vec{};
            store(y + c, inflated * product(c));
          }
        }
        finish(j, w + j, order.at(from + w + j));
      }
      last_row = w + n - 1, last = n - 1;
    }
  }

  // Whether a row of b times e^-40 would lose digits to underflow.
  bool is_faint(const Row& b_row) const {
    vec most = {};
    for (int64_t r = 0; rows.kind != Side::none && r < rows.width; r += LANES) {
      const vec x = b_row(r) * all(operands.b.factor);
      most = larger(most, larger(x, -x));
    }
    const vec faint = all(limits::faint);
    return any(most > vec{}) && !any(most >= faint);
  }

  void finish(const Order& order) { rows.finish(order), columns.finish(order); }

  // Behind `run`, before another head's.
  void enter_last() {
    const Operands& o = operands;
    const Row a_row = a.row(last_row), x_row = x.row(last_row);
    const Side::Factors row_inverse = rows.inverse(last), column_inverse = columns.inverse(last);
    for (int64_t i = 0; i < tile_count(); ++i)
      for (int64_t r = 0; r < rows.width; ++r)
        for (int64_t c = 0; c < tile_width(i); c += LANES) {
          float* s = place(r, i * TILE) + c;
          const vec in = x_row(i * TILE + c) * all(o.x.factor) * column_inverse(i * TILE + c);
          store(s, load(s) + all(a_row.at(r) * o.a.factor * row_inverse.at(r)) * in);
        }
  }

  // a / P, b P and x / P of row w of the window, to row j of the block; x is 0 if the token does not enter the state.
  template <Sums SUMS>
  void gather(int64_t j, int64_t w, bool enters) {
    const Operands& o = operands;
    const Row a_row = a.row(w), b_row = b.row(w), x_row = x.row(w);
    const vec a_factor = all(o.a.factor), b_factor = all(o.b.factor), x_factor = all(enters ? o.x.factor : 0);
    const Side::Factors row_inverse = rows.inverse(j), row_product = rows.product(j), column_inverse = columns.inverse(j);
    vec dot = {};
    for (int64_t first = 0; first < rows.width; first += DEPTH) {
      const int64_t to = (first / DEPTH * block + j) * STRIDE - first, end = smallest(first + DEPTH, rows.width);
      for (int64_t r = first; r < end; r += LANES) {
        const vec in = a_row(r) * a_factor;
        store(a_block + to + r, in * row_inverse(r));
        if (SUMS == Sums::none) continue;
        const vec out = b_row(r) * b_factor;
        store(b_block + to + r, out * row_product(r));
        if (SUMS == Sums::before) dot += in * out;
      }
    }
    if (SUMS == Sums::before) own[j] = sum(dot);
    for (int64_t tile = 0; tile < across(); tile += TILE) {
      float* const to = x_block + (tile / TILE * block + j) * TILE - tile;
      for (int64_t c = tile; c < smallest(tile + TILE, across()); c += LANES)
        store(to + c, x_row(c) * x_factor * column_inverse(c));
    }
  }

  template <int WIDTH, Sums SUMS>
  void multiply(int64_t c, int64_t tokens) {
    for (int64_t j = 0, next; j < tokens; j = next) {
      for (next = j + 1; next < tokens && !columns.starts(next, c);) ++next;
      int64_t done = columns.starts(j, c)        ? some<WIDTH, SUMS, 2>(c, j, next - j)
                     : j == 0 && rows.starts(0, 0) ? some<WIDTH, SUMS, 1>(c, j, next - j)
                                                   : 0;
      for (int64_t at = j + done; at < next; at += done) done = some<WIDTH, SUMS, 0>(c, at, next - at);
    }
  }

  template <int WIDTH, Sums SUMS, int SCALED>
  int64_t some(int64_t c, int64_t j, int64_t left) {
    if (left >= TOKENS) return part<TOKENS, WIDTH, SUMS, SCALED>(c, j);
    if (TOKENS > 4 && left >= 4) return part<4, WIDTH, SUMS, SCALED>(c, j);
    if (left >= 2) return part<2, WIDTH, SUMS, SCALED>(c, j);
    return part<1, WIDTH, SUMS, SCALED>(c, j);
  }

  template <int COUNT, int WIDTH, Sums SUMS, int SCALED>
  int64_t part(int64_t c, int64_t j) {
    static const float one[LANES] = {1};
    const bool by_row = j == 0 && rows.starts(0, 0);
    const float* row_entry = by_row ? rows.entries : one;
    const int64_t row_step = by_row && rows.kind == Side::channel;
    float column_entry[TILE];
    if (SCALED == 2)
      for (int64_t w = 0; w < tile_width(c); w += LANES)
        store(column_entry + w, columns.of_row(columns.entries + j * columns.across())(c * TILE + w));
    for (int64_t r = 0; r < rows.width; r += DEPTH) {
      const int64_t from = (r / DEPTH * block + j) * STRIDE;
      tile<COUNT, WIDTH, SUMS, SCALED>(place(r, c * TILE), smallest(DEPTH, rows.width - r), a_block + from, b_block + from,
                                            x_block + (c * block + j) * TILE, y_block + j * across() + c * TILE, across(),
                                            r > 0, row_entry + r * row_step, row_step, column_entry, ahead);
    }
    return COUNT;
  }
};

// Heads that share a task are walked side by side, a block of each in turn: a token's rows lie side by side in memory, in the same
// pages and in neighbouring sets of the caches, but a head's own rows are a whole row of all heads apart.
// finish(h, j, w, t) as in Walk::run; done(h) once head h's walk is at its end.
template <Sums SUMS, class WalkOf, class Finish, class Done>
inline void walk_side_by_side(int64_t heads, WalkOf& walk_of, const Order& order, bool last_enters, const Finish& finish,
                              const Done& done) {
  int64_t from = 0, tokens;
  do {
    tokens = Walk::smallest(walk_of(0).block, order.length - from);
    for (int64_t h = 0; h < heads; ++h) {
      Walk& walk = walk_of(h);
      walk.fill(order, from, tokens);
      const int64_t next = h + 1 < heads ? from : from + tokens;
      walk.look_ahead(walk_of((h + 1) % heads), order, next, next + walk.block);
      walk.template run<SUMS>(order, from, tokens, [&](int64_t j, int64_t w, int64_t t) { finish(h, j, w, t); }, last_enters);
      if (from + tokens < order.length) continue;
      walk.finish(order);
      done(h);
    }
    from += tokens;
  } while (from < order.length);
}
