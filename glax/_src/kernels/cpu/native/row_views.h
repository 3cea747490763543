// Views of memory for a scan: rows in an order, scratch, windows of rows as float32, cache lines to prefetch.

// One row of an array for each token.
struct RowView {
  char* data = nullptr;  // at token 0
  int64_t stride = 0;    // bytes from token to token
  Type type = Type::f32;
  int64_t width = 0;
  float factor = 1;
  bool streamed = false;  // written past the caches
  bool adds = false;      // to what the row holds, which is float32

  char* at(int64_t t) const { return data + t * stride; }
  // Writes x [width] to row t, converted to `type`.
  void write(const float* x, int64_t t) const {
    if (adds) {
      float* const row = reinterpret_cast<float*>(at(t));
      for (int64_t c = 0; c < width; ++c) row[c] += x[c];
    } else if (streamed) {
      stream(x, reinterpret_cast<float*>(at(t)), width);
    } else {
      narrow(x, at(t), type, width);
    }
  }

  // A view for writing every row of an array of `bytes`. Large arrays are written past the caches, which could not hold them.
  RowView to_write(int64_t bytes) const {
    constexpr int64_t large = 1 << 23;
    RowView rows = *this;
    rows.streamed = streams && data && type == Type::f32 && bytes >= large && width % LANES == 0 &&
                    (reinterpret_cast<uintptr_t>(data) | uintptr_t(stride)) % (4 * LANES) == 0;
    return rows;
  }
};

// The tokens of a scan, with time or against it.
struct Order {
  int64_t first, length, step;  // token i of the scan is first + i * step
  bool late;                    // the decay of a token applies after its own step, as in the gradients' recurrences
  bool fresh = false;           // the first token's decay does not apply

  int64_t at(int64_t i) const { return first + i * step; }
  Order slice(int64_t from, int64_t to) const { return {at(from), to - from, step, late, fresh && from == 0}; }
  Order backwards() const { return {at(length - 1), length, -step, true}; }
};

// Allocates arrays from a block of memory, once for each task, and never frees them. Without memory it only counts bytes.
struct Scratch {
  char* memory;
  int64_t used = 0;

  float* floats(int64_t count) {
    const int64_t here = used;
    used += (count * 4 + 63) / 64 * 64;
#ifdef __SANITIZE_ADDRESS__  // a poisoned gap after each array
    used += 64;
    if (memory) ASAN_UNPOISON_MEMORY_REGION(memory + here, used - here);
    if (memory) ASAN_POISON_MEMORY_REGION(memory + here + count * 4, used - here - count * 4);
#endif
    return memory ? reinterpret_cast<float*>(memory + here) : nullptr;
  }
};

// A row of float32, or of bfloat16 that is converted as it is read.
struct Row {
  const char* data;
  bool half;

  vec operator()(int64_t c) const { return fast_bf16 && half ? load_bf16(halves() + c) : load(floats() + c); }
  float at(int64_t c) const { return half ? from_bf16(halves()[c]) : floats()[c]; }
  const float* floats() const { return reinterpret_cast<const float*>(data); }
  const uint16_t* halves() const { return reinterpret_cast<const uint16_t*>(data); }
};

// The rows of a window of tokens: in place, or copied to float32.
struct Window {
  float* copies;  // [block, across]
  int64_t across;
  const char* first = nullptr;  // row 0
  int64_t step = 0;             // bytes from row to row
  bool half = false;            // they are bfloat16

  void allocate(Scratch& scratch, int64_t block, int64_t width) {
    across = padded(width);
    copies = scratch.floats(block * across);
  }

  // Reads tokens [from, from + tokens) of the scan. Rows before `begin` are not read. With `as_floats`, bfloat16 rows are converted.
  void fill(const RowView& rows, const Order& order, int64_t from, int64_t tokens, bool as_floats = false, int64_t begin = 0) {
    if (!rows.data) return;
    first = rows.at(order.at(from)), step = order.step * rows.stride;
    half = rows.type == Type::bf16 && fast_bf16 && !as_floats;
    if (rows.width % LANES == 0 && (rows.type == Type::f32 || half)) return;
    half = false;
    for (int64_t j = begin; j < tokens; ++j) widen(first + j * step, rows.type, rows.width, copies + j * across);
    first = reinterpret_cast<const char*>(copies), step = across * 4;
  }

  Row row(int64_t j) const { return {first + j * step, half}; }
};

// Prefetches the cache lines of the next block. Consecutive rows are all heads' width apart, often a page, so that the hardware does not
// prefetch them. The lines are spread evenly over the block's multiplications, because memory serves few at a time.
struct Prefetcher {
  static constexpr int64_t rows = 4;   // rows of the state between two visits
  static constexpr int64_t spare = 8;  // lines
  const char **lines, **next, **last;  // null-terminated
  int64_t lines_per_visit;             // lines fetched in each visit

  // Allocates a list of `most` lines. A pointer occupies two floats.
  void allocate(Scratch& scratch, int64_t most) { lines = reinterpret_cast<const char**>(scratch.floats(2 * (most + spare))); }

  // Distributes the lines over `visits` calls of fetch().
  void schedule(int64_t visits) { *last = nullptr, lines_per_visit = visits ? (last - lines + visits - 1) / visits : 0; }

  void fetch() {
    const char **line = next, **const end = last;
    for (int64_t i = lines_per_visit; i > 0; --i) {
      __builtin_prefetch(*line, 0, 2);
      line += line < end;
    }
    next = line;
  }

  // Adds the lines of tokens [from, to) of the scan.
  void add(const RowView& rows, const Order& order, int64_t from, int64_t to) {
    if (!rows.data) return;
    const int64_t count = (rows.width * (rows.type == Type::f32 ? 4 : 2) + 63) / 64, step = order.step * rows.stride;
    const char *row = rows.at(order.at(from)), **here = last;
    for (int64_t i = from; i < to; ++i, row += step, here += count)
      for (int64_t first = 0; first < count; first += spare)
        for (int64_t line = first; line < first + spare; ++line) here[line] = row + 64 * line;  // a fixed number, by vectors
    last = here;
  }
};
