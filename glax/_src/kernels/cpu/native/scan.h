// The scan over the tokens of a sequence and head, which every kernel is built from. Each instruction set's file includes this one.
//
//     S_i = exp(row gate_i) S_{i-1} exp(column gate_i) + a_i x_i^T            y_i = S_i^T b_i          (or of S_i before its own a_i x_i^T)
//
// The forward has a = k, b = scale q, x = v, y = o. Each gradient is the same scan with other operands, some against time.
//
// With G_i the sum of log decays through token i since the state was last scaled, and P_i = e^G_i,
//
//     S'_i = S_i / P_i:        S'_i = S'_{i-1} + (a_i / P_i) (x_i / P_i)^T        y_i = P_i S'_i^T (b_i P_i)
//
// where rows and columns each have their own P. This costs two multiply-adds for each token and element of the state, with any gates.
// Before |G| exceeds a limit, the state is scaled by P and G restarts from 0. The decay that triggers a restart, which may be e^-inf = 0,
// scales the state directly, so that no gate is clamped. The state is scaled at restarts only: with mild gates one factor covers many
// tokens, whereas a factor next to 1 at every token would have the same rounding error each time.
//
// Values are divided by P (up to e^40) or multiplied by it. Where float32's range is too small for that, the limit of |G| is 1:
// `in_range` detects overflow, `is_faint` predicts underflow. glax/_src/kernels/common/limits.py derives the bounds.
//
// A block of tokens ends where the rows restart. Columns restart within a block, each tile independently: the rounding of a column does
// not depend on the other columns of its task.

// A scan over a range of columns of the state of one sequence and head.
struct Scan {
  DecayAccumulator rows, columns;
  int64_t block;
  float* state;             // [tiles, rows, TILE]
  float *a_block, *b_block; // [row parts, block, STRIDE]
  float* x_block;           // [tiles, block, TILE]
  float* y_block;           // [block, columns padded]
  float* own;               // [block]: a . b of each token
  float* terms;             // [columns padded]: scratch for the consumer of y
  float widest;             // the limit of |G|
  vec overflow;             // 0, or NaN in some lane once a y / P has overflowed
  Window a, b, x, z, more;  // z and more: rows for the consumer of y
  int64_t last_row, last;   // the last token's row in the windows and in the block
  Prefetcher prefetcher;

  // The rows that this pass reads and writes.
  struct Operands {
    RowView a, b, x, z, more, written[2];
  } operands;

  int64_t across() const { return padded(columns.width); }
  int64_t tile_count() const { return (across() + TILE - 1) / TILE; }
  int64_t tile_width(int64_t i) const { return smallest(TILE, across() - i * TILE); }
  static int64_t smallest(int64_t x, int64_t y) { return x < y ? x : y; }

  void allocate(Scratch& scratch, int64_t tokens) {
    block = tokens;
    const int64_t parts = (rows.width + DEPTH - 1) / DEPTH, tiles = tile_count();
    rows.allocate(scratch, block), columns.allocate(scratch, block);
    a_block = scratch.floats(parts * block * STRIDE), b_block = scratch.floats(parts * block * STRIDE);
    x_block = scratch.floats(tiles * block * TILE), y_block = scratch.floats(block * across());
    own = scratch.floats(block);
    // Nine arrays at most; a line of the narrowest dtype holds 16 elements.
    const int64_t widest = rows.width > columns.width ? rows.width : columns.width;
    prefetcher.allocate(scratch, block * 9 * (widest / 16 + 1));
    terms = scratch.floats(across());
    a.allocate(scratch, block, rows.width), b.allocate(scratch, block, rows.width);
    x.allocate(scratch, block, columns.width), z.allocate(scratch, block, columns.width), more.allocate(scratch, block, columns.width);
    state = scratch.floats(tiles * rows.width * TILE);
  }

  // Allocates the scan of another head with the same shapes, which alternates with this one: both share what does not outlive a block.
  void allocate_sharing(Scratch& scratch, const Scan& other) {
    const DecayAccumulator by_row = rows, by_column = columns;
    *this = other;
    rows.gate = by_row.gate, columns.gate = by_column.gate;
    rows.allocate_own(scratch), columns.allocate_own(scratch);
    state = scratch.floats(tile_count() * rows.width * TILE);
  }

  float* place(int64_t r, int64_t c) {
    const int64_t i = c / TILE;
    return state + i * rows.width * TILE + r * tile_width(i) + c % TILE;
  }

  // Loads the state, or zeros if `from` is null: element (r, c) is from[r * by_row + c * by_column].
  void begin(const float* from, int64_t by_row, int64_t by_column, float limit) {
    widest = rows.kind != DecayAccumulator::none && columns.kind != DecayAccumulator::none ? limit / 2 : limit;
    rows.begin(widest), columns.begin(widest), overflow = vec{};
    __builtin_memset(state, 0, state_size() * 4);
    if (!from) return;
    for_each_run([&](int64_t r, int64_t c, float* s, int64_t n) {
      const float* row = from + r * by_row + c * by_column;
      if (by_column == 1) __builtin_memcpy(s, row, n * 4);
      for (int64_t i = 0; by_column != 1 && i < n; ++i) s[i] = row[i * by_column];
    });
  }

  // Applies the remaining decay and stores the state: element (r, c) to to[r * by_row + c * by_column].
  void end(float* to, int64_t by_row, int64_t by_column) {
    if (gated()) apply_decay(state);
    rows.reset(), columns.reset();
    for_each_run([&](int64_t r, int64_t c, const float* s, int64_t n) {
      float* row = to + r * by_row + c * by_column;
      if (by_column == 1) __builtin_memcpy(row, s, n * 4);
      for (int64_t i = 0; by_column != 1 && i < n; ++i) row[i * by_column] = s[i];
    });
  }

  // Calls use(r, c, s, n) for each contiguous run s [n] of the state, elements (r, c) to (r, c + n).
  template <class Use>
  void for_each_run(const Use& use) {
    for (int64_t i = 0; i < tile_count(); ++i) {
      const int64_t first = i * TILE, across = tile_width(i), width = smallest(across, columns.width - first);
      float* s = state + first * rows.width;
      for (int64_t r = 0; r < rows.width; ++r) use(r, first, s + r * across, width);
    }
  }

  int64_t state_size() const { return rows.width * across(); }

  bool gated() const { return rows.kind != DecayAccumulator::none || columns.kind != DecayAccumulator::none; }

  // Writes the state times the decays not yet applied to it, in the layout of `state`.
  void apply_decay(float* to) {
    rows.form_pending(), columns.form_pending();
    const DecayAccumulator::Factors by_row = rows.of_row(rows.pending), by_column = columns.of_row(columns.pending);
    for (int64_t i = 0; i < tile_count(); ++i)
      for (int64_t r = 0; r < rows.width; ++r) {
        const vec row = broadcast(by_row.at(r));
        const int64_t at = place(r, i * TILE) - state;
        for (int64_t c = 0; c < tile_width(i); c += LANES)
          store(to + at + c, load(state + at + c) * row * by_column(i * TILE + c));
      }
  }

  // At the end of a scan: returns whether every value divided by its decay stayed in float32's range.
  bool in_range() const {
    vec wrong = overflow;
    for (int64_t i = 0; gated() && i < state_size(); i += LANES) wrong += load(state + i) * vec{};
    return !any(wrong != wrong);
  }

  // Reads the gates and rows of tokens [from, from + tokens) of the scan.
  void fill(const Order& order, int64_t from, int64_t tokens) {
    rows.fill(order, from, tokens), columns.fill(order, from, tokens);
    a.fill(operands.a, order, from, tokens), b.fill(operands.b, order, from, tokens), x.fill(operands.x, order, from, tokens);
    z.fill(operands.z, order, from, tokens), more.fill(operands.more, order, from, tokens, true);
  }

  // Schedules the rows that `next` reads at tokens [from, to), to be prefetched while this state is multiplied.
  void prefetch(const Scan& next, const Order& order, int64_t from, int64_t to) {
    const Operands& o = next.operands;
    prefetcher.next = prefetcher.last = prefetcher.lines;
    for (const RowView* rows : {&o.a, &o.b, &o.x, &o.z, &o.more, &next.rows.gate, &next.columns.gate, &o.written[0], &o.written[1]})
      if (!rows->streamed) prefetcher.add(*rows, order, from, smallest(to, order.length));
    prefetcher.schedule((to - from) / TOKENS * tile_count() * (rows.width / Prefetcher::rows));
  }

  // Runs tokens [from, from + tokens) of the scan, at most a block. Calls finish(j, w, t) for each token t: row j of y_block is its y, with
  // the columns' decays applied; row w of x, z and more belongs to it. Without `add_last` the state lacks the last token's a x^T until
  // `add_last_token`.
  template <Sums SUMS, class Finish>
  void run(const Order& order, int64_t from, int64_t tokens, const Finish& finish, bool add_last) {
    if (SUMS != Sums::none && tokens > 0) rows.limit = is_faint(b.row(0)) ? widest * (limits::narrow / limits::wide) : widest;
    for (int64_t w = 0, n; w < tokens; w += n) {
      n = rows.advance(from + w, tokens - w);
      columns.advance_tiles(from + w, n);
      for (int64_t j = 0; j < n; ++j) scale_operands<SUMS>(j, w + j, add_last || from + w + j + 1 < order.length);
      for (int64_t c = 0; c < tile_count(); ++c) {
        if (tile_width(c) == TILE) {
          multiply<2, SUMS>(c, n);
        } else {
          multiply<1, SUMS>(c, n);
        }
      }
      for (int64_t j = 0; j < n; ++j) {
        float* y = y_block + j * across();
        if (columns.kind != DecayAccumulator::none) {
          const DecayAccumulator::Factors product = columns.product(j);
          for (int64_t c = 0; c < across(); c += LANES) {
            const vec inflated = load(y + c);
            overflow += inflated * vec{};
            store(y + c, inflated * product(c));
          }
        }
        finish(j, w + j, order.at(from + w + j));
      }
      last_row = w + n - 1, last = n - 1;
    }
  }

  // Whether multiplying a row of b by e^-40 loses digits to underflow.
  bool is_faint(const Row& b_row) const {
    vec most = {};
    for (int64_t r = 0; rows.kind != DecayAccumulator::none && r < rows.width; r += LANES) {
      const vec x = b_row(r) * broadcast(operands.b.factor);
      most = maximum(most, maximum(x, -x));
    }
    const vec faint = broadcast(limits::faint);
    return any(most > vec{}) && !any(most >= faint);
  }

  void finish(const Order& order) { rows.finish(order), columns.finish(order); }

  // Adds the last token's a x^T to the state. Called after `run`, before the scan of another head.
  void add_last_token() {
    const Operands& o = operands;
    const Row a_row = a.row(last_row), x_row = x.row(last_row);
    const DecayAccumulator::Factors row_inverse = rows.inverse(last), column_inverse = columns.inverse(last);
    for (int64_t i = 0; i < tile_count(); ++i)
      for (int64_t r = 0; r < rows.width; ++r)
        for (int64_t c = 0; c < tile_width(i); c += LANES) {
          float* s = place(r, i * TILE) + c;
          const vec in = x_row(i * TILE + c) * broadcast(o.x.factor) * column_inverse(i * TILE + c);
          store(s, load(s) + broadcast(a_row.at(r) * o.a.factor * row_inverse.at(r)) * in);
        }
  }

  // Scales row w of the windows to row j of the block: a / P, b P and x / P. x is 0 if the token is not added to the state.
  template <Sums SUMS>
  void scale_operands(int64_t j, int64_t w, bool added) {
    const Operands& o = operands;
    const Row a_row = a.row(w), b_row = b.row(w), x_row = x.row(w);
    const vec a_factor = broadcast(o.a.factor), b_factor = broadcast(o.b.factor), x_factor = broadcast(added ? o.x.factor : 0);
    const DecayAccumulator::Factors row_inverse = rows.inverse(j), row_product = rows.product(j), column_inverse = columns.inverse(j);
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

  // Multiplies tile c of the state with a block of tokens, split where the columns restart.
  template <int WIDTH, Sums SUMS>
  void multiply(int64_t c, int64_t tokens) {
    for (int64_t j = 0, next; j < tokens; j = next) {
      for (next = j + 1; next < tokens && !columns.restarts_at(next, c);) ++next;
      int64_t done = columns.restarts_at(j, c)        ? multiply_tokens<WIDTH, SUMS, 2>(c, j, next - j)
                     : j == 0 && rows.restarts_at(0, 0) ? multiply_tokens<WIDTH, SUMS, 1>(c, j, next - j)
                                                   : 0;
      for (int64_t at = j + done; at < next; at += done) done = multiply_tokens<WIDTH, SUMS, 0>(c, at, next - at);
    }
  }

  // Multiplies as many tokens as registers hold, at most `left`, and returns how many.
  // SCALED: 0 without a factor of the state, 1 with row factors, 2 with row and column factors.
  template <int WIDTH, Sums SUMS, int SCALED>
  int64_t multiply_tokens(int64_t c, int64_t j, int64_t left) {
    if (left >= TOKENS) return multiply_rows<TOKENS, WIDTH, SUMS, SCALED>(c, j);
    if (TOKENS > 4 && left >= 4) return multiply_rows<4, WIDTH, SUMS, SCALED>(c, j);
    if (left >= 2) return multiply_rows<2, WIDTH, SUMS, SCALED>(c, j);
    return multiply_rows<1, WIDTH, SUMS, SCALED>(c, j);
  }

  // Multiplies COUNT tokens from token j of the block on with all rows of tile c.
  template <int COUNT, int WIDTH, Sums SUMS, int SCALED>
  int64_t multiply_rows(int64_t c, int64_t j) {
    static const float one[LANES] = {1};
    const bool by_row = j == 0 && rows.restarts_at(0, 0);
    const float* row_entry = by_row ? rows.entries : one;
    const int64_t row_step = by_row && rows.kind == DecayAccumulator::channel;
    float column_entry[TILE];
    if (SCALED == 2)
      for (int64_t w = 0; w < tile_width(c); w += LANES)
        store(column_entry + w, columns.of_row(columns.entries + j * columns.across())(c * TILE + w));
    for (int64_t r = 0; r < rows.width; r += DEPTH) {
      const int64_t from = (r / DEPTH * block + j) * STRIDE;
      multiply_tile<COUNT, WIDTH, SUMS, SCALED>(place(r, c * TILE), smallest(DEPTH, rows.width - r), a_block + from, b_block + from,
                                            x_block + (c * block + j) * TILE, y_block + j * across() + c * TILE, across(),
                                            r > 0, row_entry + r * row_step, row_step, column_entry, prefetcher);
    }
    return COUNT;
  }
};

// Scans the heads of a task together, one block of each in turn. The rows of a token are contiguous over heads and share pages and cache
// sets; the rows of one head are a row of all heads apart.
// finish(h, j, w, t) is as in Scan::run. done(h) is called at the end of head h's scan.
template <Sums SUMS, class ScanOf, class Finish, class Done>
inline void scan_together(int64_t heads, ScanOf& scan_of, const Order& order, bool add_last, const Finish& finish,
                              const Done& done) {
  int64_t from = 0, tokens;
  do {
    tokens = Scan::smallest(scan_of(0).block, order.length - from);
    for (int64_t h = 0; h < heads; ++h) {
      Scan& scan = scan_of(h);
      scan.fill(order, from, tokens);
      const int64_t next = h + 1 < heads ? from : from + tokens;
      scan.prefetch(scan_of((h + 1) % heads), order, next, next + scan.block);
      scan.template run<SUMS>(order, from, tokens, [&](int64_t j, int64_t w, int64_t t) { finish(h, j, w, t); }, add_last);
      if (from + tokens < order.length) continue;
      scan.finish(order);
      done(h);
    }
    from += tokens;
  } while (from < order.length);
}
