// What a walk has of memory: rows in an order, scratch, windows of rows as float32, lines to fetch ahead.

// A row of memory a token.
struct Rows {
  char* data = nullptr;  // at token 0
  int64_t stride = 0;    // bytes from token to token
  Type type = Type::f32;
  int64_t width = 0;
  float factor = 1;
  bool streamed = false;  // written past the caches

  char* at(int64_t t) const { return data + t * stride; }
  void write(const float* x, int64_t t) const {
    if (streamed) {
      stream(x, reinterpret_cast<float*>(at(t)), width);
    } else {
      narrow(x, at(t), type, width);
    }
  }

  // To be written whole, in an array of so many bytes: past the caches if those would not keep it anyway.
  Rows to_write(int64_t bytes) const {
    constexpr int64_t large = 1 << 23;
    Rows rows = *this;
    rows.streamed = streams && data && type == Type::f32 && bytes >= large && width % LANES == 0 &&
                    (reinterpret_cast<uintptr_t>(data) | uintptr_t(stride)) % (4 * LANES) == 0;
    return rows;
  }
};

// The tokens of a walk, with time or against it.
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
    const char *at = row.at(t), **const to = last;
    const int64_t count = (row.width * (row.type == Type::f32 ? 4 : 2) + 63) / 64;
    for (int64_t i = 0; i < count; ++i) to[i] = at + 64 * i;
    last = to + count;
  }
};
