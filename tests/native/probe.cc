// Probes whether a sanitizer works: without an argument the program is correct, with one it has the named fault.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

int shared = 0;

int main(int arguments, char** argument) {
  const char* wrong = arguments > 1 ? argument[1] : "nothing";
  if (!std::strcmp(wrong, "address")) {
    volatile char* block = static_cast<char*>(std::malloc(size_t(arguments)));
    block[arguments] = 1;
    std::free(const_cast<char*>(block));
  } else if (!std::strcmp(wrong, "undefined")) {
    std::printf("%d\n", 1 << (30 + arguments));
  }
  std::thread other([&] { ++shared; });
  if (!std::strcmp(wrong, "thread")) ++shared;
  other.join();
  return shared == 0;
}
