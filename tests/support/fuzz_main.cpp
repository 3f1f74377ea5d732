// tests/support/fuzz_main.cpp: drives LLVMFuzzerTestOneInput with seeded mutations of a committed
// corpus, because GCC has no libFuzzer.  The targets are those of libFuzzer, so clang can link them
// with the real one.
//
//   fuzz_X [--runs N] [--seed S] CORPUS...   every file as it is, then N mutations of them
//   fuzz_X --runs 0 FILE                     one input again
//
// When the target dies, the input that killed it is written to ./fuzz-crash.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "base/rng.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {

constexpr std::size_t input_bytes_max = 64 << 10;

std::string current;  // what the target is looking at

void write_current() {
  const int fd = ::open("fuzz-crash", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return;
  const ssize_t written = ::write(fd, current.data(), current.size());
  constexpr std::string_view note = "the input is in ./fuzz-crash\n";
  if (written >= 0 && ::write(STDERR_FILENO, note.data(), note.size()) < 0) return;
  ::close(fd);
}

void on_death(int number) {
  write_current();
  ::signal(number, SIG_DFL);
  ::raise(number);
}

void run_current() {
  // A copy of exactly its length, so that a sanitizer sees a read beyond it.
  const std::vector<std::uint8_t> input(current.begin(), current.end());
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

std::string mutated(const std::vector<std::string>& corpus, di::Rng& rng) {
  std::string text = corpus[rng.below(corpus.size())];
  for (std::uint64_t i = rng.below(6) + 1; i > 0; --i) {
    const std::size_t at = rng.below(text.size() + 1);
    const std::size_t rest = text.size() - at;
    switch (rng.below(8)) {
      case 0:  // a flipped bit
        if (rest > 0) text[at] = static_cast<char>(text[at] ^ (1 << rng.below(8)));
        break;
      case 1:  // any byte
        if (rest > 0) text[at] = static_cast<char>(rng.below(256));
        break;
      case 2: {  // bytes that mean something in text protocols
        constexpr std::string_view edges("\0\t\n\r \"%,-/0:;<[\\]{}\x7f\x80\xc3\xff", 23);
        text.insert(at, 1, edges[rng.below(edges.size())]);
        break;
      }
      case 3:  // something gone
        text.erase(at, rng.below(std::min<std::size_t>(rest, 40) + 1));
        break;
      case 4:  // something twice
        text.insert(at, text.substr(at, rng.below(std::min<std::size_t>(rest, 40) + 1)));
        break;
      case 5: {  // another input's middle
        const std::string& other = corpus[rng.below(corpus.size())];
        const std::size_t from = rng.below(other.size() + 1);
        text.insert(at, other.substr(from, rng.below(80)));
        break;
      }
      case 6:  // cut short
        text.resize(at);
        break;
      default: {  // another number
        const std::size_t digit = text.find_first_of("0123456789", at);
        if (digit == std::string::npos) break;
        constexpr std::string_view numbers[] = {
            "0",     "1", "-1", "255", "65536", "4294967296", "9223372036854775807", "18446744073709551616",
            "1e308", "00"};
        text.replace(digit, 1, numbers[rng.below(std::size(numbers))]);
        break;
      }
    }
  }
  if (text.size() > input_bytes_max) text.resize(input_bytes_max);
  return text;
}

void read_file(const std::filesystem::path& path, std::vector<std::string>& corpus) {
  std::ifstream in(path, std::ios::binary);
  corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t runs = 20000;
  std::uint64_t seed = 1;
  std::vector<std::string> corpus;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if ((word == "--runs" || word == "--seed") && i + 1 < argc) {
      (word == "--runs" ? runs : seed) = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::filesystem::is_directory(word)) {
      std::vector<std::filesystem::path> paths;
      for (const auto& entry : std::filesystem::directory_iterator(word)) paths.push_back(entry.path());
      std::sort(paths.begin(), paths.end());  // so that a seed means the same everywhere
      for (const auto& path : paths) read_file(path, corpus);
    } else if (std::filesystem::is_regular_file(word)) {
      read_file(word, corpus);
    } else {
      std::fprintf(stderr, "usage: %s [--runs N] [--seed S] CORPUS...\n", argv[0]);
      return 64;
    }
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: the corpus is empty\n", argv[0]);
    return 64;
  }
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::signal(number, on_death);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(write_current);

  std::printf("seed=%llu inputs=%zu\n", static_cast<unsigned long long>(seed), corpus.size());
  for (const std::string& input : corpus) {
    current = input;
    run_current();
  }
  di::Rng rng(seed);
  for (std::uint64_t run = 0; run < runs; ++run) {
    current = mutated(corpus, rng);
    run_current();
  }
  std::printf("runs=%llu\n", static_cast<unsigned long long>(runs));
  return 0;
}
