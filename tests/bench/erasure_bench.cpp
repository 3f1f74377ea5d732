// The code of a stripe (store/erasure.h) at 10+2, against the same machine's ceilings in the same run: encode
// with checksums against ISA-L's encode alone and against a plain multiplication table; rebuilding with
// checksums against checksums alone.
//
//   erasure_bench [ROUNDS]      default 11
//
// One tab-separated row per column length and way: GB of data for a second of processor time (median of the
// rounds, in which the ways take turns), and the median ratio to what it stands against.  Segments are taken
// in turn from more memory than a core's caches have.
#include <isa-l/erasure_code.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/rng.h"
#include "store/erasure.h"

namespace {

using namespace di;

constexpr std::uint32_t k = 10;
constexpr std::uint32_t m = 2;
constexpr std::size_t set_bytes = std::size_t{128} << 20;

// Of this thread's processor: what else the machine does counts as little as it can.
double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

double seconds_of(const std::function<void()>& work) {
  const double began = processor_seconds();
  work();
  return processor_seconds() - began;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Way {
  std::string name;
  int against = -1;  // index of the way it stands against
  std::function<void(std::size_t segment)> run;
  std::size_t every = 1;  // a slow one takes a part of the segments
};

class Bench {
 public:
  Bench(std::size_t column_bytes, std::size_t rounds)
      : column_bytes_(column_bytes),
        segments_(set_bytes / (column_bytes * (k + m))),
        rounds_(rounds),
        memory_(segments_ * (k + m) * column_bytes),
        made_(m * column_bytes),
        crcs_(segments_ * (k + m)) {
    Rng rng(7);
    for (std::size_t at = 0; at < memory_.size(); at += 8) put_le<std::uint64_t>(&memory_[at], rng.next());
    std::array<unsigned char, std::size_t{k + m} * k> matrix;
    gf_gen_rs_matrix(matrix.data(), k + m, k);
    ec_init_tables(k, m, &matrix[std::size_t{k} * k], factors_.data());
    for (std::size_t i = 0; i < 256 * 256; ++i) {
      products_[i] = gf_mul(static_cast<unsigned char>(i / 256), static_cast<unsigned char>(i % 256));
    }
    for (std::size_t s = 0; s < segments_; ++s) encode(s);
  }

  void run() {
    std::vector<Way> ways;
    ways.push_back({"isal_encode", -1, [&](std::size_t s) { isal_encode(s); }});
    ways.push_back({"encode_crc", 0, [&](std::size_t s) { encode(s); }});
    ways.push_back({"table_encode", -1, [&](std::size_t s) { table_encode(s); }, 16});
    ways.push_back({"encode_crc_to_table", 2, [&](std::size_t s) { encode(s); }});
    ways.push_back({"crc", -1, [&](std::size_t s) { verify(s); }});
    ways.push_back({"rebuild_1_crc", 4, [&](std::size_t s) { decode(s, 1u << s % k); }});
    ways.push_back({"rebuild_2_crc", 4, [&](std::size_t s) { decode(s, 1u << s % k | 1u << (s + 3) % k); }});
    std::vector<std::vector<double>> rates(ways.size());
    for (std::size_t round = 0; round < rounds_; ++round) {
      for (std::size_t w = 0; w < ways.size(); ++w) {
        std::size_t count = 0;
        const double seconds = seconds_of([&] {
          for (std::size_t s = 0; s < segments_; s += ways[w].every, ++count) ways[w].run(s);
        });
        rates[w].push_back(static_cast<double>(count * k * column_bytes_) / seconds);
      }
    }
    for (std::size_t w = 0; w < ways.size(); ++w) {
      std::vector<double> ratios;
      const int against = ways[w].against;
      for (std::size_t round = 0; round < rounds_ && against >= 0; ++round) {
        ratios.push_back(rates[w][round] / rates[static_cast<std::size_t>(against)][round]);
      }
      std::printf("%zu\t%s\t%.2f\t", column_bytes_ >> 10, ways[w].name.c_str(), median(rates[w]) / 1e9);
      ratios.empty() ? std::printf("-\n") : std::printf("%.2f\n", median(ratios));
    }
    std::fflush(stdout);
  }

 private:
  std::byte* column(std::size_t segment, std::size_t number) {
    return memory_.data() + (segment * (k + m) + number) * column_bytes_;
  }

  void isal_encode(std::size_t s) {
    std::array<unsigned char*, k> from;
    std::array<unsigned char*, m> to;
    for (std::size_t c = 0; c < k; ++c) from[c] = reinterpret_cast<unsigned char*>(column(s, c));
    for (std::size_t p = 0; p < m; ++p) to[p] = reinterpret_cast<unsigned char*>(column(s, k + p));
    ec_encode_data(static_cast<int>(column_bytes_), k, m, factors_.data(), from.data(), to.data());
  }

  void encode(std::size_t s) {
    std::array<ByteView, k> data;
    std::array<MutableByteView, m> parity;
    for (std::size_t c = 0; c < k; ++c) data[c] = {column(s, c), column_bytes_};
    for (std::size_t p = 0; p < m; ++p) parity[p] = {column(s, k + p), column_bytes_};
    code_.encode(data, parity, std::span(crcs_).subspan(s * (k + m), k + m));
  }

  void table_encode(std::size_t s) {
    std::uint8_t factor = 1;
    for (std::size_t c = 0; c < k; ++c) {
      const std::byte* from = column(s, c);
      for (std::size_t p = 0; p < m; ++p) {
        std::byte* to = made_.data() + p * column_bytes_;
        const std::uint8_t* row = products_.data() + std::size_t{p == 0 ? std::uint8_t{1} : factor} * 256;
        if (c == 0) std::fill_n(to, column_bytes_, std::byte{0});
        for (std::size_t at = 0; at < column_bytes_; ++at) {
          to[at] ^= static_cast<std::byte>(row[std::to_integer<std::size_t>(from[at])]);
        }
      }
      factor = gf_mul(factor, 2);
    }
    if (!std::equal(made_.begin(), made_.end(), column(s, k))) fail("the table makes another parity");
  }

  void verify(std::size_t s) {
    for (std::size_t c = 0; c < k; ++c) {
      if (crc32c({column(s, c), column_bytes_}) != crcs_[s * (k + m) + c]) fail("a checksum is wrong");
    }
  }

  void decode(std::size_t s, std::uint32_t lost) {
    std::array<store::Erasure::Present, k + m> given;
    std::array<store::Erasure::Wanted, m> wanted;
    std::size_t count = 0;
    for (std::uint32_t c = 0; c < k + m; ++c) {
      const std::uint32_t crc = crcs_[s * (k + m) + c];
      if ((lost >> c & 1u) != 0) {
        wanted[count] = {c, crc, {made_.data() + count * column_bytes_, column_bytes_}};
        ++count;
      } else {
        given[c] = {true, false, crc, {column(s, c), column_bytes_}};
      }
    }
    const auto wrong = code_.decode(given, std::span(wanted).first(count));
    if (!wrong || *wrong != 0) fail("a rebuilt column is wrong");
  }

  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "erasure_bench: %s\n", what);
    std::exit(1);
  }

  std::size_t column_bytes_;
  std::size_t segments_;
  std::size_t rounds_;
  store::Erasure code_ = *store::Erasure::create(k, m);
  Bytes memory_;
  Bytes made_;
  std::vector<std::uint32_t> crcs_;
  std::array<unsigned char, std::size_t{32} * k * m> factors_{};
  std::array<std::uint8_t, std::size_t{256} * 256> products_{};
};

}  // namespace

int main(int argc, char** argv) {
  const long rounds = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 11;
  if (rounds < 1 || rounds > 1000) {
    std::fprintf(stderr, "erasure_bench: ROUNDS must be 1 to 1000\n");
    return 64;
  }
  std::printf("column_kib\tway\tgb_per_s\tratio\n");
  for (const std::size_t kib : {64, 256, 1024}) {
    const auto bench = std::make_unique<Bench>(kib << 10, static_cast<std::size_t>(rounds));
    bench->run();
  }
  return 0;
}
