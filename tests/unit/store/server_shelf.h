// tests/unit/store/server_shelf.h: a store's server with its volumes in memory, a host with an arena, and the network
// between them.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <future>

#include "kv/slots.h"
#include "store/server.h"
#include "tests/unit/store/shelf.h"

namespace di::store {

inline constexpr std::uint64_t mib = std::uint64_t{1} << 20;
inline constexpr Duration far_away = seconds(60);

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
    Borrowed(Disk& to, const ServerTest& test) : disk(to), world(test) {}
    [[nodiscard]] std::uint64_t bytes() const override { return disk.bytes(); }
    [[nodiscard]] Result<std::uint64_t> bytes_now() const override {
      if (world.cut_at == UINT64_MAX) return Error{Code::not_found, 0, "removed"};
      return world.cut_at.value_or(disk.bytes());
    }
    Status read_pieces(std::uint64_t offset, std::span<const MutableByteView> to) override {
      if (world.before_read) world.before_read();
      return disk.read_pieces(offset, to);
    }
    Status write_pieces(std::uint64_t offset, std::span<const ByteView> from) override {
      return disk.write_pieces(offset, from);
    }
    Status flush() override {
      if (world.before_flush) world.before_flush();
      return disk.flush();
    }
    Disk& disk;
    const ServerTest& world;
  };
  Mount::Backing backing_of(MemoryDisk& memory, std::size_t number,
                            std::shared_ptr<DiskFigures> figures = {}) {
    Mount::Backing backing;
    backing.path = "volume" + std::to_string(number);
    auto borrowed = std::make_unique<Borrowed>(memory, *this);
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
                      put_written, [this] { ++beats; }, [this] { ++looks; }, [this] { ++volume_changes; }});
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
  std::optional<std::uint64_t> cut_at;  // where every disk ends now; UINT64_MAX: its file was removed
  std::function<void()> before_read;    // on the disk's threads; set while nothing reads
  std::function<void()> before_flush;   // the same; set while nothing is flushed
  std::function<void(std::function<void()>)> put_written;
  std::vector<wire::Envelope> sent;
  std::unique_ptr<NearFabric> fabric;
  std::unique_ptr<Server> server;
  int detached = 0;
  int beats = 0;
  int volume_changes = 0;
  std::uint64_t looks = 0;  // at disks that have not failed
  bool scrubs = false;
};

// Where the payload of the only column of its class begins.
inline std::uint64_t payload_at(const Volume& volume, std::uint32_t segment) {
  return volume.geometry().segment_offset(segment) + 4096;
}

}  // namespace di::store
