// Everything that is compiled once for each instruction set, in a namespace of its own. LANES, TOKENS and GLAX_NAMESPACE are set.
#include "problem.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace glax {
namespace {
namespace GLAX_NAMESPACE {

template <int N>
struct Count {
  static constexpr int value = N;
};

#include "vector.h"
#include "row_views.h"
#include "decay_accumulator.h"
#include "scan.h"
#include "kernels.h"
#include "step.h"

void exponentials(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t n = count - i < LANES ? count - i : LANES;
    float copy[LANES] = {};
    __builtin_memcpy(copy, x + i, n * 4);
    store(copy, exponential(load(copy)));
    __builtin_memcpy(y + i, copy, n * 4);
  }
}

}  // namespace GLAX_NAMESPACE
}  // namespace

const Kernels GLAX_NAMESPACE_EXPORT = {
    GLAX_NAMESPACE::scratch_bytes,
    GLAX_NAMESPACE::forward,
    GLAX_NAMESPACE::edges,
    GLAX_NAMESPACE::gradient_of_keys,
    GLAX_NAMESPACE::gradient_of_values,
    GLAX_NAMESPACE::step,
    GLAX_NAMESPACE::exponentials,
    GLAX_NAME,
};

}  // namespace glax
