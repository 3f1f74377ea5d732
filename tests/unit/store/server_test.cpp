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

// The other machine's arena, reached at once; the ends of operations come in later turns.
class NearFabric final : public transfer::Fabric {
 public:
  NearFabric(loop::Loop& loop, kv::ArenaOwner& owner, std::function<void(transfer::OpId, Code)> done)
      : loop_(loop), owner_(owner), done_(std::move(done)) {}
  void set_events(Events) override {}
  Status expose(const Peer&, transfer::TransferId, transfer::Access,
                std::vector<transfer::SlotName>) override {
    return {};
  }
  Status extend(const Peer&, transfer::TransferId, std::vector<transfer::SlotName>) override { return {}; }
  void conceal(const Peer&, transfer::TransferId) override {}
  Result<transfer::Ticket> grant(const Peer&, bool) override { return transfer::Ticket{}; }
  void ticket(const Peer&, const std::string&, const transfer::Ticket&) override {}
  void ticket_refused(const Peer&) override {}
  Result<transfer::OpId> write(const Peer&, transfer::TransferId, const transfer::Place& to, ByteView from,
                               transfer::Class) override {
    return move(to, [&](MutableByteView there) { std::copy(from.begin(), from.end(), there.begin()); });
  }
  Result<transfer::OpId> read(const Peer&, transfer::TransferId, const transfer::Place& from,
                              MutableByteView into, transfer::Class) override {
    return move(from, [&](MutableByteView there) { std::copy(there.begin(), there.end(), into.begin()); });
  }
  void cancel(transfer::OpId) override {}
  void peer_lost(const Peer&) override {}
  void see_arrivals() const override {}
  [[nodiscard]] transfer::Region* view(const Peer&) override { return nullptr; }
  [[nodiscard]] transfer::LinkState link(const Peer&) const override { return {}; }
  [[nodiscard]] transfer::FabricGauges gauges() const override { return {}; }
  [[nodiscard]] transfer::FabricCounters counters() const override { return {}; }

  std::uint64_t moves = 0;
  std::optional<std::uint64_t> fail_in;  // 0: the next one

 private:
  Result<transfer::OpId> move(const transfer::Place& place,
                              const std::function<void(MutableByteView)>& copy) {
    const transfer::OpId op = ++moves;
    Code code = Code::ok;
    if (fail_in && (*fail_in)-- == 0) {
      fail_in.reset();
      code = Code::unreachable;
    } else {
      const auto slot = owner_.slot_bytes(place.slot.slot, place.slot.generation);
      EXPECT_TRUE(slot.ok() && place.bytes > 0 && place.offset + place.bytes <= slot->size());
      copy(slot->subspan(place.offset, place.bytes));
    }
    loop_.post("moved", [this, op, code] { done_(op, code); });
    return op;
  }

  loop::Loop& loop_;
  kv::ArenaOwner& owner_;
  std::function<void(transfer::OpId, Code)> done_;
};

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
    Borrowed(Disk& to, const std::function<void()>& hook, const std::optional<std::uint64_t>& end)
        : disk(to), before_read(hook), cut_at(end) {}
    [[nodiscard]] std::uint64_t bytes() const override { return disk.bytes(); }
    [[nodiscard]] Result<std::uint64_t> bytes_now() const override { return cut_at.value_or(disk.bytes()); }
    Status read_pieces(std::uint64_t offset, std::span<const MutableByteView> to) override {
      if (before_read) before_read();
      return disk.read_pieces(offset, to);
    }
    Status write_pieces(std::uint64_t offset, std::span<const ByteView> from) override {
      return disk.write_pieces(offset, from);
    }
    Status flush() override { return disk.flush(); }
    Disk& disk;
    const std::function<void()>& before_read;
    const std::optional<std::uint64_t>& cut_at;
  };
  Mount::Backing backing_of(MemoryDisk& memory, std::size_t number,
                            std::shared_ptr<DiskFigures> figures = {}) {
    Mount::Backing backing;
    backing.path = "volume" + std::to_string(number);
    auto borrowed = std::make_unique<Borrowed>(memory, before_read, cut_at);
    auto volume = Volume::open(memory);
    if (!volume && may_be_refused) {
      backing.refused = volume.error();
      return backing;
    }
    EXPECT_TRUE(volume.ok()) << volume.error().message;
    auto pool =
        IoPool::create(loop, *borrowed,
                       {.threads = 2, .queue_max = Server::io_queue_max({}), .figures = std::move(figures)});
    EXPECT_TRUE(pool.ok()) << pool.error().message;
    backing.disk = std::move(borrowed);
    backing.volume = *std::move(volume);
    backing.pool = *std::move(pool);
    return backing;
  }
  void start(Server::Options options = {}) {
    options.self = {"di-kvd.store0", 9};
    options.run_dir = run_dir;
    if (!scrubs) options.scrub.interval = Duration{0};
    std::vector<Mount::Backing> volumes;
    for (MemoryDisk* each : disks()) volumes.push_back(backing_of(*each, volumes.size()));
    server = std::make_unique<Server>(
        loop, std::move(volumes), fabric.get(), options,
        Server::Hooks{[this](const wire::Envelope& message) { sent.push_back(message); }, mid_segment,
                      put_written, [this] { ++beats; }, [this] { ++looks; }});
    server->learn_layout(layout);
  }
  // Volume 0, and what add_volumes() made.
  std::vector<MemoryDisk*> disks() {
    std::vector<MemoryDisk*> all{disk};
    for (const auto& one : more_disks) all.push_back(one.get());
    return all;
  }
  void add_volumes(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      more_disks.push_back(std::make_unique<MemoryDisk>(24 * mib));
      Uuid uuid{};
      uuid[0] = static_cast<std::byte>(i + 1);
      EXPECT_TRUE(Volume::format(*more_disks.back(), {4 * mib, uuid}).ok());
    }
  }
  Mount& mount(std::size_t number = 0) { return *server->mounts().at(number); }
  // With everything written behind before, so that no slot is read when the volume is opened.
  void restart() {
    bool stopped = false;
    server->stop([&] { stopped = true; });
    ASSERT_TRUE(until([&] { return stopped; }));
    server.reset();
    start();
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
    put.code.data_columns = 1;
    put.slot = ref;
    put.tenant = 1000 + stripe;
    return put;
  }
  // Pages in sealed slots and parity in scratch slots, as a host has them before it puts a stripe.
  struct Stripe {
    kv::StripeShape shape;
    wire::kv_put put;
    std::vector<wire::SlotRef> slots;  // of the pages, then of the parity columns
    std::vector<Bytes> columns;        // by column number; as they are stored
  };
  Stripe stripe_of(std::uint64_t number, std::uint16_t k, std::uint16_t m,
                   const std::vector<std::uint32_t>& blocks) {
    Stripe out{*kv::StripeShape::of(layout, k, m, blocks), {}, {}, {}};
    const kv::StripeShape& shape = out.shape;
    out.put.stripe = number;
    out.put.fingerprint = layout.fingerprint();
    for (std::uint32_t page = 0; page < blocks.size(); ++page) {
      const std::uint64_t seed = number * 100 + page;
      out.slots.push_back(sealed_page(seed, blocks[page]));
      out.put.pages.push_back(page_of(layout, seed, blocks[page]));
    }
    for (std::uint32_t p = 0; p < m; ++p) {
      out.slots.push_back(take(shape.parity_slot_blocks(), kv::SlotState::filling));
    }
    out.put.code = {k, m, std::vector<std::uint32_t>(shape.crcs_count())};
    out.columns.resize(k + m);
    const Erasure code = *Erasure::create(k, m);
    for (std::uint32_t group = 0; group < shape.groups(); ++group) {
      std::vector<ByteView> data(k);
      std::vector<MutableByteView> parity;
      for (std::uint32_t c = 0; c < shape.data_stored(); ++c) {
        data[c] = bytes_of(out.slots[shape.page_of(c)])
                      .subspan(shape.page_offset(c, group), shape.segment_bytes(c, group));
      }
      for (std::uint32_t p = 0; p < m; ++p) {
        parity.push_back(bytes_of(out.slots[blocks.size() + p])
                             .subspan(shape.column_offset(k + p, group), shape.segment_bytes(k + p, group)));
      }
      std::vector<std::uint32_t> crcs(k + m);
      code.encode(data, parity, crcs);
      for (std::uint32_t i = 0; i < shape.columns_stored(); ++i) {
        const std::uint32_t column = shape.stored_column(i);
        const ByteView bytes = shape.is_parity(column) ? ByteView(parity[column - k]) : data[column];
        out.columns[column].insert(out.columns[column].end(), bytes.begin(), bytes.end());
        if (const auto at = shape.crc_index(column, group)) out.put.code.crcs[*at] = crcs[column];
      }
    }
    return out;
  }
  Code put(const Stripe& stripe, std::uint32_t column) {
    const kv::StripeShape& shape = stripe.shape;
    wire::kv_put want = stripe.put;
    want.column = static_cast<std::uint16_t>(column);
    want.slot = stripe.slots[shape.is_parity(column) ? shape.pages() + column - shape.data_columns()
                                                     : shape.page_of(column)];
    const std::size_t before = got<wire::kv_put_done>().size();
    say(host, want);
    EXPECT_TRUE(until([&] { return got<wire::kv_put_done>().size() > before; }));
    return static_cast<Code>(got<wire::kv_put_done>().back().code);
  }
  void give_back(const wire::SlotRef& ref) {
    owner->slot_free(ref.slot);
    slots->give_back(ref.slot);
  }
  // Reads every column back into fresh slots and compares; the slots of the stripe are given back before.
  void expect_columns(const Stripe& stripe) {
    const kv::StripeShape& shape = stripe.shape;
    std::uint64_t transfer = stripe.put.stripe * 1000;
    for (std::uint32_t page = 0; page < shape.pages() + shape.parity_columns(); ++page) {
      const bool parity = page >= shape.pages();
      const std::uint32_t blocks = parity ? shape.parity_slot_blocks() : shape.page_blocks(page);
      const wire::SlotRef target = take(blocks, kv::SlotState::filling);
      std::fill(bytes_of(target).begin(), bytes_of(target).end(), std::byte{0xee});
      for (std::uint32_t i = 0; i < shape.columns_stored(); ++i) {
        const std::uint32_t column = shape.stored_column(i);
        const std::uint32_t slot =
            shape.is_parity(column) ? shape.pages() + column - shape.data_columns() : shape.page_of(column);
        if (slot != page) continue;
        SCOPED_TRACE("column " + std::to_string(column));
        wire::kv_read want = read_of(++transfer, stripe.put.stripe, target);
        want.column = static_cast<std::uint16_t>(column);
        const auto answers = answers_to(want);
        ASSERT_FALSE(answers.empty());
        ASSERT_EQ(answers.back().code, 0u);
        EXPECT_EQ(answers.back().group + 1, layout.groups());
        std::uint64_t at = 0;
        for (std::uint32_t group = 0; group < shape.groups(); ++group) {
          const std::uint64_t bytes = shape.segment_bytes(column, group);
          const std::uint64_t offset =
              parity ? shape.column_offset(column, group) : shape.page_offset(column, group);
          EXPECT_TRUE(std::equal(stripe.columns[column].begin() + static_cast<std::ptrdiff_t>(at),
                                 stripe.columns[column].begin() + static_cast<std::ptrdiff_t>(at + bytes),
                                 bytes_of(target).begin() + static_cast<std::ptrdiff_t>(offset)));
          at += bytes;
        }
      }
      if (!parity) {
        EXPECT_TRUE(
            std::ranges::equal(bytes_of(target), payload_of(layout, stripe.put.stripe * 100 + page, blocks)));
      }
      give_back(target);
    }
  }
  Code put(std::uint64_t stripe, std::uint32_t blocks) {
    const std::size_t before = got<wire::kv_put_done>().size();
    say(host, put_of(stripe, blocks, sealed_page(stripe, blocks)));
    EXPECT_TRUE(until([&] { return got<wire::kv_put_done>().size() > before; }));
    return static_cast<Code>(got<wire::kv_put_done>().back().code);
  }
  Code put_to(std::uint16_t volume, std::uint64_t stripe, std::uint32_t blocks) {
    const std::size_t before = got<wire::kv_put_done>().size();
    const wire::SlotRef ref = sealed_page(stripe, blocks);
    wire::kv_put want = put_of(stripe, blocks, ref);
    want.volume = volume;
    say(host, want);
    EXPECT_TRUE(until([&] { return got<wire::kv_put_done>().size() > before; }));
    give_back(ref);
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
    return answers_to(read_of(transfer, stripe, ref));
  }
  std::vector<wire::kv_read_done> answers_to(const wire::kv_read& want) {
    const std::uint64_t transfer = want.transfer;
    say(host, want);
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
  std::vector<std::unique_ptr<MemoryDisk>> more_disks;
  bool may_be_refused = false;
  std::unique_ptr<kv::ArenaOwner> owner;
  std::optional<kv::SlotPool> slots;
  std::unique_ptr<transfer::ShmServer> arena_socket;
  std::function<void()> mid_segment;
  std::optional<std::uint64_t> cut_at;  // where every disk ends now
  std::function<void()> before_read;  // on the disk's threads; set while nothing reads
  std::function<void(std::function<void()>)> put_written;
  std::vector<wire::Envelope> sent;
  std::unique_ptr<NearFabric> fabric;
  std::unique_ptr<Server> server;
  int detached = 0;
  int beats = 0;
  std::uint64_t looks = 0;  // at disks that have not failed
  bool scrubs = false;
};

TEST_F(ServerTest, page_goes_to_the_volume_and_comes_back_in_order) {
  start_with_host();
  for (const std::uint32_t blocks : {1u, 5u, 8u}) {
    ASSERT_EQ(put(blocks, blocks), Code::ok);
    const wire::SlotRef target = take(blocks, kv::SlotState::filling);
    const auto answers = read(100 + blocks, blocks, target);
    // One for each access that arrived, each behind the one before it; or for both at once.
    for (std::size_t i = 0; i < answers.size(); ++i) {
      EXPECT_EQ(answers[i].code, 0u);
      EXPECT_TRUE(i == 0 || answers[i].group > answers[i - 1].group);
    }
    EXPECT_EQ(answers.back().group + 1, layout.groups());
    EXPECT_LE(answers.size(), blocks < 5 ? 1u : 2u);
    const Bytes expected = payload_of(layout, blocks, blocks);
    const MutableByteView bytes = bytes_of(target);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), expected.begin(), expected.end()));
  }
  EXPECT_EQ(server->transfers(), 0u);
  EXPECT_EQ(server->puts(), 0u);
  EXPECT_EQ(server->counters().reads, 3u);
  EXPECT_EQ(server->counters().puts, 3u);
  EXPECT_EQ(mount().volume().stats().reading, 0u);
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
  EXPECT_EQ(read(3, 1, take(3, kv::SlotState::filling)).back().code, static_cast<std::uint16_t>(Code::stale));
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
  const std::uint64_t slot = mount().volume().geometry().segment_offset(0);
  restart();
  server->host_up(host, true);
  ASSERT_EQ(read(5, 2, take(8, kv::SlotState::filling)).back().code, 0u);
  disk->flip_bit(slot + 4096 + layout.segment_offset(3, 8) + 77, 0);
  const auto answers = read(1, 1, take(8, kv::SlotState::filling));
  for (std::size_t i = 0; i + 1 < answers.size(); ++i) {
    EXPECT_EQ(answers[i].code, 0u);
    EXPECT_LT(answers[i].group, 3u);
  }
  EXPECT_EQ(answers.back().code, static_cast<std::uint16_t>(Code::corrupt));
  EXPECT_EQ(server->counters().reads_corrupt, 1u);
  // The header of one that was compared is left alone: the host has the checksums of its plan.
  disk->flip_bit(mount().volume().geometry().segment_offset(0) +
                     slot_class_of(layout, layout.page_bytes(8)).slot_bytes + 100,
                 0);
  const std::uint64_t reads = disk->reads;
  EXPECT_EQ(read(6, 2, take(8, kv::SlotState::filling)).back().code, 0u);
  EXPECT_EQ(disk->reads, reads + 2);
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
  EXPECT_EQ(mount().volume().stats().reading, 0u);
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

// F03: a free that overlaps the put finds it or does not; after one that comes last nothing is there, now and
// after a stop, and what comes back after a kill is freed when di-meta hears of it.
TEST_F(ServerTest, column_that_is_freed_last_is_gone) {
  Rng rng(3);
  start_with_host();
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  const wire::kv_put want = put_of(1, 1, sealed_page(1, 1));
  const wire::SlotRef target = take(1, kv::SlotState::filling);
  const auto gone = [&] {
    EXPECT_EQ(mount().volume().stats().slots_live, 0u);
    say(host, read_of(1, 1, target));
    EXPECT_EQ(got<wire::kv_read_done>().back().code, static_cast<std::uint16_t>(Code::not_found));
  };
  for (int round = 0; round < 10000; ++round) {
    SCOPED_TRACE(round);
    sent.clear();
    say(host, want);
    for (std::uint64_t turn = rng.below(6); turn > 0; --turn) loop.run_ready();
    if (rng.chance(0.5)) say(meta, wire::kv_free{{1}, {}});
    ASSERT_TRUE(until([&] { return !got<wire::kv_put_done>().empty(); }));
    ASSERT_EQ(got<wire::kv_put_done>()[0].code, 0u);
    say(meta, wire::kv_free{{1}, {}});
    gone();
    if (round % 500 != 0) continue;
    const bool kill = rng.chance(0.5);
    if (kill) {
      server.reset();
      start();
    } else {
      restart();
      EXPECT_EQ(mount().volume().stats().slots_live, 0u);
    }
    server->host_up(host, true);
    ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
    server->meta_up(meta);
    ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
    say(meta, wire::meta_inventory_ack{0, {1}});
    gone();
    ASSERT_FALSE(HasFailure());
  }
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
  ASSERT_TRUE(until([&] { return mount().volume().clean(); }));
  server.reset();
  disk->power_loss(rng);
  auto volume = Volume::open(*disk);
  ASSERT_TRUE(volume.ok());
  EXPECT_TRUE((*volume)->read_begin(1, 0).ok());
}

// The answer to the first one was lost, or its host was: what it repeats is not durable before the flush.
TEST_F(ServerTest, repetition_of_a_strict_put_is_acknowledged_after_a_flush_too) {
  listen();
  Server::Options options;
  options.strict = true;
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  const wire::kv_put want = put_of(1, 8, sealed_page(1, 8));
  say(host, want);
  ASSERT_TRUE(until([&] { return mount().volume().stats().slots_live == 1; }));
  ASSERT_TRUE(got<wire::kv_put_done>().empty());  // its flush has just begun
  say(host, want);
  EXPECT_TRUE(got<wire::kv_put_done>().empty());
  ASSERT_TRUE(until([&] { return got<wire::kv_put_done>().size() == 2; }));
  ASSERT_TRUE(until([&] { return mount().volume().clean(); }));
  say(host, want);  // nothing is left to flush
  ASSERT_EQ(got<wire::kv_put_done>().size(), 3u);
  for (const wire::kv_put_done& done : got<wire::kv_put_done>()) EXPECT_EQ(done.code, 0u);
  EXPECT_EQ(server->counters().puts, 1u);
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
  EXPECT_TRUE(mount().volume().broken());
  EXPECT_EQ(put(2, 8), Code::io);
}

TEST_F(ServerTest, answer_to_a_put_goes_through_the_fault_point) {
  std::function<void()> held;
  put_written = [&](std::function<void()> answer) { held = std::move(answer); };
  start_with_host();
  say(host, put_of(1, 2, sealed_page(1, 2)));
  ASSERT_TRUE(until([&] { return held != nullptr; }));
  EXPECT_TRUE(got<wire::kv_put_done>().empty());
  EXPECT_EQ(mount().volume().stats().slots_live, 1u);
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
    EXPECT_EQ(part.shards[i].tenant, 1001 + i);
    EXPECT_EQ(part.shards[i].pages, std::vector<wire::PutPage>{page_of(layout, i + 1, 2)});
  }
  EXPECT_TRUE(server->inventory_running());
  say(Peer{"di-meta.0", 1}, wire::meta_inventory_ack{0, {1, 2, 3}});  // an earlier di-meta's
  say(meta, wire::meta_inventory_ack{4, {1, 2, 3}});                  // another part's
  EXPECT_EQ(server->counters().columns_freed, 0u);
  say(meta, wire::meta_inventory_ack{0, {2}});
  EXPECT_FALSE(server->inventory_running());
  EXPECT_EQ(server->counters().columns_freed, 1u);
  EXPECT_EQ(mount().volume().stats().slots_live, 2u);
}

// di-meta takes what an inventory does not show for lost.
TEST_F(ServerTest, inventory_shows_what_was_put_while_it_ran) {
  std::promise<void> gate;
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  before_read = [opened = gate.get_future().share()] { opened.wait(); };
  server->meta_up(meta);
  ASSERT_EQ(put(2, 2), Code::ok);  // the list is made already
  gate.set_value();
  ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() == 1; }));
  const wire::meta_inventory listed = got<wire::meta_inventory>()[0];
  ASSERT_EQ(listed.shards.size(), 1u);
  EXPECT_EQ(listed.shards[0].stripe, 1u);
  EXPECT_FALSE(listed.last);
  say(meta, wire::meta_inventory_ack{0, {}});
  ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() == 2; }));
  const wire::meta_inventory fresh = got<wire::meta_inventory>()[1];
  ASSERT_EQ(fresh.shards.size(), 1u);
  EXPECT_EQ(fresh.shards[0].stripe, 2u);
  EXPECT_TRUE(fresh.last);
  say(meta, wire::meta_inventory_ack{1, {}});
  EXPECT_FALSE(server->inventory_running());
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
  disk->flip_bit(mount().volume().geometry().segment_offset(0) + 100, 0);
  server->meta_up(meta);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  ASSERT_EQ(got<wire::meta_inventory>()[0].shards.size(), 1u);
  EXPECT_EQ(got<wire::meta_inventory>()[0].shards[0].stripe, 2u);
  EXPECT_EQ(server->counters().slots_dropped, 1u);
  EXPECT_EQ(mount().volume().stats().slots_live, 1u);
}

// Reads that fail are counted where they fail; the look that finds too many of them takes the disk out of service.
TEST_F(ServerTest, failing_disk_takes_no_more_puts_and_tells_di_meta) {
  start_with_host();
  server->meta_up(meta);
  ASSERT_EQ(put(1, 2), Code::ok);
  EXPECT_EQ(mount().state(), DiskState::good);
  const std::size_t told = got<wire::meta_volumes>().size();
  for (std::uint64_t i = 0; i <= DiskHealth::errors_max; ++i) {
    disk->fail_read_in = 0;
    EXPECT_EQ(read(10 + i, 1, take(2, kv::SlotState::filling)).back().code, static_cast<std::uint16_t>(Code::io));
  }
  disk->fail_read_in.reset();
  ASSERT_TRUE(until([&] { return mount().state() == DiskState::failed; }));
  EXPECT_EQ(mount().reason(), "errors");
  ASSERT_GT(got<wire::meta_volumes>().size(), told);
  EXPECT_EQ(got<wire::meta_volumes>().back().volumes.at(0).state, 2u);
  EXPECT_EQ(put(2, 2), Code::io);
  EXPECT_EQ(read(99, 1, take(2, kv::SlotState::filling)).back().code, 0u);  // reads go on
}

TEST_F(ServerTest, put_that_found_no_room_on_the_disk_leaves_its_slot_usable) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  disk->full = true;
  EXPECT_EQ(put(2, 2), Code::no_space);
  EXPECT_EQ(mount().volume().stats().slots_bad, 0u);
}

// ---- write budget

TEST_F(ServerTest, put_above_the_budget_is_vetoed_and_a_repair_is_not) {
  Server::Options options;
  options.budget = {.endurance_bytes = 4 * mib, .days = 1, .amplification = 1};
  listen();
  start(options);
  server->host_up(host, true);
  server->meta_up(meta);
  EXPECT_FALSE(got<wire::meta_volumes>().back().volumes.at(0).spent);
  std::uint64_t stripe = 0;
  while (put(++stripe, 8) == Code::ok) ASSERT_LT(stripe, 10u);
  EXPECT_EQ(stripe, 5u);  // 0.9 MiB each
  EXPECT_EQ(static_cast<Code>(got<wire::kv_put_done>().back().code), Code::over_budget);
  EXPECT_EQ(server->counters().puts_over_budget, 1u);
  EXPECT_EQ(server->counters().puts_refused, 0u);
  EXPECT_EQ(mount().budget().vetoes(), 1u);
  EXPECT_GT(mount().budget().vetoed_bytes(), layout.page_bytes(8));
  EXPECT_GE(mount().budget().written_bytes(), 4 * layout.page_bytes(8));
  EXPECT_EQ(mount().stats().slots_live, 4u);
  EXPECT_EQ(mount().state(), DiskState::good);  // nothing is wrong with it
  const wire::VolumeState told = got<wire::meta_volumes>().back().volumes.at(0);
  EXPECT_TRUE(told.spent);
  EXPECT_EQ(told.state, 0u);
  const std::uint64_t written = mount().budget().written_bytes();
  wire::kv_put repair = put_of(stripe, 8, sealed_page(stripe, 8));
  repair.repair = true;
  const std::size_t before = got<wire::kv_put_done>().size();
  say(host, repair);
  ASSERT_TRUE(until([&] { return got<wire::kv_put_done>().size() > before; }));
  EXPECT_EQ(got<wire::kv_put_done>().back().code, 0u);
  EXPECT_GT(mount().budget().written_bytes(), written + layout.page_bytes(8));
  EXPECT_EQ(mount().budget().left_today_bytes(loop.monotonic_now()), 0u);
}

TEST_F(ServerTest, budget_of_a_volume_is_its_own_and_outlives_the_process) {
  add_volumes(1);
  Server::Options options;
  options.budget = {.endurance_bytes = 2 * mib, .days = 1, .amplification = 1};
  listen();
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  for (const std::uint64_t stripe : {1u, 2u}) EXPECT_EQ(put_to(0, stripe, 8), Code::ok);
  EXPECT_EQ(put_to(0, 3, 8), Code::over_budget);
  EXPECT_EQ(put_to(1, 3, 8), Code::ok);
  EXPECT_TRUE(mount(0).spent());
  EXPECT_FALSE(mount(1).spent());
  const std::uint64_t written = mount(0).budget().written_bytes();
  bool stopped = false;
  server->stop([&] { stopped = true; });
  ASSERT_TRUE(until([&] { return stopped; }));
  server.reset();
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  EXPECT_GE(mount(0).budget().written_bytes(), written);
  EXPECT_EQ(put_to(0, 4, 8), Code::over_budget);
  EXPECT_EQ(put_to(1, 4, 8), Code::ok);
}

TEST_F(ServerTest, stop_writes_everything_behind) {
  start_with_host();
  for (std::uint64_t stripe = 1; stripe <= 5; ++stripe) ASSERT_EQ(put(stripe, 2), Code::ok);
  bool stopped = false;
  server->stop([&] { stopped = true; });
  EXPECT_EQ(put(6, 2), Code::busy);
  ASSERT_TRUE(until([&] { return stopped; }));
  EXPECT_TRUE(mount().volume().clean());
  server.reset();
  auto volume = Volume::open(*disk);
  ASSERT_TRUE(volume.ok());
  EXPECT_EQ((*volume)->stats().recovered_by_header, 0u);
  EXPECT_EQ((*volume)->stats().slots_live, 5u);
}

// ---- several volumes

TEST_F(ServerTest, message_goes_to_the_volume_that_it_names) {
  add_volumes(2);
  start_with_host();
  server->meta_up(meta);
  for (std::uint16_t volume = 0; volume < 3; ++volume) ASSERT_EQ(put_to(volume, 1 + volume, 2), Code::ok);
  EXPECT_EQ(put_to(3, 9, 2), Code::not_found);
  for (std::uint16_t volume = 0; volume < 3; ++volume) {
    EXPECT_EQ(mount(volume).stats().slots_live, 1u);
    const wire::SlotRef target = take(2, kv::SlotState::filling);
    wire::kv_read want = read_of(10 + volume, 1 + volume, target);
    want.volume = volume;
    EXPECT_EQ(answers_to(want).back().code, 0u);
    EXPECT_TRUE(std::ranges::equal(bytes_of(target), payload_of(layout, 1 + volume, 2)));
    want.transfer += 10;
    want.volume = static_cast<std::uint16_t>((volume + 1) % 3);
    EXPECT_EQ(answers_to(want).back().code, static_cast<std::uint16_t>(Code::not_found));
  }
  const std::vector<wire::VolumeState> told = got<wire::meta_volumes>().back().volumes;
  ASSERT_EQ(told.size(), 3u);
  for (std::uint16_t volume = 0; volume < 3; ++volume) {
    EXPECT_EQ(told[volume].volume, volume);
    EXPECT_EQ(told[volume].state, 0u);
    EXPECT_GT(told[volume].bytes_total, 0u);
  }
  // A free names no volume.
  say(meta, wire::kv_free{{1, 2, 3}, {}});
  for (std::uint16_t volume = 0; volume < 3; ++volume) EXPECT_EQ(mount(volume).stats().slots_live, 0u);
}

TEST_F(ServerTest, inventory_goes_through_all_volumes) {
  add_volumes(2);
  start_with_host();
  // The one in the middle is empty.
  for (std::uint64_t stripe = 1; stripe <= 3; ++stripe) ASSERT_EQ(put_to(0, stripe, 1), Code::ok);
  for (std::uint64_t stripe = 4; stripe <= 5; ++stripe) ASSERT_EQ(put_to(2, stripe, 1), Code::ok);
  server->meta_up(meta);
  std::map<std::uint64_t, std::uint16_t> volume_of;
  std::size_t parts = 0;
  while (server->inventory_running()) {
    ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() > parts; }));
    const wire::meta_inventory part = got<wire::meta_inventory>().back();
    EXPECT_EQ(part.cursor, parts++);
    for (const wire::ShardRecord& shard : part.shards) volume_of[shard.stripe] = shard.volume;
    EXPECT_EQ(part.last, volume_of.size() == 6);
    // While it runs another column comes, where the list has been already.
    if (parts == 1) {
      ASSERT_EQ(put_to(0, 6, 1), Code::ok);
    }
    wire::meta_inventory_ack ack;
    ack.cursor = part.cursor;
    say(meta, ack);
  }
  const std::map<std::uint64_t, std::uint16_t> expected{{1, 0}, {2, 0}, {3, 0}, {4, 2}, {5, 2}, {6, 0}};
  EXPECT_EQ(volume_of, expected);
}

TEST_F(ServerTest, failed_volume_is_out_of_service_alone) {
  add_volumes(1);
  start_with_host();
  server->meta_up(meta);
  ASSERT_EQ(put_to(0, 1, 2), Code::ok);
  ASSERT_EQ(put_to(1, 2, 2), Code::ok);
  for (std::uint64_t i = 0; i <= DiskHealth::errors_max; ++i) {
    more_disks[0]->fail_read_in = 0;
    wire::kv_read want = read_of(10 + i, 2, take(2, kv::SlotState::filling));
    want.volume = 1;
    EXPECT_EQ(answers_to(want).back().code, static_cast<std::uint16_t>(Code::io));
  }
  more_disks[0]->fail_read_in.reset();
  ASSERT_TRUE(until([&] { return mount(1).state() == DiskState::failed; }));
  EXPECT_EQ(mount(0).state(), DiskState::good);
  const std::vector<wire::VolumeState> told = got<wire::meta_volumes>().back().volumes;
  EXPECT_EQ(told.at(0).state, 0u);
  EXPECT_EQ(told.at(1).state, 2u);
  EXPECT_EQ(put_to(1, 3, 2), Code::io);
  EXPECT_EQ(put_to(0, 3, 2), Code::ok);
  EXPECT_EQ(read(99, 1, take(2, kv::SlotState::filling)).back().code, 0u);
  // The node is alive as long as one of its disks is.
  const std::uint64_t before = looks;
  ASSERT_TRUE(until([&] { return looks > before; }));
}

TEST_F(ServerTest, volume_that_is_cut_short_gives_up_what_lies_behind_its_end) {
  start_with_host();
  server->meta_up(meta);
  for (std::uint64_t stripe = 1; stripe <= 3; ++stripe) ASSERT_EQ(put(stripe, 2), Code::ok);
  std::vector<Read> slots_there;
  SlotAddress from;
  static_cast<void>(mount().volume().list(from, 100, slots_there));
  ASSERT_EQ(slots_there.size(), 3u);
  for (const Read& slot : slots_there) mount().read_end(slot);
  const Read& last = slots_there.back();
  ASSERT_TRUE(until([&] { return mount().volume().clean(); }));
  const std::uint64_t syncs = mount().syncs();
  // The header is still there, and one page of the payload.
  const std::uint64_t end = last.offset + last.slot_class.header_bytes + disk_align_bytes;
  Bytes image = disk->image();
  std::fill(image.begin() + static_cast<std::ptrdiff_t>(end), image.end(), std::byte{0});
  disk->set_image(std::move(image));
  cut_at = end;
  ASSERT_TRUE(until([&] { return mount().state() == DiskState::failed; }));
  EXPECT_EQ(mount().reason(), "short");
  const auto failed = got<wire::meta_read_failed>();
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].page, last.stripe << 8);
  EXPECT_EQ(failed[0].code, static_cast<std::uint16_t>(Code::not_found));
  EXPECT_EQ(server->counters().columns_dropped, 1u);
  EXPECT_EQ(got<wire::meta_volumes>().back().volumes.at(0).state, 2u);
  for (const Read& slot : slots_there) {
    const wire::SlotRef target = take(2, kv::SlotState::filling);
    const Code expected = slot.stripe == last.stripe ? Code::not_found : Code::ok;
    EXPECT_EQ(read(10 + slot.stripe, slot.stripe, target).back().code, static_cast<std::uint16_t>(expected));
    give_back(target);
  }
  EXPECT_EQ(put(4, 2), Code::io);
  // It does not come back with a restart either.
  ASSERT_TRUE(until([&] { return mount().syncs() > syncs && mount().volume().clean(); }));
  cut_at.reset();
  restart();
  EXPECT_EQ(mount().stats().slots_live, 2u);
}

TEST_F(ServerTest, read_behind_the_end_finds_at_once_that_the_volume_is_short) {
  start_with_host();
  server->meta_up(meta);
  ASSERT_EQ(put(1, 2), Code::ok);
  cut_at = 4 * disk_align_bytes;
  disk->short_read_in = 0;
  EXPECT_EQ(read(10, 1, take(2, kv::SlotState::filling)).back().code, static_cast<std::uint16_t>(Code::io));
  EXPECT_EQ(mount().state(), DiskState::failed);
  ASSERT_EQ(got<wire::meta_read_failed>().size(), 1u);
  EXPECT_EQ(got<wire::meta_read_failed>()[0].code, static_cast<std::uint16_t>(Code::not_found));
  EXPECT_EQ(mount().stats().slots_live, 0u);
}

TEST_F(ServerTest, volume_that_failed_comes_back_when_it_is_opened_again) {
  add_volumes(1);
  start_with_host();
  server->meta_up(meta);
  ASSERT_EQ(put_to(0, 1, 2), Code::ok);
  ASSERT_EQ(put_to(1, 2, 2), Code::ok);
  const auto never = [] { ADD_FAILURE() << "closed"; };
  EXPECT_EQ(server->volume_close(1, never).error().code, Code::busy) << "it serves";
  EXPECT_EQ(server->volume_close(2, never).error().code, Code::not_found);
  more_disks[0]->fail_read_in = 0;
  for (std::uint64_t i = 0; i <= DiskHealth::errors_max; ++i) {
    more_disks[0]->fail_read_in = 0;
    wire::kv_read want = read_of(10 + i, 2, take(2, kv::SlotState::filling));
    want.volume = 1;
    EXPECT_EQ(answers_to(want).back().code, static_cast<std::uint16_t>(Code::io));
  }
  more_disks[0]->fail_read_in.reset();
  ASSERT_TRUE(until([&] { return mount(1).state() == DiskState::failed; }));
  // One read is under way: the disk is not let go of before it has ended.
  std::promise<void> go;
  std::shared_future<void> gate = go.get_future().share();
  before_read = [gate] { gate.wait(); };
  wire::kv_read want = read_of(99, 2, take(2, kv::SlotState::filling));
  want.volume = 1;
  say(host, want);
  bool closed = false;
  ASSERT_TRUE(server->volume_close(1, [&] { closed = true; }).ok());
  EXPECT_EQ(server->volume_close(1, never).error().code, Code::busy) << "it is being closed";
  loop.run_ready();
  EXPECT_FALSE(closed);
  EXPECT_TRUE(mount(1).is_open());
  go.set_value();
  ASSERT_TRUE(until([&] { return closed; }));
  before_read = {};
  EXPECT_EQ(got<wire::kv_read_done>().back().transfer, 99u);
  EXPECT_FALSE(mount(1).is_open());
  EXPECT_EQ(put_to(1, 3, 2), Code::io);
  wire::kv_read closed_read = read_of(100, 2, take(2, kv::SlotState::filling));
  closed_read.volume = 1;
  EXPECT_EQ(answers_to(closed_read).back().code, static_cast<std::uint16_t>(Code::not_found));
  EXPECT_EQ(put_to(0, 3, 2), Code::ok) << "the other one did not notice";

  const std::uint64_t errors = mount(1).figures()->read_errors.load();
  EXPECT_GT(errors, DiskHealth::errors_max);
  server->volume_open(1, backing_of(*more_disks[0], 1, mount(1).figures()));
  EXPECT_EQ(mount(1).state(), DiskState::good);
  EXPECT_EQ(got<wire::meta_volumes>().back().volumes.at(1).state, 0u);
  EXPECT_TRUE(server->inventory_running()) << "di-meta hears what it holds";
  EXPECT_EQ(mount(1).stats().slots_live, 1u);
  EXPECT_EQ(mount(1).figures()->read_errors.load(), errors);
  const std::uint64_t before = looks;
  ASSERT_TRUE(until([&] { return looks > before + 1; }));
  EXPECT_EQ(mount(1).state(), DiskState::good) << "what was counted before is over";
  want = read_of(101, 2, take(2, kv::SlotState::filling));
  want.volume = 1;
  EXPECT_EQ(answers_to(want).back().code, 0u);
  EXPECT_EQ(put_to(1, 4, 2), Code::ok);
}

TEST_F(ServerTest, full_volume_refuses_and_the_other_one_takes) {
  add_volumes(1);
  start_with_host();
  disk->full = true;
  EXPECT_EQ(put_to(0, 1, 2), Code::no_space);
  EXPECT_EQ(put_to(1, 1, 2), Code::ok);
  EXPECT_EQ(mount(1).stats().slots_live, 1u);
}

TEST_F(ServerTest, failed_flush_of_one_volume_fails_only_its_puts) {
  add_volumes(1);
  listen();
  Server::Options options;
  options.strict = true;
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  disk->fail_flush = true;
  EXPECT_EQ(put_to(0, 1, 2), Code::io);
  EXPECT_TRUE(mount(0).volume().broken());
  EXPECT_EQ(put_to(1, 1, 2), Code::ok);
  EXPECT_FALSE(mount(1).volume().broken());
}

TEST_F(ServerTest, volume_that_could_not_be_opened_does_not_hold_up_the_others) {
  add_volumes(2);
  // The last one and the one in the middle have nothing that could be a volume.
  more_disks[0]->set_image(Bytes(24 * mib));
  more_disks[1]->set_image(Bytes(24 * mib));
  may_be_refused = true;
  start_with_host();
  EXPECT_FALSE(mount(1).is_open());
  EXPECT_EQ(put_to(1, 1, 2), Code::io);
  EXPECT_EQ(put_to(0, 1, 2), Code::ok);
  server->meta_up(meta);
  const std::vector<wire::VolumeState> told = got<wire::meta_volumes>().back().volumes;
  ASSERT_EQ(told.size(), 3u);
  EXPECT_EQ(told[0].state, 0u);
  EXPECT_EQ(told[1].state, 2u);
  EXPECT_EQ(told[1].bytes_total, 0u);
  wire::kv_read want = read_of(5, 1, take(2, kv::SlotState::filling));
  want.volume = 2;
  EXPECT_EQ(answers_to(want).back().code, static_cast<std::uint16_t>(Code::not_found));
  std::optional<std::vector<Server::Check>> found;
  ASSERT_TRUE(server->check([&](const std::vector<Server::Check>& checks) { found = checks; }).ok());
  std::size_t parts = 0;
  while (server->inventory_running()) {
    ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() > parts; }));
    wire::meta_inventory_ack ack;
    ack.cursor = got<wire::meta_inventory>()[parts++].cursor;
    say(meta, ack);
  }
  ASSERT_TRUE(found);
  EXPECT_EQ(found->at(0).slots, 1u);
  EXPECT_EQ(found->at(1).slots, 0u);
  restart();
  EXPECT_EQ(mount(0).stats().slots_live, 1u);
}

TEST_F(ServerTest, store_of_one_volume_that_could_not_be_opened_is_up_and_says_so) {
  disk->set_image(Bytes(24 * mib));
  may_be_refused = true;
  start_with_host();
  server->meta_up(meta);
  EXPECT_EQ(got<wire::meta_volumes>().back().volumes.at(0).state, 2u);
  EXPECT_EQ(put(1, 2), Code::io);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  EXPECT_TRUE(got<wire::meta_inventory>().back().last);
  EXPECT_EQ(looks, 0u);  // so that it is not ready
  restart();
}

// ---- columns

// Whole pages, parts and parity of short and full stripes, some with a short page.
const std::vector<std::pair<std::pair<std::uint16_t, std::uint16_t>, std::vector<std::uint32_t>>> stripes = {
    {{1, 0}, {8}},
    {{2, 1}, {8}},
    {{2, 1}, {8, 3}},
    {{10, 2}, {8}},
    {{10, 2}, {8, 5}},
    {{10, 2}, {8, 8, 8}},
    {{10, 2}, {8, 8, 8, 1}},
    {{10, 2}, {4, 4, 4, 4, 4, 2}},
    {{10, 2}, {8, 8, 8, 8, 8, 8, 8, 8, 8, 3}}};

TEST_F(ServerTest, columns_of_every_kind_go_to_the_volume_and_back_to_their_places) {
  start_with_host();
  std::uint64_t number = 0;
  for (const auto& [geometry, blocks] : stripes) {
    SCOPED_TRACE("stripe " + std::to_string(++number));
    const Stripe stripe = stripe_of(number, geometry.first, geometry.second, blocks);
    for (std::uint32_t i = 0; i < stripe.shape.columns_stored(); ++i) {
      ASSERT_EQ(put(stripe, stripe.shape.stored_column(i)), Code::ok) << i;
    }
    for (const wire::SlotRef& slot : stripe.slots) give_back(slot);
    expect_columns(stripe);
    say(meta, wire::kv_free{{number}, {}});
    EXPECT_EQ(mount().volume().stats().slots_live, 0u);
  }
}

TEST_F(ServerTest, columns_of_every_kind_come_from_another_machine_and_go_there) {
  fabric = std::make_unique<NearFabric>(loop, *owner,
                                        [this](transfer::OpId op, Code code) { server->moved(op, code); });
  start();
  server->host_up(host, false);
  std::uint64_t number = 0;
  for (const auto& [geometry, blocks] : stripes) {
    SCOPED_TRACE("stripe " + std::to_string(++number));
    const Stripe stripe = stripe_of(number, geometry.first, geometry.second, blocks);
    for (std::uint32_t i = 0; i < stripe.shape.columns_stored(); ++i) {
      ASSERT_EQ(put(stripe, stripe.shape.stored_column(i)), Code::ok) << i;
    }
    for (const wire::SlotRef& slot : stripe.slots) give_back(slot);
    expect_columns(stripe);
    say(meta, wire::kv_free{{number}, {}});
  }
  EXPECT_GT(fabric->moves, 0u);
}

TEST_F(ServerTest, a_column_that_cannot_be_fetched_is_not_written) {
  fabric = std::make_unique<NearFabric>(loop, *owner,
                                        [this](transfer::OpId op, Code code) { server->moved(op, code); });
  start();
  server->host_up(host, false);
  const Stripe stripe = stripe_of(1, 10, 2, {8, 8, 8});
  for (const std::uint64_t piece : {0u, 2u, 3u}) {
    fabric->fail_in = piece;
    EXPECT_EQ(put(stripe, 4), Code::unreachable);
    EXPECT_EQ(mount().volume().stats().slots_live, 0u);
    EXPECT_EQ(server->puts(), 0u);
  }
  EXPECT_EQ(put(stripe, 4), Code::ok);
}

TEST_F(ServerTest, wrong_columns_are_not_put) {
  start_with_host();
  const Stripe good = stripe_of(1, 10, 2, {8, 8, 8});
  // A byte of a part, of another part of the page, and of parity.
  const std::uint64_t offset = good.shape.page_offset(4, 1);
  bytes_of(good.slots[1])[offset] ^= std::byte{1};
  EXPECT_EQ(put(good, 4), Code::corrupt);
  EXPECT_EQ(put(good, 3), Code::ok);
  bytes_of(good.slots[1])[offset] ^= std::byte{1};
  EXPECT_EQ(put(good, 4), Code::ok);
  bytes_of(good.slots[3])[good.shape.column_offset(10, 2)] ^= std::byte{1};
  EXPECT_EQ(put(good, 10), Code::corrupt);
  EXPECT_EQ(put(good, 9), Code::invalid);  // zeros; stored nowhere
  EXPECT_EQ(put(good, 12), Code::invalid);
  Stripe bad = good;
  bad.put.code.crcs.pop_back();
  EXPECT_EQ(put(bad, 0), Code::invalid);
  bad = good;
  bad.put.code.data_columns = 0;
  EXPECT_EQ(put(bad, 0), Code::invalid);
  bad = good;
  bad.slots[4] = take(1, kv::SlotState::filling);  // too short for parity
  EXPECT_EQ(put(bad, 11), Code::stale);
  EXPECT_EQ(mount().volume().stats().slots_live, 2u);
}

TEST_F(ServerTest, di_meta_gets_the_volume_before_the_inventory_and_the_code_with_it) {
  start_with_host();
  const Stripe stripe = stripe_of(1, 10, 2, {8, 8, 8});
  ASSERT_EQ(put(stripe, 7), Code::ok);
  ASSERT_EQ(put(stripe, 11), Code::ok);
  sent.clear();
  server->meta_up(meta);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  ASSERT_EQ(sent.front().number, wire::meta_volumes::number);
  const Volume::Stats stats = mount().volume().stats();
  const auto volumes = got<wire::meta_volumes>()[0].volumes;
  ASSERT_EQ(volumes.size(), 1u);
  EXPECT_EQ(volumes[0].state, 0u);
  EXPECT_EQ(volumes[0].bytes_total, stats.bytes_total);
  EXPECT_EQ(volumes[0].bytes_free, stats.bytes_total - stats.slot_bytes_live);
  const auto shards = got<wire::meta_inventory>()[0].shards;
  ASSERT_EQ(shards.size(), 2u);
  for (const wire::ShardRecord& shard : shards) {
    EXPECT_EQ(shard.pages, stripe.put.pages);
    EXPECT_EQ(shard.code, stripe.put.code);
  }
}

TEST_F(ServerTest, one_column_of_a_stripe_can_be_freed) {
  start_with_host();
  const Stripe stripe = stripe_of(1, 10, 2, {8, 8, 8});
  for (const std::uint32_t column : {0u, 7u, 11u}) ASSERT_EQ(put(stripe, column), Code::ok);
  say(meta, wire::kv_free{{1, 1}, {7}});  // not one column for each stripe
  EXPECT_EQ(server->counters().malformed, 1u);
  EXPECT_EQ(mount().volume().stats().slots_live, 3u);
  say(meta, wire::kv_free{{1, 1}, {7, 8}});
  EXPECT_EQ(mount().volume().stats().slots_live, 2u);
  wire::kv_read want = read_of(1, 1, take(8, kv::SlotState::filling));
  want.column = 7;
  EXPECT_EQ(answers_to(want).back().code, static_cast<std::uint16_t>(Code::not_found));
  say(meta, wire::kv_free{{1}, {}});
  EXPECT_EQ(mount().volume().stats().slots_live, 0u);
}

// Where the payload of the only column of its class begins.
std::uint64_t payload_at(const Volume& volume, std::uint32_t segment) {
  return volume.geometry().segment_offset(segment) + 4096;
}

TEST_F(ServerTest, a_damaged_column_is_reported_and_dropped_by_whoever_reads_it) {
  start_with_host();
  server->meta_up(meta);
  const Stripe stripe = stripe_of(1, 10, 2, {8, 8, 8});
  ASSERT_EQ(put(stripe, 10), Code::ok);
  ASSERT_EQ(put(stripe, 11), Code::ok);
  restart();  // so that payloads are compared
  disk->flip_bit(payload_at(mount().volume(), 0) + 5000, 3);
  server->host_up(host, true);
  server->meta_up(meta);
  wire::kv_read want = read_of(1, 1, take(8, kv::SlotState::filling));
  want.column = 10;
  EXPECT_EQ(answers_to(want).back().code, static_cast<std::uint16_t>(Code::corrupt));
  want.transfer = 2;
  want.column = 11;
  EXPECT_EQ(answers_to(want).back().code, 0u);
  const std::vector<wire::meta_read_failed> reports = {
      {1 << 8, 10, static_cast<std::uint16_t>(Code::corrupt)}};
  EXPECT_EQ(got<wire::meta_read_failed>(), reports);
  EXPECT_EQ(server->counters().columns_dropped, 1u);
  EXPECT_EQ(mount().volume().stats().slots_live, 1u);
}

// ---- scrub and check

TEST_F(ServerTest, scrub_reads_every_column_and_reports_the_damaged_one) {
  start_with_host();
  server->meta_up(meta);
  const Stripe stripe = stripe_of(1, 10, 2, {8, 8, 8});
  for (std::uint32_t i = 0; i < stripe.shape.columns_stored(); ++i) {
    ASSERT_EQ(put(stripe, stripe.shape.stored_column(i)), Code::ok);
  }
  ASSERT_EQ(put(2, 8), Code::ok);
  mount().scrub().start();
  ASSERT_TRUE(until([&] { return !mount().scrub().pass().running; }));
  EXPECT_EQ(mount().scrub().pass().slots, 12u);
  EXPECT_EQ(mount().scrub().pass().slots_done, 12u);
  EXPECT_EQ(mount().scrub().pass().corrupt, 0u);
  EXPECT_TRUE(got<wire::meta_read_failed>().empty());
  EXPECT_GT(beats, 12);

  // The second column in the first segment of its class; its header stays good.
  const SlotClass slot_class = slot_class_of(layout, stripe.shape.column_bytes(10));
  disk->flip_bit(payload_at(mount().volume(), 0) + slot_class.slot_bytes + 70000, 6);
  mount().scrub().start();
  ASSERT_TRUE(until([&] { return !mount().scrub().pass().running; }));
  EXPECT_EQ(mount().scrub().pass().number, 2u);
  EXPECT_EQ(mount().scrub().pass().slots_done, 12u);
  EXPECT_EQ(mount().scrub().pass().corrupt, 1u);
  ASSERT_EQ(got<wire::meta_read_failed>().size(), 1u);
  EXPECT_EQ(got<wire::meta_read_failed>()[0].page >> 8, 1u);
  EXPECT_EQ(mount().volume().stats().slots_live, 11u);
  EXPECT_EQ(mount().volume().stats().reading, 0u);

  // What cannot be read stays: the next reading may do better.
  disk->fail_read_in = 0;
  mount().scrub().start();
  ASSERT_TRUE(until([&] { return !mount().scrub().pass().running; }));
  EXPECT_EQ(mount().scrub().pass().unreadable, 0u);  // the second reading did
  EXPECT_EQ(mount().volume().stats().slots_live, 11u);
}

TEST_F(ServerTest, check_counts_what_is_there_and_what_di_meta_does_not_know) {
  start_with_host();
  for (std::uint64_t stripe = 1; stripe <= 3; ++stripe) ASSERT_EQ(put(stripe, 2), Code::ok);
  std::optional<Server::Check> found;
  ASSERT_TRUE(server->check([&](const std::vector<Server::Check>& checks) { found = checks[0]; }).ok());
  ASSERT_TRUE(until([&] { return found.has_value(); }));
  EXPECT_EQ(found->slots, 3u);
  EXPECT_FALSE(found->told);
  EXPECT_EQ(server->counters().inventories, 0u);

  server->meta_up(meta);
  found.reset();
  ASSERT_TRUE(server->check([&](const std::vector<Server::Check>& checks) { found = checks[0]; }).ok());
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  say(meta, wire::meta_inventory_ack{0, {2}});
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->slots, 3u);
  EXPECT_EQ(found->orphans, 1u);
  EXPECT_TRUE(found->told);

  disk->flip_bit(mount().volume().geometry().segment_offset(0) + 100, 0);
  found.reset();
  ASSERT_TRUE(server->check([&](const std::vector<Server::Check>& checks) { found = checks[0]; }).ok());
  // di-meta goes away meanwhile: the check goes on without it.
  server->meta_lost(meta);
  ASSERT_TRUE(until([&] { return found.has_value(); }));
  EXPECT_EQ(server->counters().slots_dropped, 1u);
  EXPECT_FALSE(found->told);
  EXPECT_EQ(mount().volume().stats().slots_live, 1u);
}

}  // namespace
}  // namespace di::store
