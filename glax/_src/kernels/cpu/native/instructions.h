// Compiles the kernels for one instruction set in a namespace of its own. The including file defines LANES, TOKENS and GLAX_NAMESPACE.
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
#include "tile.h"
#include "scan.h"
#include "kernels.h"
#include "gradient.h"
#include "step.h"
#include "tokens.h"
#include "replay.h"
#include "delta_products.h"
#include "delta_block.h"
#include "delta.h"
#include "delta_gradient.h"
#include "selective_scan.h"

// y = e^x for `count` elements, for tests.
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
    GLAX_NAMESPACE::boundary_states,
    GLAX_NAMESPACE::gradient_of_keys,
    GLAX_NAMESPACE::gradient_of_values,
    GLAX_NAMESPACE::step,
    GLAX_NAMESPACE::tokens_bytes,
    GLAX_NAMESPACE::tokens,
    GLAX_NAMESPACE::replay_bytes,
    GLAX_NAMESPACE::replay,
    GLAX_NAMESPACE::delta_scratch_bytes,
    GLAX_NAMESPACE::delta_forward,
    GLAX_NAMESPACE::delta_gradient,
    GLAX_NAMESPACE::delta_step_bytes,
    GLAX_NAMESPACE::delta_step,
    GLAX_NAMESPACE::selective_bytes,
    GLAX_NAMESPACE::selective_forward,
    GLAX_NAMESPACE::selective_gradient,
    GLAX_NAMESPACE::selective_step,
    GLAX_NAMESPACE::exponentials,
    GLAX_NAME,
};

}  // namespace glax
