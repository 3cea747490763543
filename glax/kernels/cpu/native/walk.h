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
// Mild gates are summed over many tokens before one rounds to float32 beside 1.
//
// Tokens go by blocks, which end where the rows start afresh. Columns do so within a block, each tile for itself: no column's
// rounding depends on which others are walked with it.

constexpr int64_t TILE = 2 * LANES;       // columns that are walked at a time, their sums in registers
constexpr int64_t DEPTH = 256;            // rows that are walked at a time
constexpr int64_t STRIDE = DEPTH + 16;    // of a and b in scratch: known to the compiler, and no multiple of a page
constexpr float LIMIT = 40;               // of |G|: e^40 times e^40 leaves room for factors of any sane size in float32

// A row of memory a token.
struct Rows {
  char* data = nullptr;  // at token 0
  int64_t stride = 0;    // bytes from token to token
  Type type = Type::f32;
  int64_t width = 0;
  float factor = 1;

  char* at(int64_t t) const { return data + t * stride; }
};

struct Order {
  int64_t first, length, step;  // token i of the walk is first + i * step
  bool late;                    // a token's decay comes after its own step, as in the recurrences of gradients

  int64_t at(int64_t i) const { return first + i * step; }
  Order part(int64_t from, int64_t to) const { return {at(from), to - from, step, late}; }
  Order backwards() const { return {at(length - 1), length, -step, true}; }
};

// Memory is handed out once a task; nothing is given back. Without memory it only counts.
struct Scratch {
  char* memory;
  int64_t used = 0;

  float* floats(int64_t count) {
    const int64_t here = used;
    used += (count * 4 + 63) / 64 * 64;
#ifdef __SANITIZE_ADDRESS__  // a gap behind each array, that nobody may touch
    used += 64;
    if (memory) ASAN_UNPOISON_MEMORY_REGION(memory + here, used - here);
    if (memory) ASAN_POISON_MEMORY_REGION(memory + here + count * 4, used - here - count * 4);
#endif
    return memory ? reinterpret_cast<float*>(memory + here) : nullptr;
  }
};

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
    carry = scratch.floats(across()), rest = scratch.floats(across());
    fresh = reinterpret_cast<bool*>(scratch.floats(block * tiles()));
  }

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
    const ivec outside = (low < all(-most)) | (high > all(most));
    bool within = true;
    for (int l = 0; l < LANES; ++l) within &= !outside[l];
    return within;
  }

  // The same where G starts afresh: the state meets all decays up to here.
  void restart(int64_t i, int64_t j, int64_t first, int64_t last) {
    const float *log = logs + (i - window) * across(), *before = sums_before(j);
    for (int64_t c = first; c < last; c += LANES) {
      store(entries + j * across() + c, exponential(load(before + c) + load(log + c)));
      store(sums + j * across() + c, vec{}), store(rests + j * across() + c, vec{});
    }
  }

  // P of a block: all at once, since an exponential takes long but many overlap.
  void close(int64_t tokens) {
    if (kind == none) return;
    for (int64_t c = 0; c < tokens * across(); c += LANES) {
      const vec rounded = exponential(load(sums + c)), decay = rounded + rounded * load(rests + c);
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
    if (!within) restart(i, j, 0, across());
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
      if (starts) restart(i, j, first, last);
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

// The rows of a window of tokens, widened and side by side: read from memory in a loop so tight that its waits overlap.
struct Window {
  float* copies;  // [block, across]
  int64_t across;

  void take(Scratch& scratch, int64_t block, int64_t width) {
    across = padded(width);
    copies = scratch.floats(block * across);
  }

  void fill(const Rows& rows, const Order& order, int64_t from, int64_t tokens) {
    if (rows.data)
      for (int64_t j = 0; j < tokens; ++j) widen(rows.at(order.at(from + j)), rows.type, rows.width, copies + j * across);
  }

  const float* row(int64_t j) const { return copies + j * across; }
};

// Cache lines that the next block needs. Rows lie apart by all heads' width, often by a page, which is further than a processor
// guesses by itself; so lines are fetched one by one while the registers' part computes, and spread over all of it, for each
// must wait its turn at the memory.
struct Ahead {
  const char** lines;  // null-terminated by `last`
  const char **next, **last;
  int64_t mask;  // a line is fetched at each row of the state whose number has none of these bits

  void add(const Rows& row, int64_t t) {
    if (!row.data) return;
    const char* at = row.at(t);
    for (int64_t byte = 0; byte < row.width * (row.type == Type::f32 ? 4 : 2); byte += 64) *last++ = at + byte;
  }
};

// Which state y_i is formed of: S_i, S_i without its own a_i x_i^T, or none, where only the last state is wanted.
enum class Sums { after, before, none };

// The registers' part: COUNT tokens over `depth` rows of WIDTH vectors of columns. Two multiply-adds an element and token;
// the state is read and written once for all tokens.
//   state: [depth, WIDTH vectors]   a, b: [COUNT, STRIDE]   x: [COUNT, TILE]   y: [COUNT, across]
template <int COUNT, int WIDTH, Sums SUMS, int SCALED>
inline void tile(float* state, int64_t depth, const float* a, const float* b, const float* x, float* y, int64_t across,
                 bool more, const float* row_entry, int64_t row_step, const float* column_entry, Ahead& ahead) {
  const char **line = ahead.next, **const last_line = ahead.last;
  const int64_t mask = ahead.mask;
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
  for (int64_t r = 0; r < depth; ++r) {
    if ((r & mask) == 0) {
      __builtin_prefetch(*line, 0, 3);
      line += line < last_line;
    }
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
  }
  ahead.next = line;
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
  Window a, b, x, z, more;  // z and more: rows that who reads y needs
  int64_t last_row;         // of the windows, once the walk is done
  Ahead ahead;

  int64_t across() const { return padded(columns.width); }
  int64_t tile_count() const { return (across() + TILE - 1) / TILE; }
  int64_t tile_width(int64_t i) const { return smallest(TILE, across() - i * TILE); }
  static int64_t smallest(int64_t x, int64_t y) { return x < y ? x : y; }

  void take(Scratch& scratch, int64_t tokens) {
    block = tokens;
    const int64_t parts = (rows.width + DEPTH - 1) / DEPTH, tiles = tile_count();
    rows.take(scratch, block), columns.take(scratch, block);
    state = scratch.floats(tiles * rows.width * TILE);
    a_block = scratch.floats(parts * block * STRIDE), b_block = scratch.floats(parts * block * STRIDE);
    x_block = scratch.floats(tiles * block * TILE), y_block = scratch.floats(block * across());
    own = scratch.floats(block);
    // Nine arrays at most; a pointer is two floats, a line of the narrowest dtype holds 16 elements.
    const int64_t widest = rows.width > columns.width ? rows.width : columns.width;
    ahead.lines = reinterpret_cast<const char**>(scratch.floats(2 * (block * 9 * (widest / 16 + 1) + 1)));
    terms = scratch.floats(across());
    a.take(scratch, block, rows.width), b.take(scratch, block, rows.width);
    x.take(scratch, block, columns.width), z.take(scratch, block, columns.width), more.take(scratch, block, columns.width);
  }

  float* place(int64_t r, int64_t c) {
    const int64_t i = c / TILE;
    return state + i * rows.width * TILE + r * tile_width(i) + c % TILE;
  }

  // The state from memory, zeros without one: element (r, c) at from[r * by_row + c * by_column].
  void begin(const float* from, int64_t by_row, int64_t by_column) {
    const float limit = rows.kind != Side::none && columns.kind != Side::none ? LIMIT / 2 : LIMIT;
    rows.begin(limit), columns.begin(limit);
    for (int64_t i = 0; i < tile_count(); ++i)
      for (int64_t r = 0; r < rows.width; ++r) {
        float* to = place(r, i * TILE);
        const int64_t own = smallest(tile_width(i), columns.width - i * TILE);
        for (int64_t c = 0; c < tile_width(i); ++c) to[c] = from && c < own ? from[r * by_row + (i * TILE + c) * by_column] : 0;
      }
  }

  int64_t state_size() const { return rows.width * across(); }

  // The state times the decays that it has not met yet, which `finish` leaves in carry.
  void settle() {
    if (rows.kind == Side::none && columns.kind == Side::none) return;
    for (int64_t i = 0; i < tile_count(); ++i)
      for (int64_t r = 0; r < rows.width; ++r) {
        const vec by_row = all(rows.kind == Side::none ? 1 : rows.carry[rows.kind == Side::scalar ? 0 : r]);
        float* s = place(r, i * TILE);
        for (int64_t c = 0; c < tile_width(i); c += LANES)
          store(s + c, load(s + c) * by_row * columns.of(columns.carry, i * TILE + c));
      }
    rows.forget(), columns.forget();
  }

  void end(float* to, int64_t by_row, int64_t by_column) {
    for (int64_t r = 0; r < rows.width; ++r)
      for (int64_t c = 0; c < columns.width; ++c) to[r * by_row + c * by_column] = *place(r, c);
  }

  // Which rows a walk reads, and which it writes.
  struct Operands {
    Rows a, b, x, z, more, written[2];
  };

  void fill(const Order& order, const Operands& rows_of, int64_t from, int64_t tokens) {
    rows.fill(order, from, tokens), columns.fill(order, from, tokens);
    a.fill(rows_of.a, order, from, tokens), b.fill(rows_of.b, order, from, tokens), x.fill(rows_of.x, order, from, tokens);
    z.fill(rows_of.z, order, from, tokens), more.fill(rows_of.more, order, from, tokens);
  }

  // Has the rows of tokens [from, to) fetched while the state is multiplied.
  void look_ahead(const Order& order, const Operands& o, int64_t from, int64_t to) {
    ahead.next = ahead.last = ahead.lines;
    for (int64_t i = from; i < smallest(to, order.length); ++i)
      for (const Rows* row : {&o.a, &o.b, &o.x, &o.z, &o.more, &o.written[0], &o.written[1], &gate_of(rows), &gate_of(columns)})
        ahead.add(*row, order.at(i));
    *ahead.last = nullptr;
    const int64_t visits = (to - from) / TOKENS * tile_count() * rows.width;
    for (ahead.mask = 0; visits / (2 * ahead.mask + 2) >= ahead.last - ahead.lines && ahead.mask < 15;) ahead.mask = 2 * ahead.mask + 1;
  }
  static const Rows& gate_of(const Side& side) { return side.gate; }

  // finish(j, w, t) is called for each token: row j of y_block is its y, products of the columns' gates included, row w of x, z and
  // more are its own. Unless `last_enters`, the state ends without the last token's own a x^T, until `enter_last`.
  template <Sums SUMS, class Finish>
  void run(const Order& order, const Operands& operands, const Finish& finish, bool last_enters = true) {
    for (int64_t from = 0, tokens; from < order.length; from += tokens) {
      tokens = smallest(block, order.length - from);
      fill(order, operands, from, tokens);
      look_ahead(order, operands, from + tokens, from + tokens + block);
      for (int64_t w = 0, n; w < tokens; w += n) {
        for (n = 0; w + n < tokens; ++n) {
          const int64_t i = from + w + n;
          if (!rows.advance(i, n)) break;
          columns.advance_tiles(i, n);
        }
        rows.close(n), columns.close(n);
        for (int64_t j = 0; j < n; ++j) gather<SUMS>(j, w + j, operands, last_enters || from + w + j + 1 < order.length);
        for (int64_t c = 0; c < tile_count(); ++c) {
          if (tile_width(c) == TILE) {
            multiply<2, SUMS>(c, n);
          } else {
            multiply<1, SUMS>(c, n);
          }
        }
        for (int64_t j = 0; j < n; ++j) {
          float* y = y_block + j * across();
          if (columns.kind != Side::none)
            for (int64_t c = 0; c < across(); c += LANES) store(y + c, load(y + c) * columns.product(j, c));
          finish(j, w + j, order.at(from + w + j));
        }
        last_row = w + n - 1;
      }
    }
    rows.finish(order), columns.finish(order);
    settle();
  }

  void enter_last(const Operands& o) {
    const float *a_row = a.row(last_row), *x_row = x.row(last_row);
    for (int64_t i = 0; i < tile_count(); ++i)
      for (int64_t r = 0; r < rows.width; ++r)
        for (int64_t c = 0; c < tile_width(i); c += LANES) {
          float* s = place(r, i * TILE) + c;
          store(s, load(s) + all(a_row[r] * o.a.factor) * (load(x_row + i * TILE + c) * all(o.x.factor)));
        }
  }

  // a / P, b P and x / P of row w of the window, to row j of the block; x is 0 if the token does not enter the state.
  template <Sums SUMS>
  void gather(int64_t j, int64_t w, const Operands& o, bool enters) {
    const float *a_row = a.row(w), *b_row = b.row(w), *x_row = x.row(w);
    const vec a_factor = all(o.a.factor), b_factor = all(o.b.factor), x_factor = all(enters ? o.x.factor : 0);
    vec dot = {};
    for (int64_t r = 0; r < rows.width; r += LANES) {
      const int64_t to = (r / DEPTH * block + j) * STRIDE + r % DEPTH;
      const vec in = load(a_row + r) * a_factor, out = load(b_row + r) * b_factor;
      if (SUMS == Sums::before) dot += in * out;
      store(a_block + to, in * rows.inverse(j, r));
      store(b_block + to, out * rows.product(j, r));
    }
    if (SUMS == Sums::before) own[j] = sum(dot);
    for (int64_t c = 0; c < across(); c += LANES) {
      float* to = x_block + (c / TILE * block + j) * TILE + c % TILE;
      store(to, load(x_row + c) * x_factor * columns.inverse(j, c));
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
        store(column_entry + w, columns.of(columns.entries + j * columns.across(), c * TILE + w));
    for (int64_t r = 0; r < rows.width; r += DEPTH) {
      const int64_t from = (r / DEPTH * block + j) * STRIDE;
      tile<COUNT, WIDTH, SUMS, SCALED>(place(r, c * TILE), smallest(DEPTH, rows.width - r), a_block + from, b_block + from,
                                            x_block + (c * block + j) * TILE, y_block + j * across() + c * TILE, across(),
                                            r > 0, row_entry + r * row_step, row_step, column_entry, ahead);
    }
    return COUNT;
  }
};
