// Tests the native kernels without Python and XLA: for builds with sanitizers, and for other processors.
//
//     kernels_test            everything, with every instruction set that the machine has
//     kernels_test threads    only the distribution over threads
#include <sys/wait.h>
#include <unistd.h>

#include "checks.h"

// Fresh memory is filled with NaN, so that a read before the first write shows in the results.
extern "C" const char* __asan_default_options() { return "max_malloc_fill_size=1000000000:malloc_fill_byte=255"; }

namespace {

struct Count {
  int64_t checks = 0, failed = 0;
};

// Runs the tests in a new process, since each process selects its kernels once.
bool run(const char* instructions, const char* name, bool only_threads, Count& total) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  const pid_t child = fork();
  if (child == 0) {
    setenv("GLAX_CPU_INSTRUCTIONS", instructions, 1);
    if (name && std::string(glax::kernels().name) != name) {
      std::printf("absent %s\n", name);
    } else {
      if (only_threads) {
        test_delta_threads(), test_replay_threads(), test_selective_threads();
      } else {
        test_values(), test_steps(), test_replay(), test_delta(), test_selective();
      }
      test_threads();
    }
    const Count count{Group::all_checks, Group::all_failed};
    const bool written = write(ends[1], &count, sizeof count) == sizeof count;
    std::exit(written ? 0 : 1);
  }
  close(ends[1]);
  Count count;
  const bool counted = read(ends[0], &count, sizeof count) == sizeof count;
  close(ends[0]);
  int status = 1;
  const bool ended = child > 0 && waitpid(child, &status, 0) == child && status == 0;
  total.checks += count.checks, total.failed += count.failed;
  if (!counted || !ended) std::printf("FAILED %s: the tests did not come to their end\n", instructions);
  return counted && ended && count.failed == 0;
}

}  // namespace

int main(int arguments, char** argument) {
  const bool only_threads = arguments == 2 && std::string(argument[1]) == "threads";
  if (arguments > 1 && !only_threads) {
    std::fprintf(stderr, "usage: %s [threads]\n", argument[0]);
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Count total;
  bool passed = run("baseline", nullptr, only_threads, total);
#if defined(__x86_64__)
  passed = run("avx2", "AVX2", only_threads, total) && passed;
  passed = run("avx512", "AVX-512", only_threads, total) && passed;
#endif
  std::printf("%s: %lld checks, %lld failed\n", passed ? "passed" : "FAILED", static_cast<long long>(total.checks),
              static_cast<long long>(total.failed));
  return passed ? 0 : 1;
}
