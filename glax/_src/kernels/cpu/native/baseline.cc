// Kernels for the instructions that every machine of the architecture has: SSE2 on x86-64, NEON on arm64.
#include <cstdint>
#include <initializer_list>
#define LANES 4
#ifdef __aarch64__
#define TOKENS 8
#define GLAX_NAME "NEON"
#else
#define TOKENS 4
#define GLAX_NAME "SSE2"
#endif
#define GLAX_NAMESPACE of_baseline
#define GLAX_NAMESPACE_EXPORT baseline
#include "instructions.h"
