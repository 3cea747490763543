// What XLA calls: operands checked and unpacked, work shared out over XLA's threads.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace glax {
namespace {

// The widest instructions that this machine has and that GLAX_CPU_INSTRUCTIONS, for tests, does not forbid.
const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const char* named = std::getenv("GLAX_CPU_INSTRUCTIONS");
    const std::string most = named ? named : "avx512";
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && most == "avx512") return avx512;
    if (has_avx2 && most != "baseline") return avx2;
#endif
    return baseline;
  }();
  return chosen;
}

// Runs work(task) for every task, on the caller's thread and as many of the pool's as come in time. The caller never waits
// for a thread that has not begun, so a busy pool cannot block it.
template <class Worker>
void share_out(ffi::ThreadPool pool, int64_t tasks, int64_t threads, const Worker& worker) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable idle;
    int64_t busy = 0;
    bool closed = false;
  };
  auto shared = std::make_shared<Shared>();
  const Worker* work = &worker;  // valid as long as the caller waits, which it does for all who entered before `closed`
  for (int64_t i = 1; i < std::min(tasks, threads); ++i) {
    pool.Schedule([shared, work, tasks] {
      {
        std::lock_guard<std::mutex> lock(shared->mutex);
        if (shared->closed || shared->next >= tasks) return;
        ++shared->busy;
      }
      (*work)(shared->next, tasks);
      std::lock_guard<std::mutex> lock(shared->mutex);
      if (--shared->busy == 0) shared->idle.notify_all();
    });
  }
  worker(shared->next, tasks);
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->closed = true;
  shared->idle.wait(lock, [&] { return shared->busy == 0; });
}

// How many ranges to cut `width` columns into: enough to keep the threads busy, since each range forms the rows' factors anew.
int64_t ranges(int64_t heads, int64_t width, int64_t threads) {
  const int64_t most = std::max<int64_t>(1, (width + group - 1) / group);
  int64_t cut = 1;
  while (cut < most && heads * cut < 4 * threads && (heads * cut) % threads != 0) ++cut;
  return cut;
}

struct Range {
  int64_t first, last;
};

Range range(int64_t i, int64_t cut, int64_t width) {
  const int64_t groups = (width + group - 1) / group;
  return {i * groups / cut * group, std::min((i + 1) * groups / cut * group, width)};
}

struct Memory {
  explicit Memory(int64_t bytes) : block(std::malloc(bytes + 64)) {}
  ~Memory() { std::free(block); }
  void* aligned() const { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block) + 63) / 64 * 64); }
  void* block;
};

// Sequences, the longest first: the last to be walked then keeps few threads waiting.
std::vector<int64_t> sequences(const Problem& p) {
  std::vector<int64_t> order(p.N);
  std::iota(order.begin(), order.end(), 0);
  if (p.boundaries) {
    const auto length = [&](int64_t n) { return int64_t(p.boundaries[n + 1]) - p.boundaries[n]; };
    std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return length(x) > length(y); });
  }
  return order;
}

// Rows that belong to no sequence are 0, in every array [B, T, ...] that a kernel writes.
void clear_padding(const Problem& p, const Tensor& x) {
  if (!p.boundaries || !x.data) return;
  const int64_t row = x.heads * x.width * x.bytes();
  const int64_t begin = std::clamp<int64_t>(p.boundaries[0], 0, p.T), end = std::clamp<int64_t>(p.boundaries[p.N], begin, p.T);
  std::memset(x.data, 0, begin * row);
  std::memset(x.data + end * row, 0, (p.T - end) * row);
}

// Asks for large pages for memory that is about to be written for the first time: at 4 KiB a page, the system's work to hand
// out the pages of a large result takes as long as computing it. Where it says no, nothing is lost.
void expect_writes(const ffi::AnyBuffer& x) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = uintptr_t(1) << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x.untyped_data()), end = begin + x.size_bytes();
  const uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

struct Task {
  void (*run)(const Problem&, int64_t, int64_t, int64_t, int64_t, void*);
  int64_t width;
};

void run_tasks(ffi::ThreadPool pool, const Problem& p, std::initializer_list<Task> kinds) {
  struct Item {
    const Task* task;
    int64_t n, h;
    Range columns;
  };
  std::vector<Item> items;
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  for (int64_t n : sequences(p)) {
    for (const Task& task : kinds) {
      const int64_t cut = ranges(p.N * p.H * int64_t(kinds.size()), task.width, threads);
      for (int64_t h = 0; h < p.H; ++h)
        for (int64_t i = 0; i < cut; ++i) items.push_back({&task, n, h, range(i, cut, task.width)});
    }
  }
  const int64_t bytes = kernels().scratch_bytes(p);
  share_out(pool, items.size(), threads, [&](std::atomic<int64_t>& next, int64_t tasks) {
    Memory scratch(bytes);
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
      const Item& item = items[i];
      item.task->run(p, item.n, item.h, item.columns.first, item.columns.last, scratch.aligned());
    }
  });
}

// ---- operands ---------------------------------------------------------------------------------------------------------

// An absent operand is an array of rank 1 without elements.
bool present(const ffi::AnyBuffer& x) { return !(x.dimensions().size() == 1 && x.element_count() == 0); }

Type type_of(ffi::DataType type) {
  return type == ffi::DataType::BF16 ? Type::bf16 : type == ffi::DataType::F16 ? Type::f16 : Type::f32;
}

Tensor tensor(const ffi::AnyBuffer& x, bool has_width = true) {
  if (!present(x)) return {};
  const auto dims = x.dimensions();
  const size_t rank = dims.size();
  Tensor tensor;
  tensor.data = static_cast<char*>(x.untyped_data());
  tensor.type = type_of(x.element_type());
  tensor.heads = has_width ? dims[rank - 2] : dims[rank - 1];
  tensor.width = has_width ? dims[rank - 1] : 1;
  return tensor;
}

float* floats(const ffi::AnyBuffer& x) { return present(x) ? static_cast<float*>(x.untyped_data()) : nullptr; }

// q, k, v, head, key, value, constant, initial state, boundaries, scale
constexpr size_t operands = 10;

struct Read {
  const ffi::RemainingArgs& args;
  ffi::AnyBuffer operator()(size_t i) const { return *args.get<ffi::AnyBuffer>(i); }
};

struct Write {
  ffi::RemainingRets& results;
  ffi::AnyBuffer operator()(size_t i) const { return **results.get<ffi::AnyBuffer>(i); }
};

Problem problem_of(const Read& read, bool reverse, int64_t block) {
  Problem p;
  p.q = tensor(read(0)), p.k = tensor(read(1)), p.v = tensor(read(2));
  p.head = tensor(read(3), false), p.key = tensor(read(4)), p.value = tensor(read(5));
  p.constant = floats(read(6)), p.initial = floats(read(7)), p.scale = floats(read(9));
  if (present(read(8))) p.boundaries = static_cast<const int32_t*>(read(8).untyped_data());
  const ffi::AnyBuffer q = read(0), scale = read(9);
  p.B = q.dimensions()[0], p.T = q.dimensions()[1], p.N = scale.dimensions()[0];
  p.H = std::max({p.q.heads, p.k.heads, p.v.heads}), p.K = p.q.width, p.V = p.v.width;
  p.reverse = reverse, p.block = block;
  return p;
}

ffi::Error expect(size_t args, size_t wanted_args, size_t results, size_t wanted_results) {
  if (args == wanted_args && results == wanted_results) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("glax: called with " + std::to_string(args) + " operands and " + std::to_string(results) +
                                     " results; this build of its CPU kernels takes " + std::to_string(wanted_args) + " and " +
                                     std::to_string(wanted_results) + ": install glax again");
}

ffi::Error forward(ffi::ThreadPool pool, bool reverse, int64_t block, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args.size(), operands, results.size(), 2); error.failure()) return error;
  const Write write{results};
  expect_writes(write(0));
  Problem p = problem_of({args}, reverse, block);
  p.output = tensor(write(0)), p.final_state = floats(write(1));
  clear_padding(p, p.output);
  run_tasks(pool, p, {{kernels().forward, p.V}});
  return ffi::Error::Success();
}

ffi::Error gradient(ffi::ThreadPool pool, bool reverse, int64_t block, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args.size(), operands + 2, results.size(), 9); error.failure()) return error;
  const Read read{args};
  const Write write{results};
  for (size_t i = 0; i < results.size(); ++i) expect_writes(write(i));
  Problem p = problem_of(read, reverse, block);
  p.d_output = tensor(read(operands)), p.d_final = floats(read(operands + 1));
  p.dq = tensor(write(0)), p.dk = tensor(write(1)), p.dv = tensor(write(2));
  p.d_head = floats(write(3)), p.d_key = floats(write(4)), p.d_value = floats(write(5));
  p.d_constant = floats(write(6)), p.d_initial = floats(write(7)), p.d_scale = floats(write(8));
  for (const Tensor& x : {p.dq, p.dk, p.dv, tensor(write(4)), tensor(write(5))}) clear_padding(p, x);
  for (int64_t g = 0; p.d_head && g < (p.K + group - 1) / group; ++g)
    clear_padding(p, {reinterpret_cast<char*>(p.d_head + g * p.B * p.T * p.H), Type::f32, p.H, 1});
  run_tasks(pool, p, {{kernels().gradient_of_keys, p.K}, {kernels().gradient_of_values, p.V}});
  return ffi::Error::Success();
}

ffi::Error step(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args.size(), operands, results.size(), 2); error.failure()) return error;
  const Read read{args};
  const Write write{results};
  Step p;
  p.q = tensor(read(0)), p.k = tensor(read(1)), p.v = tensor(read(2));
  p.head = tensor(read(3), false), p.key = tensor(read(4)), p.value = tensor(read(5));
  p.constant = floats(read(6)), p.scale = floats(read(9));
  if (present(read(8))) p.slots = static_cast<const int32_t*>(read(8).untyped_data());
  const ffi::AnyBuffer state = write(1);
  p.output = tensor(write(0)), p.state = tensor(state);
  p.P = state.dimensions()[0], p.H = state.dimensions()[1], p.K = p.q.width, p.V = p.v.width;
  p.B = read(9).dimensions()[0];
  if (state.untyped_data() != read(7).untyped_data()) std::memcpy(state.untyped_data(), read(7).untyped_data(), state.size_bytes());
  // A head of 64 x 64 takes a microsecond, waking a thread several.
  const int64_t heads = p.B * p.H, at_once = std::max<int64_t>(1, (int64_t(1) << 17) / std::max<int64_t>(1, p.K * p.V));
  const int64_t tasks = (heads + at_once - 1) / at_once;
  share_out(pool, tasks, std::max<int64_t>(1, pool.num_threads()), [&](std::atomic<int64_t>& next, int64_t tasks) {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;)
      for (int64_t head = i * at_once; head < std::min((i + 1) * at_once, heads); ++head)
        kernels().step(p, head / p.H, head % p.H);
  });
  return ffi::Error::Success();
}

auto walks() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<bool>("reverse").Attr<int64_t>("block"); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_forward, forward, walks().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_gradient, gradient, walks().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_step, step, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets());

}  // namespace glax

// For `glax doctor` and tests.
extern "C" const char* glax_instructions() { return glax::kernels().name; }
extern "C" void glax_exponential(const float* x, float* y, int64_t count) { glax::kernels().exponential(x, y, count); }
