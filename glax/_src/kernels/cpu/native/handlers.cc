// XLA's foreign function handlers: check and unpack operands, prepare results, run the problem (segments.h) or the step.
#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "delta_tasks.h"
#include "replay_tasks.h"
#include "selective_tasks.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace glax {
namespace {

// Clears the rows of x [B, T, ...] that belong to no sequence.
void clear_padding(const Problem& p, const Tensor& x) {
  if (!x.data) return;
  const int64_t row = x.heads * x.width * x.bytes();
  for (int64_t t = 0; p.marks && t < p.B * p.T; ++t)
    if (p.marks[t] == Mark::padding) std::memset(x.data + t * row, 0, row);
  if (!p.boundaries) return;
  const int64_t begin = std::clamp<int64_t>(p.boundaries[0], 0, p.T), end = std::clamp<int64_t>(p.boundaries[p.N], begin, p.T);
  std::memset(x.data, 0, begin * row);
  std::memset(x.data + end * row, 0, (p.T - end) * row);
}

// Populates the pages of results on all threads.
template <class Pool>
void populate_pages(Pool& pool, const std::vector<Bytes>& results) {
  const std::vector<Bytes> absent = absent_pages(results);
  parallel_for(pool, absent.size(), pool.num_threads(), [&](std::atomic<int64_t>& next, int64_t tasks) {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) populate(absent[i]);
  });
}

// ---- operands ---------------------------------------------------------------------------------------------------------

// An absent operand is an array of rank 1 without elements.
bool present(const ffi::AnyBuffer& x) { return !(x.dimensions().size() == 1 && x.element_count() == 0); }

Type type_of(ffi::DataType type) {
  if (type == ffi::DataType::S8) return Type::i8;
  if (type == ffi::DataType::F8E4M3FN) return Type::f8;
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
// The same, then beta, erase, write
constexpr size_t delta_operands = operands + 3;

struct Read {
  const ffi::RemainingArgs& args;
  ffi::AnyBuffer operator()(size_t i) const { return *args.get<ffi::AnyBuffer>(i); }
};

struct Write {
  ffi::RemainingRets& results;
  ffi::AnyBuffer operator()(size_t i) const { return **results.get<ffi::AnyBuffer>(i); }
};

Bytes bytes_of(const ffi::AnyBuffer& x) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x.untyped_data());
  return {begin, begin + x.size_bytes()};
}

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

// Sets beta, erase and write of a Problem or a Step.
template <class P>
void set_erasure(P& p, const Read& read) {
  p.beta = tensor(read(operands), false), p.erase = tensor(read(operands + 1)), p.write = tensor(read(operands + 2));
}

// Sets the marks of tokens [B, T], which stand behind all other operands where rows are divided further.
void set_marks(Problem& p, const Read& read, size_t at) {
  if (read.args.size() > at) p.marks = static_cast<const int32_t*>(read(at).untyped_data());
}

bool known(ffi::DataType type, bool in_8_bits) {
  if (in_8_bits && (type == ffi::DataType::S8 || type == ffi::DataType::F8E4M3FN)) return true;
  return type == ffi::DataType::F32 || type == ffi::DataType::BF16 || type == ffi::DataType::F16 || type == ffi::DataType::S32;
}

// Checks the number and types of operands and results. They differ only if another version of glax calls this library.
// in_8_bits: whether some may have 8 bits.
ffi::Error expect(const ffi::RemainingArgs& args, size_t wanted_args, ffi::RemainingRets& results, size_t wanted_results,
                  size_t optional_args = 0, bool in_8_bits = false) {
  bool typed = true;
  for (size_t i = 0; i < args.size(); ++i) typed = typed && known(Read{args}(i).element_type(), in_8_bits);
  for (size_t i = 0; i < results.size(); ++i) typed = typed && known(Write{results}(i).element_type(), in_8_bits);
  if ((args.size() == wanted_args || args.size() == wanted_args + optional_args) && results.size() == wanted_results && typed) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("glax: called with " + std::to_string(args.size()) + " operands and " +
                                     std::to_string(results.size()) + " results" + (typed ? "" : ", some of unknown types") +
                                     "; this build of its CPU kernels takes " + std::to_string(wanted_args) + " and " +
                                     std::to_string(wanted_results) + ", in float32, bfloat16 and float16: install glax again");
}

// Returns run()'s result, or an error if it runs out of memory: exceptions must not pass through XLA's frames.
template <class Run>
ffi::Error guarded(const Run& run) {
  try {
    return run();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "glax: its CPU kernels found no memory to compute in. It grows with K, V, the longest sequence and the block of "
                      "NativeConfig: pass fewer or shorter sequences, or cfg=NativeConfig() with a smaller block");
  }
}

ffi::Error forward(ffi::ThreadPool pool, bool reverse, int64_t block, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, operands, results, 2, 1); error.failure()) return error;
  return guarded([&] {
    const Write write{results};
    populate_pages(pool, {bytes_of(write(0))});
    Problem p = problem_of({args}, reverse, block);
    set_marks(p, {args}, operands);
    p.output = tensor(write(0)), p.final_state = floats(write(1));
    clear_padding(p, p.output);
    run_forward(pool, p);
    return ffi::Error::Success();
  });
}

ffi::Error gradient(ffi::ThreadPool pool, bool reverse, int64_t block, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, operands + 2, results, 9, 1); error.failure()) return error;
  return guarded([&] {
    const Read read{args};
    const Write write{results};
    std::vector<Bytes> written;
    for (size_t i = 0; i < results.size(); ++i) written.push_back(bytes_of(write(i)));
    populate_pages(pool, written);
    Problem p = problem_of(read, reverse, block);
    set_marks(p, read, operands + 2);
    p.d_output = tensor(read(operands)), p.d_final = floats(read(operands + 1));
    p.dq = tensor(write(0)), p.dk = tensor(write(1)), p.dv = tensor(write(2));
    p.d_head = floats(write(3)), p.d_key = floats(write(4)), p.d_value = floats(write(5));
    p.d_constant = floats(write(6)), p.d_initial = floats(write(7)), p.d_scale = floats(write(8));
    for (const Tensor& x : {p.dq, p.dk, p.dv, tensor(write(4)), tensor(write(5))}) clear_padding(p, x);
    for (int64_t g = 0; p.d_head && g < (p.K + group - 1) / group; ++g)
      clear_padding(p, {reinterpret_cast<char*>(p.d_head + g * p.B * p.T * p.H), Type::f32, p.H, 1});
    run_gradient(pool, p);
    return ffi::Error::Success();
  });
}

ffi::Error delta_forward(ffi::ThreadPool pool, bool reverse, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, delta_operands, results, 2, 1); error.failure()) return error;
  return guarded([&] {
    const Write write{results};
    populate_pages(pool, {bytes_of(write(0))});
    Problem p = problem_of({args}, reverse, 1);
    set_erasure(p, {args}), set_marks(p, {args}, delta_operands);
    p.output = tensor(write(0)), p.final_state = floats(write(1));
    clear_padding(p, p.output);
    run_delta(pool, p, false);
    return ffi::Error::Success();
  });
}

// Results: dq, dk, dv, d head, d key, d constant, d initial state, d scale, d beta, d erase, d write.
ffi::Error delta_gradient(ffi::ThreadPool pool, bool reverse, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, delta_operands + 2, results, 11, 1); error.failure()) return error;
  return guarded([&] {
    const Read read{args};
    const Write write{results};
    std::vector<Bytes> written;
    for (size_t i = 0; i < results.size(); ++i) written.push_back(bytes_of(write(i)));
    populate_pages(pool, written);
    Problem p = problem_of(read, reverse, 1);
    set_erasure(p, read), set_marks(p, read, delta_operands + 2);
    p.d_output = tensor(read(delta_operands)), p.d_final = floats(read(delta_operands + 1));
    p.dq = tensor(write(0)), p.dk = tensor(write(1)), p.dv = tensor(write(2));
    p.d_head = floats(write(3)), p.d_key = floats(write(4)), p.d_constant = floats(write(5));
    p.d_initial = floats(write(6)), p.d_scale = floats(write(7));
    p.d_beta = floats(write(8)), p.d_erase = floats(write(9)), p.d_write = floats(write(10));
    for (const Tensor& x : {p.dq, p.dk, p.dv, tensor(write(4)), tensor(write(9)), tensor(write(10))}) clear_padding(p, x);
    for (size_t i : {3, 8}) clear_padding(p, tensor(write(i), false));
    run_delta(pool, p, true);
    return ffi::Error::Success();
  });
}

// Reads the operands of a step and copies its pool where XLA does not run in place. Unless `writes`, the pool is no result.
Step step_of(const Read& read, const Write& write, bool writes = true) {
  Step p;
  p.q = tensor(read(0)), p.k = tensor(read(1)), p.v = tensor(read(2));
  p.head = tensor(read(3), false), p.key = tensor(read(4)), p.value = tensor(read(5));
  p.constant = floats(read(6)), p.scale = floats(read(9));
  if (present(read(8))) p.slots = static_cast<const int32_t*>(read(8).untyped_data());
  const ffi::AnyBuffer state = writes ? write(1) : read(7);
  p.output = tensor(write(0)), p.state = tensor(state);
  p.P = state.dimensions()[0], p.H = state.dimensions()[1], p.K = p.q.width, p.V = p.v.width;
  p.B = read(9).dimensions()[0], p.T = read(0).dimensions()[1], p.writes = writes;
  if (state.untyped_data() != read(7).untyped_data()) std::memcpy(state.untyped_data(), read(7).untyped_data(), state.size_bytes());
  return p;
}

ffi::Error delta_step(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, delta_operands, results, 2); error.failure()) return error;
  return guarded([&] {
    Step p = step_of({args}, {results});
    set_erasure(p, {args});
    run_delta_step(pool, p);
    return ffi::Error::Success();
  });
}

ffi::Error step(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, operands, results, 2); error.failure()) return error;
  return guarded([&] {
    const Step p = step_of({args}, {results});
    // Small heads share a task: waking a thread costs more than one of them.
    const int64_t heads = p.B * p.H, heads_per_task = std::max<int64_t>(1, (int64_t(1) << 17) / std::max<int64_t>(1, p.K * p.V));
    const int64_t tasks = (heads + heads_per_task - 1) / heads_per_task;
    parallel_for(pool, tasks, std::max<int64_t>(1, pool.num_threads()), [&](std::atomic<int64_t>& next, int64_t tasks) {
      for (int64_t i; (i = next.fetch_add(1)) < tasks;)
        for (int64_t head = i * heads_per_task; head < std::min((i + 1) * heads_per_task, heads); ++head)
          kernels().step(p, head / p.H, head % p.H);
    });
    return ffi::Error::Success();
  });
}

// Operands: x, dt, A, B, C, initial states, boundaries, resets.
constexpr size_t selective_operands = 8;

// Rows [B, T, width] or [B, width].
Tensor rows(const ffi::AnyBuffer& x) {
  const auto dims = x.dimensions();
  Tensor tensor{static_cast<char*>(x.untyped_data()), type_of(x.element_type()), 1, dims[dims.size() - 1]};
  return tensor;
}

const int32_t* integers(const ffi::AnyBuffer& x) { return present(x) ? static_cast<const int32_t*>(x.untyped_data()) : nullptr; }

SelectiveScan selective_of(const Read& read, bool reverse) {
  SelectiveScan p;
  const ffi::AnyBuffer x = read(0), A = read(2), initial = read(5);
  p.rows = x.dimensions()[0], p.T = x.dimensions()[1], p.D = A.dimensions()[0], p.N = A.dimensions()[1];
  p.sequences = initial.dimensions()[0], p.reverse = reverse;
  p.x = rows(x), p.dt = rows(read(1)), p.A = floats(A), p.B = rows(read(3)), p.C = rows(read(4)), p.initial = floats(initial);
  p.boundaries = integers(read(6)), p.resets = integers(read(7));
  return p;
}

// Results: y, final states, the states before chunks or none.
ffi::Error selective_forward(ffi::ThreadPool pool, bool reverse, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, selective_operands, results, 3); error.failure()) return error;
  return guarded([&] {
    const Write write{results};
    populate_pages(pool, {bytes_of(write(0)), bytes_of(write(2))});
    SelectiveScan p = selective_of({args}, reverse);
    p.y = floats(write(0)), p.final_state = floats(write(1)), p.starts = floats(write(2));
    run_selective(pool, p, false);
    return ffi::Error::Success();
  });
}

// Operands: those of the forward, its states before chunks, d y, d final states. Results: dx, ddt, dA, dB, dC, d initial states.
ffi::Error selective_gradient(ffi::ThreadPool pool, bool reverse, int64_t channels, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, selective_operands + 3, results, 6); error.failure()) return error;
  return guarded([&] {
    const Read read{args};
    const Write write{results};
    std::vector<Bytes> written;
    for (size_t i = 0; i < results.size(); ++i) written.push_back(bytes_of(write(i)));
    populate_pages(pool, written);
    SelectiveScan p = selective_of(read, reverse);
    p.starts = floats(read(selective_operands)), p.d_y = floats(read(selective_operands + 1));
    p.d_final = floats(read(selective_operands + 2)), p.group_channels = channels;
    p.dx = rows(write(0)), p.ddt = rows(write(1));
    p.dA = floats(write(2)), p.dB = floats(write(3)), p.dC = floats(write(4)), p.d_initial = floats(write(5));
    run_selective(pool, p, true);
    return ffi::Error::Success();
  });
}

// Operands: x, dt, A, B, C, pool, slots. Results: y, pool.
ffi::Error selective_step(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, 7, results, 2); error.failure()) return error;
  return guarded([&] {
    const Read read{args};
    const Write write{results};
    const ffi::AnyBuffer x = read(0), A = read(2), before = read(5), state = write(1);
    SelectiveStep p;
    p.B = x.dimensions()[0], p.D = A.dimensions()[0], p.N = A.dimensions()[1], p.P = state.dimensions()[0];
    p.x = rows(x), p.dt = rows(read(1)), p.A = floats(A), p.in = rows(read(3)), p.out = rows(read(4));
    p.slots = integers(read(6)), p.state = rows(state), p.y = floats(write(0));
    if (state.untyped_data() != before.untyped_data()) std::memcpy(state.untyped_data(), before.untyped_data(), state.size_bytes());
    run_selective_step(pool, p);
    return ffi::Error::Success();
  });
}

// Operands: those of a step, of up to Step::most_tokens tokens. Results: the output, and the pool if it is written.
ffi::Error tokens(ffi::ThreadPool pool, bool writes, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, operands, results, writes ? 2 : 1); error.failure()) return error;
  return guarded([&] {
    run_tokens(pool, step_of({args}, {results}, writes));
    return ffi::Error::Success();
  });
}

// Operands: those of a step of the delta rule, along, then the pool but its states: rests and scale of states in 8 bits, the rings' keys,
// values, log decays of heads, rows and columns, along, erased, and length, drafted. Results: the output and the pool.
constexpr size_t replay_operands = delta_operands + 12;

ffi::Error replay(ffi::ThreadPool pool, int64_t replay, bool before_decay, ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (auto error = expect(args, replay_operands, results, 13, 0, true); error.failure()) return error;
  return guarded([&] {
    const Read read{args};
    const Write write{results};
    Replay p;
    static_cast<Step&>(p) = step_of(read, write);
    set_erasure(p, read);
    p.along = tensor(read(delta_operands)), p.before_decay = before_decay, p.replay = replay;
    const size_t own = delta_operands + 1, first = 2;  // the operands and the results after the states
    for (size_t i = first; i < results.size(); ++i) {
      const ffi::AnyBuffer before = read(own + i - first), after = write(i);
      if (after.untyped_data() != before.untyped_data()) std::memcpy(after.untyped_data(), before.untyped_data(), after.size_bytes());
    }
    p.rests = tensor(write(2)).data, p.scale_of_rows = floats(write(3));
    if (p.rests) p.scales = write(3).dimensions()[2];
    p.ring_key = tensor(write(4)), p.ring_value = tensor(write(5)), p.places = write(4).dimensions()[1];
    p.ring_head = tensor(write(6), false), p.ring_row = tensor(write(7)), p.ring_column = tensor(write(8));
    p.ring_along = tensor(write(9)), p.ring_erased = tensor(write(10));
    p.length = static_cast<int32_t*>(write(11).untyped_data()), p.drafted = static_cast<int32_t*>(write(12).untyped_data());
    run_replay(pool, p);
    return ffi::Error::Success();
  });
}

auto scan_binding() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<bool>("reverse").Attr<int64_t>("block"); }
auto delta_binding() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<bool>("reverse"); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_forward, forward, scan_binding().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_gradient, gradient, scan_binding().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_delta_forward, delta_forward, delta_binding().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_delta_gradient, delta_gradient, delta_binding().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_delta_step, delta_step, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_step, step, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_selective_forward, selective_forward, delta_binding().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_selective_gradient, selective_gradient,
                              delta_binding().Attr<int64_t>("channels").RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_selective_step, selective_step, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_tokens, tokens, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<bool>("writes").RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_replay, replay,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("replay").Attr<bool>("before_decay").RemainingArgs().RemainingRets());

}  // namespace glax

// The version of these handlers. 2: glax_gradient sums over heads that share a row. 3: glax_forward and glax_gradient take
// marks. 4: those of the delta rule take marks. A new handler is found by its name, and leaves the version as it is.
extern "C" int32_t glax_interface() { return 4; }

// For `glax doctor` and tests.
extern "C" const char* glax_instructions() { return glax::kernels().name; }
extern "C" void glax_exponential(const float* x, float* y, int64_t count) { glax::kernels().exponential(x, y, count); }
