#include "store/server.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <future>

#include "kv/slots.h"
#include "tests/unit/store/shelf.h"

namespace di::store {
namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr Duration far_away = seconds(60);

// A host with an arena, a store daemon's server with a volume in memory, and the network between them.
struct ServerTest : testing::Test {
  ServerTest() : layout(kv::layout_v41()) {
    std::string name = testing::TempDir() + "di-store-XXXXXX";
    run_dir = ::mkdtemp(name.data());
    auto memory = std::make_unique<MemoryDisk>(24 * mib);
    disk = memory.get();
    EXPECT_TRUE(Volume::format(*disk, {4 * mib, {}}).ok());
    keeper = std::move(memory);
    owner = *kv::ArenaOwner::create({.name = "arena",
                                     .generation = host.generation,
                                     .payload_bytes = 16 * layout.page_bytes(8),
                                     .slots_max = 32,
                                     .entries_max = 8});
    slots.emplace(*kv::SlotPool::create({16 * layout.page_bytes(8), layout.page_bytes(1), 32}));
  }
  ~ServerTest() override {
    server.reset();
    arena_socket.reset();
    std::filesystem::remove_all(run_dir);
  }

  void listen() {
    auto made = transfer::ShmServer::listen(loop, run_dir + "/" + host.instance + ".arena",
                                            {owner->fd(), owner->bytes(), host.generation, host.instance},
                                            {{}, [this](const wire::arena_hello&) { ++detached; }});
    ASSERT_TRUE(made.ok()) << made.error().message;
    arena_socket = *std::move(made);
  }
  // The disk survives the server, as a file does.
  struct Borrowed final : Disk {
    explicit Borrowed(Disk& to) : disk(to) {}
    [[nodiscard]] std::uint64_t bytes() const override { return disk.bytes(); }
    Status read_pieces(std::uint64_t offset, std::span<const MutableByteView> to) override {
      return disk.read_pieces(offset, to);
    }
    Status write_pieces(std::uint64_t offset, std::span<const ByteView> from) override {
      return disk.write_pieces(offset, from);
    }
    Status flush() override { return disk.flush(); }
    Disk& disk;
  };
  void start(Server::Options options = {}) {
    auto volume = Volume::open(*disk);
    ASSERT_TRUE(volume.ok()) << volume.error().message;
    options.self = {"di-kvd.store0", 9};
    options.run_dir = run_dir;
    auto borrowed = std::make_unique<Borrowed>(*disk);
    auto pool = IoPool::create(loop, *borrowed, {.threads = 2, .queue_max = Server::io_queue_max(options)});
    ASSERT_TRUE(pool.ok()) << pool.error().message;
    server = std::make_unique<Server>(
        loop, std::move(borrowed), *std::move(volume), *std::move(pool), nullptr, options,
        Server::Hooks{[this](const wire::Envelope& message) { sent.push_back(message); }, mid_segment,
                      put_written});
    server->learn_layout(layout);
  }
  void start_with_host() {
    listen();
    start();
    server->host_up(host, true);
  }
  bool until(const std::function<bool()>& done) { return loop.run_until(done, far_away); }

  wire::SlotRef take(std::uint32_t blocks, kv::SlotState state) {
    const kv::SlotPlace place = *slots->take(layout.page_bytes(blocks));
    owner->slot_assign({place.slot, place.generation, blocks, place.offset, place.bytes, state});
    return {place.slot, place.generation, blocks, 0, blocks};
  }
  MutableByteView bytes_of(const wire::SlotRef& ref) {
    return owner->payload(slots->place(ref.slot).offset, layout.page_bytes(ref.page_blocks));
  }
  wire::SlotRef sealed_page(std::uint64_t stripe, std::uint32_t blocks) {
    const wire::SlotRef ref = take(blocks, kv::SlotState::sealed);
    const Bytes payload = payload_of(layout, stripe, blocks);
    std::copy(payload.begin(), payload.end(), bytes_of(ref).begin());
    return ref;
  }

  template <class M>
  void say(const Peer& from, const M& message) {
    server->on_message(wire::Envelope::make(from.instance, from.generation, {}, message));
  }
  template <class M>
  std::vector<M> got() {
    std::vector<M> out;
    for (const wire::Envelope& message : sent) {
      if (message.number == M::number) out.push_back(*message.as<M>());
    }
    return out;
  }

  wire::kv_put put_of(std::uint64_t stripe, std::uint32_t blocks, const wire::SlotRef& ref) {
    wire::kv_put put;
    put.stripe = stripe;
    put.fingerprint = layout.fingerprint();
    put.pages = {page_of(layout, stripe, blocks)};
    put.slot = ref;
    return put;
  }
  Code put(std::uint64_t stripe, std::uint32_t blocks) {
    const std::size_t before = got<wire::kv_put_done>().size();
    say(host, put_of(stripe, blocks, sealed_page(stripe, blocks)));
    EXPECT_TRUE(until([&] { return got<wire::kv_put_done>().size() > before; }));
    return static_cast<Code>(got<wire::kv_put_done>().back().code);
  }
  wire::kv_read read_of(std::uint64_t transfer, std::uint64_t stripe, const wire::SlotRef& ref) {
    wire::kv_read read;
    read.transfer = transfer;
    read.stripe = stripe;
    read.page_blocks = ref.page_blocks;
    read.slot = ref;
    return read;
  }
  // The answers to a transfer, once the last one is there.
  std::vector<wire::kv_read_done> read(std::uint64_t transfer, std::uint64_t stripe,
                                       const wire::SlotRef& ref) {
    say(host, read_of(transfer, stripe, ref));
    EXPECT_TRUE(until([&] {
      for (const auto& done : got<wire::kv_read_done>()) {
        if (done.transfer == transfer && (done.code != 0 || done.group + 1 == layout.groups())) return true;
      }
      return false;
    }));
    std::vector<wire::kv_read_done> out;
    for (const auto& done : got<wire::kv_read_done>()) {
      if (done.transfer == transfer) out.push_back(done);
    }
    return out;
  }

  kv::Layout layout;
  loop::Loop loop;
  std::string run_dir;
  Peer host{"di-kvd.host0", 4};
  Peer meta{"di-meta.0", 2};
  std::unique_ptr<Disk> keeper;
  MemoryDisk* disk = nullptr;
  std::unique_ptr<kv::ArenaOwner> owner;
  std::optional<kv::SlotPool> slots;
  std::unique_ptr<transfer::ShmServer> arena_socket;
  std::function<void()> mid_segment;
  std::function<void(std::function<void()>)> put_written;
  std::vector<wire::Envelope> sent;
  std::unique_ptr<Server> server;
  int detached = 0;
};

TEST_F(ServerTest, page_goes_to_the_volume_and_comes_back_in_order) {
  start_with_host();
  for (const std::uint32_t blocks : {1u, 5u, 8u}) {
    ASSERT_EQ(put(blocks, blocks), Code::ok);
    const wire::SlotRef target = take(blocks, kv::SlotState::filling);
    const auto answers = read(100 + blocks, blocks, target);
    // One for each access that arrived, each behind the one before it.
    for (std::size_t i = 0; i < answers.size(); ++i) {
      EXPECT_EQ(answers[i].code, 0u);
      EXPECT_TRUE(i == 0 || answers[i].group > answers[i - 1].group);
    }
    EXPECT_EQ(answers.back().group + 1, layout.groups());
    EXPECT_EQ(answers.size(), blocks < 5 ? 1u : 2u);
    const Bytes expected = payload_of(layout, blocks, blocks);
    const MutableByteView bytes = bytes_of(target);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), expected.begin(), expected.end()));
  }
  EXPECT_EQ(server->transfers(), 0u);
  EXPECT_EQ(server->puts(), 0u);
  EXPECT_EQ(server->counters().reads, 3u);
  EXPECT_EQ(server->counters().puts, 3u);
  EXPECT_EQ(server->volume().stats().reading, 0u);
}

TEST_F(ServerTest, read_starts_at_the_group_asked_for) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  wire::kv_read want = read_of(5, 1, take(2, kv::SlotState::filling));
  want.from_group = 2;
  say(host, want);
  ASSERT_TRUE(until([&] { return server->transfers() == 0; }));
  const auto answers = got<wire::kv_read_done>();
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].group, 3u);
  EXPECT_EQ(bytes_of(want.slot)[0], std::byte{0});
}

TEST_F(ServerTest, wrong_reads_have_their_codes) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  const wire::SlotRef target = take(2, kv::SlotState::filling);
  EXPECT_EQ(read(1, 99, target).back().code, static_cast<std::uint16_t>(Code::not_found));
  wire::kv_read other = read_of(2, 1, target);
  other.volume = 1;
  say(host, other);
  EXPECT_EQ(got<wire::kv_read_done>().back().code, static_cast<std::uint16_t>(Code::not_found));
  EXPECT_EQ(read(3, 1, take(3, kv::SlotState::filling)).back().code,
            static_cast<std::uint16_t>(Code::corrupt));
  wire::SlotRef old = target;
  ++old.generation;
  EXPECT_EQ(read(4, 1, old).back().code, static_cast<std::uint16_t>(Code::stale));
  EXPECT_EQ(read(5, 1, sealed_page(7, 2)).back().code, static_cast<std::uint16_t>(Code::stale));
  EXPECT_EQ(server->transfers(), 0u);
}

// The first read since the volume was opened compares the payload; the host compares all of them.
TEST_F(ServerTest, damaged_segment_ends_the_first_read_behind_the_good_ones) {
  start_with_host();
  ASSERT_EQ(put(1, 8), Code::ok);
  ASSERT_EQ(put(2, 8), Code::ok);
  const std::uint64_t slot = server->volume().geometry().segment_offset(0);
  server.reset();
  start();
  server->host_up(host, true);
  ASSERT_EQ(read(5, 2, take(8, kv::SlotState::filling)).back().code, 0u);
  disk->flip_bit(slot + 4096 + layout.segment_offset(3, 8) + 77, 0);
  const auto answers = read(1, 1, take(8, kv::SlotState::filling));
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_EQ(answers[0].code, 0u);
  EXPECT_LT(answers[0].group, 3u);
  EXPECT_EQ(answers[1].code, static_cast<std::uint16_t>(Code::corrupt));
  EXPECT_EQ(server->counters().reads_corrupt, 1u);
  // A header is compared by every read.
  disk->flip_bit(server->volume().geometry().segment_offset(0) + slot_class_of(layout, 8).slot_bytes + 100, 0);
  EXPECT_EQ(read(6, 2, take(8, kv::SlotState::filling)).back().code, static_cast<std::uint16_t>(Code::corrupt));
}

TEST_F(ServerTest, cancelled_read_writes_nothing_after_its_answer) {
  std::promise<void> reached;
  std::promise<void> gate;
  auto opened = gate.get_future().share();
  std::atomic<int> segments{0};
  mid_segment = [&, opened] {
    if (segments.fetch_add(1) == 1) {
      reached.set_value();
      opened.wait();
    }
  };
  start_with_host();
  ASSERT_EQ(put(1, 8), Code::ok);
  const wire::SlotRef target = take(8, kv::SlotState::filling);
  say(host, read_of(1, 1, target));
  reached.get_future().wait();
  say(host, wire::kv_read_cancel{1});
  EXPECT_TRUE(got<wire::kv_read_cancelled>().empty());  // a segment is being written
  gate.set_value();
  ASSERT_TRUE(until([&] { return !got<wire::kv_read_cancelled>().empty(); }));
  EXPECT_EQ(segments.load(), 2);
  EXPECT_EQ(bytes_of(target)[layout.segment_offset(2, 8)], std::byte{0});
  EXPECT_EQ(server->transfers(), 0u);
  EXPECT_EQ(server->counters().reads_cancelled, 1u);
}

TEST_F(ServerTest, cancel_of_anything_else_is_answered_at_once) {
  start_with_host();
  say(host, wire::kv_read_cancel{77});
  EXPECT_EQ(got<wire::kv_read_cancelled>(), std::vector<wire::kv_read_cancelled>{{77}});
}

TEST_F(ServerTest, what_comes_before_the_arena_waits_for_it) {
  listen();
  start();
  server->host_up(host, true);
  EXPECT_EQ(server->arenas(), 0u);
  EXPECT_EQ(put(1, 2), Code::ok);
  EXPECT_EQ(server->arenas(), 1u);
  // And can be cancelled there.
  server->host_lost(host);
  host.generation = 5;
  owner->set_generation(5);
  arena_socket.reset();
  listen();
  server->host_up(host, true);
  say(host, read_of(9, 1, take(2, kv::SlotState::filling)));
  EXPECT_EQ(server->transfers(), 1u);
  say(host, wire::kv_read_cancel{9});
  EXPECT_EQ(server->transfers(), 0u);
  EXPECT_EQ(got<wire::kv_read_cancelled>().size(), 1u);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  EXPECT_TRUE(got<wire::kv_read_done>().empty());
}

TEST_F(ServerTest, host_without_a_socket_is_unreachable) {
  start();
  server->host_up(host, true);
  EXPECT_EQ(put(1, 2), Code::unreachable);
  EXPECT_EQ(read(1, 1, take(2, kv::SlotState::filling)).back().code,
            static_cast<std::uint16_t>(Code::unreachable));
  listen();
  EXPECT_EQ(put(1, 2), Code::ok);
}

TEST_F(ServerTest, without_a_fabric_a_host_on_another_machine_is_unsupported) {
  listen();
  start();
  server->host_up(host, false);
  EXPECT_EQ(put(1, 2), Code::unsupported);
  EXPECT_EQ(read(1, 1, take(2, kv::SlotState::filling)).back().code,
            static_cast<std::uint16_t>(Code::unsupported));
}

TEST_F(ServerTest, unknown_hosts_are_not_answered) {
  start_with_host();
  say(Peer{host.instance, 3}, read_of(1, 1, take(2, kv::SlotState::filling)));
  say(Peer{"di-kvd.host9", 4}, put_of(1, 2, sealed_page(1, 2)));
  EXPECT_TRUE(sent.empty());
  EXPECT_EQ(server->transfers(), 0u);
}

TEST_F(ServerTest, loss_of_a_host_ends_its_transfers_without_answers) {
  std::promise<void> reached;
  std::promise<void> gate;
  auto opened = gate.get_future().share();
  std::atomic<int> segments{0};
  mid_segment = [&, opened] {
    if (segments.fetch_add(1) == 0) {
      reached.set_value();
      opened.wait();
    }
  };
  start_with_host();
  ASSERT_EQ(put(1, 8), Code::ok);
  sent.clear();
  say(host, read_of(1, 1, take(8, kv::SlotState::filling)));
  reached.get_future().wait();
  server->host_lost(host);
  gate.set_value();
  ASSERT_TRUE(until([&] { return server->transfers() == 0; }));
  EXPECT_EQ(server->volume().stats().reading, 0u);
  for (const auto& done : got<wire::kv_read_done>()) EXPECT_EQ(done.code, 0u);
  EXPECT_TRUE(got<wire::kv_read_cancelled>().empty());
}

TEST_F(ServerTest, end_of_the_arena_socket_unmaps) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  arena_socket.reset();
  ASSERT_TRUE(until([&] { return server->arenas() == 0; }));
}

TEST_F(ServerTest, wrong_puts_have_their_codes) {
  start_with_host();
  const wire::SlotRef page = sealed_page(1, 2);
  const auto code = [&](const wire::kv_put& want) {
    const std::size_t before = got<wire::kv_put_done>().size();
    say(host, want);
    EXPECT_TRUE(until([&] { return got<wire::kv_put_done>().size() > before; }));
    return static_cast<Code>(got<wire::kv_put_done>().back().code);
  };
  wire::kv_put want = put_of(1, 2, page);
  want.fingerprint.raw[0] ^= std::byte{1};
  EXPECT_EQ(code(want), Code::unsupported);
  want = put_of(1, 2, page);
  want.pages.clear();
  EXPECT_EQ(code(want), Code::invalid);
  want = put_of(1, 2, page);
  want.volume = 3;
  EXPECT_EQ(code(want), Code::not_found);
  want = put_of(1, 2, page);
  ++want.slot.generation;
  EXPECT_EQ(code(want), Code::stale);
  want = put_of(1, 3, page);  // another length than the slot's
  EXPECT_EQ(code(want), Code::stale);
  bytes_of(page)[5000] ^= std::byte{1};
  EXPECT_EQ(code(put_of(1, 2, page)), Code::corrupt);
  bytes_of(page)[5000] ^= std::byte{1};
  EXPECT_EQ(code(put_of(1, 2, page)), Code::ok);
  EXPECT_EQ(code(put_of(1, 2, page)), Code::ok);  // a repetition
  EXPECT_EQ(server->counters().puts, 1u);
  EXPECT_EQ(server->puts(), 0u);
}

TEST_F(ServerTest, full_volume_answers_no_space_until_stripes_are_freed) {
  start_with_host();
  const wire::SlotRef page = sealed_page(1, 8);
  std::vector<std::uint64_t> written;
  Code last = Code::ok;
  for (std::uint64_t stripe = 1; last == Code::ok; ++stripe) {
    wire::kv_put want = put_of(1, 8, page);  // the same bytes under many stripes
    want.stripe = stripe;
    const std::size_t before = got<wire::kv_put_done>().size();
    say(host, want);
    ASSERT_TRUE(until([&] { return got<wire::kv_put_done>().size() > before; }));
    last = static_cast<Code>(got<wire::kv_put_done>().back().code);
    if (last == Code::ok) written.push_back(stripe);
  }
  EXPECT_EQ(last, Code::no_space);
  EXPECT_GT(written.size(), 10u);
  say(meta, wire::kv_free{{written[0], written[1], 12345}});
  EXPECT_EQ(server->counters().columns_freed, 2u);
  EXPECT_EQ(put(1000, 8), Code::ok);
}

TEST_F(ServerTest, strict_put_is_acknowledged_after_a_flush) {
  listen();
  Server::Options options;
  options.strict = true;
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  const std::uint64_t flushes = disk->flushes;
  ASSERT_EQ(put(1, 8), Code::ok);
  EXPECT_GT(disk->flushes, flushes);
  Rng rng(1);
  // The power goes at once: what was acknowledged is there.
  ASSERT_TRUE(until([&] { return server->volume().clean(); }));
  server.reset();
  disk->power_loss(rng);
  auto volume = Volume::open(*disk);
  ASSERT_TRUE(volume.ok());
  EXPECT_TRUE((*volume)->read_begin(1, 0).ok());
}

TEST_F(ServerTest, strict_put_fails_when_the_flush_does) {
  listen();
  Server::Options options;
  options.strict = true;
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  disk->fail_flush = true;
  EXPECT_EQ(put(1, 8), Code::io);
  EXPECT_TRUE(server->volume().broken());
  EXPECT_EQ(put(2, 8), Code::io);
}

TEST_F(ServerTest, answer_to_a_put_goes_through_the_fault_point) {
  std::function<void()> held;
  put_written = [&](std::function<void()> answer) { held = std::move(answer); };
  start_with_host();
  say(host, put_of(1, 2, sealed_page(1, 2)));
  ASSERT_TRUE(until([&] { return held != nullptr; }));
  EXPECT_TRUE(got<wire::kv_put_done>().empty());
  EXPECT_EQ(server->volume().stats().slots_live, 1u);
  held();
  EXPECT_EQ(got<wire::kv_put_done>().size(), 1u);
}

TEST_F(ServerTest, inventory_tells_what_is_there_and_frees_what_nobody_knows) {
  start_with_host();
  for (std::uint64_t stripe = 1; stripe <= 3; ++stripe) ASSERT_EQ(put(stripe, 2), Code::ok);
  server->meta_up(meta);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  const wire::meta_inventory part = got<wire::meta_inventory>()[0];
  EXPECT_EQ(part.cursor, 0u);
  EXPECT_TRUE(part.last);
  ASSERT_EQ(part.shards.size(), 3u);
  for (std::uint64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(part.shards[i].stripe, i + 1);
    EXPECT_EQ(part.shards[i].fingerprint, layout.fingerprint());
    EXPECT_EQ(part.shards[i].pages, std::vector<wire::PutPage>{page_of(layout, i + 1, 2)});
  }
  EXPECT_TRUE(server->inventory_running());
  say(Peer{"di-meta.0", 1}, wire::meta_inventory_ack{0, {1, 2, 3}});  // an earlier di-meta's
  say(meta, wire::meta_inventory_ack{4, {1, 2, 3}});                  // another part's
  EXPECT_EQ(server->counters().columns_freed, 0u);
  say(meta, wire::meta_inventory_ack{0, {2}});
  EXPECT_FALSE(server->inventory_running());
  EXPECT_EQ(server->counters().columns_freed, 1u);
  EXPECT_EQ(server->volume().stats().slots_live, 2u);
}

TEST_F(ServerTest, inventory_ends_with_di_meta_and_starts_over_with_the_next) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  server->meta_up(meta);
  server->meta_lost(meta);
  EXPECT_FALSE(server->inventory_running());
  const Peer next{"di-meta.0", 3};
  server->meta_up(next);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  ASSERT_EQ(got<wire::meta_inventory>().size(), 1u);
  EXPECT_EQ(sent.back().peer_generation, 3u);
}

TEST_F(ServerTest, slot_without_a_good_header_is_dropped_by_the_inventory) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  ASSERT_EQ(put(2, 2), Code::ok);
  disk->flip_bit(server->volume().geometry().segment_offset(0) + 100, 0);
  server->meta_up(meta);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  ASSERT_EQ(got<wire::meta_inventory>()[0].shards.size(), 1u);
  EXPECT_EQ(got<wire::meta_inventory>()[0].shards[0].stripe, 2u);
  EXPECT_EQ(server->counters().slots_dropped, 1u);
  EXPECT_EQ(server->volume().stats().slots_live, 1u);
}

TEST_F(ServerTest, stop_writes_everything_behind) {
  start_with_host();
  for (std::uint64_t stripe = 1; stripe <= 5; ++stripe) ASSERT_EQ(put(stripe, 2), Code::ok);
  bool stopped = false;
  server->stop([&] { stopped = true; });
  EXPECT_EQ(put(6, 2), Code::busy);
  ASSERT_TRUE(until([&] { return stopped; }));
  EXPECT_TRUE(server->volume().clean());
  server.reset();
  auto volume = Volume::open(*disk);
  ASSERT_TRUE(volume.ok());
  EXPECT_EQ((*volume)->stats().recovered_by_header, 0u);
  EXPECT_EQ((*volume)->stats().slots_live, 5u);
}

}  // namespace
}  // namespace di::store
