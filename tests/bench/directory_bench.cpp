// What the directory costs against its ceilings on this machine.
//
//   directory_bench [ROUNDS [BLOCKS]]
//
//   memory       bytes a block in the index: V4.1 pages of 8 blocks, stripes of 10+2
//   look-ups     match of chains of 1,000 blocks in the index, against bare open addressing (16 bytes of the
//   key
//                and 8 of value a cell, load 0.6) with prefetch in groups of 32
//   match        a message with 1,000 keys: encode, send, check and decode, match, answer; against a round
//   trip of
//                64 bytes on the same sockets (ZeroMQ over ipc, two threads)
//   persistence  rows of stripes in batches of 256, against one table with one blob of as many bytes
//
// Every round measures both sides, one after the other; a row is the median of the ratios.
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/assert.h"
#include "base/rng.h"
#include "base/sqlite.h"
#include "directory/catalogue.h"
#include "directory/index.h"
#include "wire/codec.h"

namespace {

using namespace di;
using namespace di::directory;

constexpr int chain_blocks = 1000;
constexpr int page_blocks = 8;
constexpr int stripe_pages = 10;
constexpr std::uint32_t segments = 4;
constexpr std::uint64_t page_bytes = 917504;

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Of this thread: the rest of the machine does not count.
double cpu_us() {
  timespec at{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
  return static_cast<double>(at.tv_sec) * 1e6 + static_cast<double>(at.tv_nsec) / 1e3;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total = 0;
  std::size_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

std::vector<std::vector<Key>> random_chains(std::size_t blocks, Rng& rng) {
  std::vector<std::vector<Key>> chains(blocks / chain_blocks, std::vector<Key>(chain_blocks));
  for (auto& chain : chains) {
    for (Key& key : chain) {
      for (std::size_t i = 0; i < key.raw.size(); i += 8) {
        const std::uint64_t word = rng.next();
        std::memcpy(key.raw.data() + i, &word, 8);
      }
    }
  }
  return chains;
}

std::vector<wire::PutPage> pages_of(const std::vector<Key>& chain, std::size_t first_block) {
  std::vector<wire::PutPage> pages;
  for (std::size_t at = first_block; at < chain.size() && pages.size() < stripe_pages; at += page_blocks) {
    wire::PutPage page;
    if (at > 0) page.parent = chain[at - 1];
    const std::size_t end = std::min(chain.size(), at + page_blocks);
    page.keys.assign(chain.begin() + static_cast<std::ptrdiff_t>(at),
                     chain.begin() + static_cast<std::ptrdiff_t>(end));
    page.crcs.assign(segments, static_cast<std::uint32_t>(at));
    page.bytes = page_bytes;
    pages.push_back(std::move(page));
  }
  return pages;
}

void fill(Index& index, const std::vector<std::vector<Key>>& chains) {
  const Instant now{1};
  const Holder host{"di-kvd.host0", 1};
  DI_ASSERT(index.host_up(host));
  for (int n = 0; n < 12; ++n) {
    const Holder store{"di-kvd.store" + std::to_string(n), 1};
    DI_ASSERT(index.store_up(store, now));
    DI_ASSERT(index.inventory(store, {0, true, {}}, now));
  }
  for (const auto& chain : chains) {
    for (std::size_t at = 0; at < chain.size(); at += page_blocks * stripe_pages) {
      const auto pages = pages_of(chain, at);
      const auto opened = index.put_open(host, {Key{}, pages}, now);
      DI_ASSERT(opened.code == 0 && opened.pages == pages.size());
      const StripeForm form = StripeForm::of_put({10, 2}, pages);
      const wire::StripeCode code{10, 2, std::vector<std::uint32_t>(form.code_crcs(segments), 1)};
      DI_ASSERT(index.put_commit(host, {opened.stripe, {}, code}, now).code == 0);
    }
  }
}

// ---- Look-ups ----------------------------------------------------------------------------------

class BareTable {
 public:
  explicit BareTable(std::size_t keys) : cells_(keys * 5 / 3) {}
  void add(const Key& key, std::uint64_t value) {
    std::size_t at = home(key);
    while (cells_[at].value != 0) at = at + 1 == cells_.size() ? 0 : at + 1;
    std::memcpy(cells_[at].prefix, key.raw.data(), 16);
    cells_[at].value = value;
  }
  std::size_t match(const std::vector<Key>& keys) const {
    constexpr std::size_t group = 32;
    std::size_t hits = 0;
    for (std::size_t from = 0; from < keys.size(); from += group) {
      const std::size_t to = std::min(keys.size(), from + group);
      for (std::size_t i = from; i < to; ++i) __builtin_prefetch(&cells_[home(keys[i])]);
      for (std::size_t i = from; i < to; ++i) {
        std::size_t at = home(keys[i]);
        while (cells_[at].value != 0 && std::memcmp(cells_[at].prefix, keys[i].raw.data(), 16) != 0) {
          at = at + 1 == cells_.size() ? 0 : at + 1;
        }
        if (cells_[at].value == 0) return hits;
        ++hits;
      }
    }
    return hits;
  }

 private:
  struct Cell {
    std::byte prefix[16];
    std::uint64_t value = 0;
  };
  [[nodiscard]] std::size_t home(const Key& key) const {
    std::uint64_t hash;
    std::memcpy(&hash, key.raw.data(), 8);
    return static_cast<std::size_t>((static_cast<unsigned __int128>(hash) * cells_.size()) >> 64);
  }
  std::vector<Cell> cells_;
};

void bench_lookups(Index& index, const std::vector<std::vector<Key>>& chains, int rounds, Rng& rng) {
  BareTable bare(chains.size() * chain_blocks);
  std::uint64_t value = 0;
  for (const auto& chain : chains) {
    for (const Key& key : chain) bare.add(key, ++value);
  }
  std::vector<double> ratios;
  std::vector<double> ours;
  std::vector<double> theirs;
  std::vector<double> counted;
  index.set_block_bytes(page_bytes / page_blocks);
  for (int round = 0; round < rounds; ++round) {
    std::vector<wire::meta_match> asked;
    for (int i = 0; i < 200; ++i) asked.push_back({Key{}, chains[rng.below(chains.size())]});
    std::size_t hits = 0;
    const double t0 = cpu_us();
    for (const wire::meta_match& match : asked) hits += index.match(match).hit_blocks;
    const double t1 = cpu_us();
    for (const wire::meta_match& match : asked) index.asked(match);
    counted.push_back((cpu_us() - t1) * 1000 / static_cast<double>(hits));
    for (int i = 0; i < 200; ++i) asked[static_cast<std::size_t>(i)].keys = chains[rng.below(chains.size())];
    const double t2 = cpu_us();
    std::size_t bare_hits = 0;
    for (const wire::meta_match& match : asked) bare_hits += bare.match(match.keys);
    const double t3 = cpu_us();
    DI_ASSERT(hits == 200U * chain_blocks && bare_hits == hits);
    ours.push_back((t1 - t0) * 1000 / static_cast<double>(hits));
    theirs.push_back((t3 - t2) * 1000 / static_cast<double>(hits));
    ratios.push_back(theirs.back() / ours.back());
  }
  std::printf("directory look-ups: %.1f ns a block, bare table %.1f ns; ratio %.2f (want at least 0.7)\n",
              median(ours), median(theirs), median(ratios));
  std::printf("  counted for the miss ratio: %.1f ns a block, after the answer; %.3f of them are followed\n",
              median(counted), index.miss_ratio().rate());
}

// ---- Match over ZeroMQ ---------------------------------------------------------------------------

void send_parts(void* socket, ByteView header, ByteView body) {
  DI_ASSERT(zmq_send(socket, header.data(), header.size(), body.empty() ? 0 : ZMQ_SNDMORE) >= 0);
  if (!body.empty()) DI_ASSERT(zmq_send(socket, body.data(), body.size(), 0) >= 0);
}

Bytes receive(void* socket) {
  zmq_msg_t message;
  zmq_msg_init(&message);
  DI_ASSERT(zmq_msg_recv(&message, socket, 0) >= 0);
  const auto* data = static_cast<const std::byte*>(zmq_msg_data(&message));
  Bytes out(data, data + zmq_msg_size(&message));
  zmq_msg_close(&message);
  return out;
}

void bench_match(Index& index, const std::vector<std::vector<Key>>& chains, int rounds, Rng& rng) {
  void* context = zmq_ctx_new();
  void* server = zmq_socket(context, ZMQ_PAIR);
  const std::string address = "ipc:///tmp/directory_bench." + std::to_string(::getpid());
  DI_ASSERT(zmq_bind(server, address.c_str()) == 0);
  // Answers a header alone with itself, and a match with its answer; ends at an empty message.
  std::thread thread([&] {
    for (;;) {
      const Bytes raw = receive(server);
      if (raw.empty()) return;
      int more = 0;
      std::size_t bytes = sizeof more;
      zmq_getsockopt(server, ZMQ_RCVMORE, &more, &bytes);
      if (more == 0) {
        send_parts(server, raw, {});
        continue;
      }
      zmq_msg_t message;
      zmq_msg_init(&message);
      DI_ASSERT(zmq_msg_recv(&message, server, 0) >= 0);
      const ByteView body(static_cast<const std::byte*>(zmq_msg_data(&message)), zmq_msg_size(&message));
      auto header = wire::header_decode(raw, body);
      DI_ASSERT(header);
      auto match = wire::body_decode<wire::meta_match>(body);
      DI_ASSERT(match);
      zmq_msg_close(&message);
      const Bytes answer = wire::body_encode(index.match(*match));
      wire::Header out = *header;
      out.number = wire::meta_matched::number;
      send_parts(server, wire::header_encode(out, answer), answer);
    }
  });
  void* client = zmq_socket(context, ZMQ_PAIR);
  DI_ASSERT(zmq_connect(client, address.c_str()) == 0);
  const Bytes small(64);
  std::vector<double> ratios;
  std::vector<double> ours;
  std::vector<double> theirs;
  for (int round = 0; round < rounds; ++round) {
    std::vector<double> bare;
    std::vector<double> full;
    for (int i = 0; i < 300; ++i) {
      const double t0 = now_us();
      send_parts(client, small, {});
      static_cast<void>(receive(client));
      bare.push_back(now_us() - t0);
    }
    for (int i = 0; i < 300; ++i) {
      const wire::meta_match match{Key{}, chains[rng.below(chains.size())]};
      const double t0 = now_us();
      const Bytes body = wire::body_encode(match);
      wire::Header header;
      header.number = wire::meta_match::number;
      send_parts(client, wire::header_encode(header, body), body);
      const Bytes raw = receive(client);
      const Bytes answer = receive(client);
      auto back = wire::header_decode(raw, answer);
      DI_ASSERT(back);
      auto matched = wire::body_decode<wire::meta_matched>(answer);
      DI_ASSERT(matched && matched->hit_blocks == chain_blocks);
      full.push_back(now_us() - t0);
    }
    ours.push_back(median(full));
    theirs.push_back(median(bare));
    ratios.push_back(ours.back() / theirs.back());
  }
  // What of it is work of ours, in CPU time.
  const wire::meta_match match{Key{}, chains.front()};
  const double t0 = cpu_us();
  Bytes body;
  for (int i = 0; i < 100; ++i) body = wire::body_encode(match);
  const double t1 = cpu_us();
  for (int i = 0; i < 100; ++i) static_cast<void>(wire::header_encode(wire::Header{}, body));
  const double t2 = cpu_us();
  for (int i = 0; i < 100; ++i) static_cast<void>(wire::body_decode<wire::meta_match>(body));
  const double t3 = cpu_us();
  zmq_send(client, "", 0, 0);
  thread.join();
  std::printf("  of it: encode %.1f us, two checksums %.1f us, decode %.1f us\n", (t1 - t0) / 100,
              (t2 - t1) / 50, (t3 - t2) / 100);
  zmq_close(client);
  zmq_close(server);
  zmq_ctx_term(context);
  std::printf(
      "match of 1,000 blocks: %.1f us, bare round trip of 64 bytes %.1f us; ratio %.2f (want at most 2.5)\n",
      median(ours), median(theirs), median(ratios));
}

// ---- Persistence -------------------------------------------------------------------------------

void bench_persistence(const std::vector<std::vector<Key>>& chains, int rounds) {
  constexpr std::size_t batch = 256;
  const std::string path = "/tmp/directory_bench." + std::to_string(::getpid()) + ".catalogue";
  const std::string bare_path = path + "-bare";
  const auto clean = [&] {
    for (const std::string& base : {path, bare_path}) {
      for (const char* suffix : {"", "-wal", "-shm", ".lock"}) ::unlink((base + suffix).c_str());
    }
  };
  clean();
  {
    auto catalogue = Catalogue::open(path);
    DI_ASSERT(catalogue);
    auto writer = catalogue->stripe_writer();
    DI_ASSERT(writer);
    auto bare = sqlite::Database::open(bare_path, sqlite::Synchronous::normal);
    DI_ASSERT(bare && bare->exec("CREATE TABLE stripe(id INTEGER PRIMARY KEY, body BLOB NOT NULL)"));
    auto insert = bare->prepare("INSERT INTO stripe(id, body) VALUES(?, ?)");
    DI_ASSERT(insert);
    std::vector<double> ratios;
    std::vector<double> ours;
    std::vector<double> theirs;
    std::uint64_t id = 0;
    for (int round = 0; round < rounds; ++round) {
      std::vector<StripeChange> changes;
      for (std::size_t i = 0; i < batch; ++i) {
        StripeRow row;
        row.id = ++id;
        row.pages = pages_of(chains[i % chains.size()], 0);
        row.code = {10, 2, std::vector<std::uint32_t>(2 * segments, 1)};
        for (std::uint16_t c = 0; c < 12; ++c)
          row.columns.push_back({"di-kvd.store" + std::to_string(c), 0, c});
        changes.push_back({row.id, std::move(row)});
      }
      // As many bytes as the row has: keys, checksums, heads of pages, columns.
      const Bytes body(32 + 32 + stripe_pages * (page_blocks * 32 + 16 + segments * 4) + 2 * segments * 4 +
                       12 * 20);
      const double t0 = now_us();
      DI_ASSERT(writer->write(changes));
      const double t1 = now_us();
      DI_ASSERT(bare->exec("BEGIN IMMEDIATE"));
      for (const StripeChange& change : changes) {
        DI_ASSERT(insert->bind(1, static_cast<std::int64_t>(change.id)).bind(2, ByteView(body)).run());
      }
      DI_ASSERT(bare->exec("COMMIT"));
      const double t2 = now_us();
      ours.push_back(batch / (t1 - t0) * 1e6);
      theirs.push_back(batch / (t2 - t1) * 1e6);
      ratios.push_back(ours.back() / theirs.back());
    }
    std::printf("persistence: %.0f stripes/s, bare SQLite rows %.0f; ratio %.2f (want at least 0.5)\n",
                median(ours), median(theirs), median(ratios));
  }
  clean();
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  const std::size_t blocks = argc > 2 ? static_cast<std::size_t>(std::atoll(argv[2])) : 1'000'000;
  Rng rng(1);
  const auto chains = random_chains(blocks, rng);
  const std::size_t before = resident_bytes();
  Index::Options options;
  options.blocks_max = chains.size() * chain_blocks;
  options.placement = {{10, 2}, false};
  Index index(options, Instant{0});
  fill(index, chains);
  std::printf("memory: %.1f bytes a block with %zu blocks in %zu stripes (want at most 64)\n",
              static_cast<double>(resident_bytes() - before) / static_cast<double>(index.blocks()),
              index.blocks(), index.stripes());
  bench_lookups(index, chains, rounds, rng);
  bench_match(index, chains, rounds, rng);
  bench_persistence(chains, rounds * 3);
  return 0;
}
