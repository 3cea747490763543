// Launches programs that NVRTC compiled, as a custom call of XLA. CUDA's driver is loaded at run time: building this needs none.

#include <dlfcn.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// The part of CUDA's driver interface that is used here; its handles are pointers.
struct Driver {
  using Result = int;
  Result (*get_error_name)(Result, const char**) = nullptr;
  Result (*stream_get_context)(void*, void**) = nullptr;
  Result (*push_context)(void*) = nullptr;
  Result (*pop_context)(void**) = nullptr;
  Result (*load_library)(void**, const void*, int*, void**, unsigned, int*, void**, unsigned) = nullptr;
  Result (*get_kernel)(void**, void*, const char*) = nullptr;
  Result (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                   void**) = nullptr;
  std::string missing;  // the reason why it cannot be used, or empty

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
      missing = dlerror();
      return;
    }
    find(library, "cuGetErrorName", get_error_name);
    find(library, "cuStreamGetCtx", stream_get_context);
    find(library, "cuCtxPushCurrent_v2", push_context);
    find(library, "cuCtxPopCurrent_v2", pop_context);
    find(library, "cuLibraryLoadData", load_library);
    find(library, "cuLibraryGetKernel", get_kernel);
    find(library, "cuLaunchKernel", launch);
  }

  template <typename Function>
  void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) missing = std::string("CUDA's driver has no ") + name + ": it must be of CUDA 12 or newer";
  }

  ffi::Error error(const char* what, Result status) const {
    const char* name = nullptr;
    get_error_name(status, &name);
    return ffi::Error::Internal(std::string("glax: ") + what + ": " + (name == nullptr ? "unknown error" : name));
  }
};

const Driver& driver() {
  static const auto* const loaded = new Driver;  // never destroyed: threads may outlive `main`
  return *loaded;
}

// Makes the context of a stream current while it lives.
class CurrentContext {
 public:
  explicit CurrentContext(void* stream) {
    status = driver().stream_get_context(stream, &context);
    if (status == 0) status = driver().push_context(context);
    pushed = status == 0;
  }
  ~CurrentContext() {
    if (pushed) driver().pop_context(&context);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  Driver::Result status = 0;

 private:
  void* context = nullptr;
  bool pushed = false;
};

// Kernels by the key of their program. A library of CUDA 12 belongs to no context: one serves all GPUs of a kind.
std::mutex mutex;
std::unordered_map<std::string, void*>& kernels() {
  static auto* const found = new std::unordered_map<std::string, void*>;  // never destroyed, as the driver
  return *found;
}

ffi::Error kernel_of(std::string_view key, ffi::Span<const uint8_t> image, std::string_view name, void** kernel) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto& known = kernels();
  const auto found = known.find(std::string(key));
  if (found != known.end()) {
    *kernel = found->second;
    return ffi::Error::Success();
  }
  void* library = nullptr;
  if (const int status = driver().load_library(&library, image.begin(), nullptr, nullptr, 0, nullptr, nullptr, 0)) {
    return driver().error("loading a program", status);
  }
  if (const int status = driver().get_kernel(kernel, library, std::string(name).c_str())) {
    return driver().error("finding a kernel", status);
  }
  known.emplace(key, *kernel);
  return ffi::Error::Success();
}

// Before the first launch, and so before anything is captured in a graph.
ffi::Error Load(void* stream, ffi::RemainingArgs, ffi::RemainingRets, std::string_view key, ffi::Span<const uint8_t> image,
                std::string_view name, int64_t, int64_t, ffi::Span<const int32_t>) {
  if (!driver().missing.empty()) return ffi::Error(ffi::ErrorCode::kUnavailable, "glax: " + driver().missing);
  const CurrentContext current(stream);
  if (current.status) return driver().error("a stream's context", current.status);
  void* kernel = nullptr;
  return kernel_of(key, image, name, &kernel);
}

ffi::Error Launch(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view key,
                  ffi::Span<const uint8_t> image, std::string_view name, int64_t blocks, int64_t threads,
                  ffi::Span<const int32_t> numbers) {
  if (!driver().missing.empty()) return ffi::Error(ffi::ErrorCode::kUnavailable, "glax: " + driver().missing);
  const CurrentContext current(stream);
  if (current.status) return driver().error("a stream's context", current.status);
  void* kernel = nullptr;
  ffi::Error failed = kernel_of(key, image, name, &kernel);
  if (failed.failure()) return failed;
  if (blocks == 0) return ffi::Error::Success();

  // The kernel's parameters: pointers to the operands, NULL for an empty one, to the results, and the numbers.
  std::vector<void*> pointers;
  pointers.reserve(args.size() + rets.size());
  for (size_t i = 0; i < args.size(); ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    pointers.push_back(buffer->element_count() == 0 ? nullptr : buffer->untyped_data());
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    pointers.push_back((*buffer)->element_count() == 0 ? nullptr : (*buffer)->untyped_data());
  }
  std::vector<int32_t> scalars(numbers.begin(), numbers.end());
  std::vector<void*> parameters;
  parameters.reserve(pointers.size() + scalars.size());
  for (void*& pointer : pointers) parameters.push_back(&pointer);
  for (int32_t& scalar : scalars) parameters.push_back(&scalar);

  const int status = driver().launch(kernel, static_cast<unsigned>(blocks), 1, 1, static_cast<unsigned>(threads), 1, 1, 0,
                                     stream, parameters.data(), nullptr);
  return status ? driver().error("launching a kernel", status) : ffi::Error::Success();
}

}  // namespace

#define GLAX_ATTRIBUTES(binding)           \
  (binding)                                \
      .RemainingArgs()                     \
      .RemainingRets()                     \
      .Attr<std::string_view>("key")       \
      .Attr<ffi::Span<const uint8_t>>("image") \
      .Attr<std::string_view>("name")      \
      .Attr<int64_t>("blocks")             \
      .Attr<int64_t>("threads")            \
      .Attr<ffi::Span<const int32_t>>("numbers")

XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_cuda_load, Load,
                              GLAX_ATTRIBUTES(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::PlatformStream<void*>>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(glax_cuda_launch, Launch,
                              GLAX_ATTRIBUTES(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()),
                              {ffi::Traits::kCmdBufferCompatible});

extern "C" const char* glax_cuda_missing() { return driver().missing.c_str(); }
