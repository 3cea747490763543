// Results must be bitwise equal for any number of threads and any start of theirs.
#include "checks.h"

namespace {

void compare_threads(Group& group, const Case& c, double magnitude = 1) {
  const Inputs in = Inputs(c, 1).scaled(1, magnitude, magnitude, 1);
  const auto bits = [&](int threads, Pool::Kind kind) {
    Pool pool(threads, kind);
    return Outputs(c, in, pool).bits();
  };
  const auto wanted = bits(1, Pool::ready);
  const std::pair<int, Pool::Kind> pools[] = {{2, Pool::ready}, {3, Pool::ready}, {8, Pool::ready},
                                              {8, Pool::busy},  {3, Pool::late},  {8, Pool::late}};
  for (const auto& [threads, kind] : pools) {
    static const char* kinds[] = {"ready", "busy", "late"};
    std::string differ;
    for (const auto& [name, found] : bits(threads, kind))
      if (found != wanted.at(name)) differ += " " + name;
    group.expect(differ.empty(), c.name() + ": with " + std::to_string(threads) + " " + kinds[kind] + " threads differ" + differ);
  }
}

void shared() {
  Group group("threads: sequences, heads and columns");
  for (Gates gates : {Gates::none, Gates::head, Gates::constant, Gates::key_and_value}) {
    Case c;
    c.gates = gates, c.K = 70, c.V = 100, c.T = 20, c.H = 1;
    c.gate = [](Random& random) { return random.log_sigmoid() / 4; };
    compare_threads(group, c);
    c.H = 3, c.K = 9, c.V = 33;
    c.boundaries = {0, 3, 3, 15, 20};
    compare_threads(group, c);
  }
  for (Gates gates : {Gates::head, Gates::key_and_value}) {  // the number of heads scanned together depends on the threads
    Case c;
    c.gates = gates, c.K = 64, c.V = 40, c.H = 10;
    compare_threads(group, c);
  }
  Case c;
  c.gates = Gates::key_and_value, c.T = 2100, c.H = 1, c.K = 33, c.V = 3;  // in segments
  compare_threads(group, c);
  c = {};
  c.T = 0, c.K = 40;
  compare_threads(group, c);
  c.T = 5, c.K = 1, c.V = 1, c.H = 1;
  compare_threads(group, c);
}

// Gates that end a block early, on the side of the state that is cut into ranges for threads. The end of the block must not depend on the
// cut, or the rounding would.
void columns() {
  Group group("threads: strong gates on the columns");
  for (Gates gates : {Gates::key, Gates::value, Gates::key_and_value}) {
    Case c;
    c.gates = gates, c.K = 100, c.V = 100, c.T = 64, c.H = 1, c.block = 32;
    c.gate = [](Random& random) { return 3 * random.log_sigmoid(); };
    compare_threads(group, c);
    compare_threads(group, c, 3e10);  // overflows in some columns: the whole problem is rerun with the narrow limit
  }
}

// Every task runs exactly once, and no thread touches the caller's memory after it has returned.
void tasks() {
  Group group("threads: every task once");
  for (Pool::Kind kind : {Pool::ready, Pool::busy, Pool::late}) {
    for (int threads : {1, 2, 3, 8}) {
      for (int64_t count : {0, 1, 2, 7, 100}) {
        Pool pool(threads, kind);
        auto times = std::make_unique<std::vector<int>>(size_t(count), 0);
        glax::parallel_for(pool, count, threads, [&](std::atomic<int64_t>& next, int64_t tasks) {
          for (int64_t i; (i = next.fetch_add(1)) < tasks;) ++(*times)[size_t(i)];
        });
        const bool once = std::all_of(times->begin(), times->end(), [](int n) { return n == 1; });
        times.reset();  // a thread that still works for the caller would use freed memory
        group.expect(once, std::to_string(count) + " tasks on " + std::to_string(threads) + " threads");
      }
    }
  }
}

void spoilt() {
  Group group("threads: one bit more is found");
  Case c;
  c.T = 5;
  Pool pool(1);
  const Inputs in(c, 1);
  const auto first = Outputs(c, in, pool).bits();
  auto other = Outputs(c, in, pool).bits();
  group.expect(first == other, "two runs differ");
  other["dk"][100] ^= 1;
  group.expect(first != other, "one bit of dk is unseen");
}

}  // namespace

void test_threads() { shared(), columns(), tasks(), spoilt(); }
