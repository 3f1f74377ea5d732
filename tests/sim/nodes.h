// tests/sim/nodes.h: the shells of the simulated fleet, each around the real core of its program.
//
// They do what cmd/ and lib/worker do with sockets and timers, on a World instead.  The store is a map in
// memory with the messages of store/server.h; what it holds (StoreDisk) and what di-meta saves
// (MetaDisk) outlive their processes.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "directory/index.h"
#include "directory/membership.h"
#include "engine/script.h"
#include "host/core.h"
#include "rank/carry_out.h"
#include "rank/decode.h"
#include "rank/prefill.h"
#include "request/core.h"
#include "store/erasure.h"
#include "tests/sim/data_plane.h"
#include "tests/sim/world.h"

namespace di::sim {

// What differs between seeds.
struct Settings {
  std::optional<kv::Layout> layout;
  std::uint32_t prefill_pool_blocks = 64;
  std::uint32_t decode_pool_blocks = 96;
  std::uint32_t requests_max = 6;  // of a rank
  std::uint16_t ranks = 1;         // of a process
  std::uint32_t chunk_tokens = 16;
  std::uint32_t arena_units = 64;  // pages of one block
  std::uint32_t entries = 48;
  std::uint16_t attempts_max = 4;
  Duration fetch_delay{};
  Duration step_delay{};
  Duration hold = seconds(60);
  Duration seat_ttl = seconds(30);
  bool overlap = true;
  bool arbiter = false;
  host::Admit admit = host::Admit::always;
  double store_fails = 0;  // chance of each read and put
  Duration reconcile{};
  Duration cross_check{};
  bool encodes_wrong = false;  // now and then
  directory::Geometry geometry{};
  std::size_t stores = 1;
  std::vector<engine::ScriptLine> lines;
  std::uint32_t context_tokens = 512;
};

// ---- di-meta ---------------------------------------------------------------------------------------------

struct MetaDisk {
  std::map<std::string, directory::InstanceRow> rows;
  std::uint64_t run = 0;
};

// Everybody's.
inline constexpr std::uint64_t sim_tenant = 42;

class MetaNode final : public Node {
 public:
  MetaNode(World& world, std::size_t process, MetaDisk& disk, const Settings& settings);
  Member admit(const Member& self, std::uint64_t boot, bool is_self);

  void on_peer_up(const Member& peer) override;
  void on_peer_lost(const Member& peer) override;
  void on_message(const wire::Envelope& message) override;
  void on_time() override;
  Instant turn() override;
  [[nodiscard]] std::string held() const override;
  [[nodiscard]] const directory::Index& index() const { return index_; }

 private:
  void apply(const directory::Membership::Change& change);
  template <class M>
  void answer(const wire::Envelope& question, const M& message) {
    world_.send(process_,
                wire::Envelope::make(question.peer, question.peer_generation,
                                     {question.scope.request, question.scope.attempt, 0, 0}, message));
  }

  World& world_;
  std::size_t process_;
  MetaDisk& disk_;
  const bool encodes_wrong_;
  directory::Membership membership_;
  directory::Index index_;
  std::map<std::string, std::uint32_t> connected_;  // instance -> generation
  std::uint64_t turns_ = 0;
};

// ---- di-kvd store ----------------------------------------------------------------------------------------

struct StoreDisk {
  struct Column {
    wire::ShardRecord record;
    Bytes payload;
  };
  std::map<std::pair<std::uint64_t, std::uint16_t>, Column> columns;  // by (stripe, column)
  std::uint32_t next_generation = 1;

  // All columns of the stripe.
  void free(std::uint64_t stripe) {
    std::erase_if(columns, [&](const auto& item) { return item.first.first == stripe; });
  }
};

class StoreNode final : public Node {
 public:
  StoreNode(World& world, std::size_t process, DataPlane& data, StoreDisk& disk, const Settings& settings)
      : world_(world), process_(process), data_(data), disk_(disk), settings_(settings) {}

  void on_peer_up(const Member& peer) override;
  void on_peer_lost(const Member& peer) override;
  void on_message(const wire::Envelope& message) override;
  void on_arena(std::uint64_t socket, std::uint32_t generation,
                std::shared_ptr<kv::ArenaClient> arena) override;
  void on_time() override {}
  Instant turn() override { return instant_never; }
  [[nodiscard]] std::string held() const override;

 private:
  struct Host {
    std::uint32_t generation = 0;
    bool here = true;
    std::uint64_t socket = 0;
    std::shared_ptr<kv::ArenaClient> arena;
    std::vector<wire::Envelope> waiting;
  };
  struct Transfer {
    bool cancelled = false;
    bool answer_cancel = false;
  };
  using TransferId = std::pair<host::Peer, std::uint64_t>;

  void read(Host& host, const wire::Envelope& message);
  // `arena` is null for a host on another machine.
  void read_group(const TransferId& id, const wire::kv_read& want, std::shared_ptr<kv::ArenaClient> arena,
                  std::uint32_t group);
  void read_finish(const TransferId& id, Code code, std::uint32_t last);
  void put(Host& host, const wire::Envelope& message);
  void put_finish(const host::Peer& from, const wire::kv_put& want, Bytes payload);
  // Lists the columns and sends the first part.
  void list(std::uint32_t asked);
  void inventory(std::uint64_t cursor);
  template <class M>
  void send(const host::Peer& to, const M& message) {
    world_.send(process_, wire::Envelope::make(to.instance, to.generation, {}, message));
  }

  World& world_;
  std::size_t process_;
  DataPlane& data_;
  StoreDisk& disk_;
  const Settings& settings_;
  std::map<std::string, Host> hosts_;
  std::map<TransferId, Transfer> transfers_;
  std::optional<host::Peer> meta_;
  std::vector<std::pair<std::uint64_t, std::uint16_t>> listed_;
  std::uint32_t asked_ = 0;
};

// ---- di-kvd host -----------------------------------------------------------------------------------------

class HostNode final : public Node, private host::ArenaPort, private host::DataPort {
 public:
  // `parked`: the memory of this host's arena while nobody runs here; null: each start makes a new one.
  HostNode(World& world, std::size_t process, DataPlane& data, const Member& self, const Settings& settings,
           Fd* parked);

  void on_peer_up(const Member& peer) override;
  void on_peer_lost(const Member& peer) override;
  void on_message(const wire::Envelope& message) override { core_->on_message(message, now()); }
  void on_time() override { core_->on_time(now()); }
  void on_client(const Member& client, bool attached) override;
  Instant turn() override;
  [[nodiscard]] std::string held() const override;
  [[nodiscard]] kv::ArenaOwner* arena() override { return arena_.get(); }
  [[nodiscard]] const host::Core& core() const { return *core_; }

 private:
  [[nodiscard]] host::Now now() const { return {world_.now(), world_.now()}; }
  void slot_assign(const kv::ArenaOwner::Slot& slot) override { arena_->slot_assign(slot); }
  void slot_state(std::uint32_t slot, kv::SlotState state) override { arena_->slot_state(slot, state); }
  void slot_crcs(std::uint32_t slot, std::span<const std::uint32_t> crcs) override {
    arena_->slot_crcs(slot, crcs);
  }
  void slot_segments(std::uint32_t slot, std::uint32_t segments) override {
    arena_->slot_segments(slot, segments);
  }
  void slot_record(std::uint32_t slot, const kv::PageRecord& record) override {
    arena_->slot_record(slot, record);
  }
  void slot_stored(std::uint32_t slot) override { arena_->slot_stored(slot); }
  void slot_free(std::uint32_t slot) override { arena_->slot_free(slot); }
  void entry_open(std::uint32_t handle) override { arena_->entry_open(handle); }
  void entry_set(std::uint32_t handle, const kv::Readiness& readiness) override {
    arena_->entry_set(handle, readiness);
  }
  void entry_close(std::uint32_t handle) override { arena_->entry_close(handle); }
  std::uint32_t segment_crc(std::uint64_t offset, std::uint64_t bytes) override;
  bool has_code(std::uint32_t data_columns, std::uint32_t parity_columns) override {
    return store::Erasure::create(data_columns, parity_columns).ok();
  }
  std::vector<std::uint32_t> encode(std::span<const host::Strip> data,
                                    std::span<const host::Strip> parity) override;
  std::uint32_t decode(std::uint32_t data_columns, std::span<const CodeColumn> columns,
                       std::span<const std::uint32_t> wanted) override;
  bool xor_is_zero(std::span<const host::Strip> columns) override;
  Status expose(const wire::Peer& peer, std::uint64_t transfer, transfer::Access access,
                std::vector<transfer::SlotName> slots) override;
  void conceal(const wire::Peer& peer, std::uint64_t transfer) override;
  Status push(std::uint64_t push, const wire::Peer& peer, std::uint64_t transfer, const transfer::Place& to,
              std::uint64_t offset, transfer::Class cls) override;
  void cancel(std::uint64_t push) override;
  void see_arrivals() const override {}
  double rate(const wire::Peer&) const override { return 0; }

  World& world_;
  std::size_t process_;
  DataPlane& data_;
  const bool encodes_wrong_;
  std::map<std::uint64_t, std::uint64_t> pushes_;  // -> operation of the data plane
  // What the threads and the timer of the shell do after a restart; true while there is more.
  bool recover();

  std::unique_ptr<kv::ArenaOwner> arena_;
  std::unique_ptr<host::Core> core_;
  std::vector<host::Recovery::Check> checks_;
};

// ---- di-prefill and di-decode ----------------------------------------------------------------------------

// What lib/worker is to the cores of a process's ranks; `Core` is rank::PrefillCore or rank::DecodeCore.
template <class Core>
class RankNode final : public Node {
 public:
  RankNode(World& world, std::size_t process, const Member& self, const Settings& settings);

  void on_peer_up(const Member& peer) override;
  void on_peer_lost(const Member& peer) override;
  void on_message(const wire::Envelope& message) override {
    ranks_.at(message.scope.rank).core->on_message(message, world_.now());
  }
  void on_time() override;
  void on_arena(std::uint64_t socket, std::uint32_t generation,
                std::shared_ptr<kv::ArenaClient> arena) override;
  Instant turn() override;
  [[nodiscard]] std::string held() const override;
  void drain(bool on);

 private:
  struct Rank {
    std::unique_ptr<engine::ScriptEngine> engine;
    std::optional<Core> core;
    bool busy = false;
  };
  // The connection to an arena that was given up while engines may still copy from or to it.
  struct Closing {
    std::uint64_t socket = 0;
    std::set<std::size_t> ranks;  // whose batch was out
  };

  void attach();
  void detach();
  void start(std::size_t number, rank::Batch batch);

  World& world_;
  std::size_t process_;
  Member self_;
  std::vector<Rank> ranks_;
  std::optional<Member> kvd_;
  std::uint64_t socket_ = 0;
  std::shared_ptr<kv::ArenaClient> arena_;
  std::vector<Closing> closing_;
  bool attach_pending_ = false;
};

// ---- di-router -------------------------------------------------------------------------------------------

class RouterNode final : public Node {
 public:
  struct Events {
    std::function<void(const request::Emission&)> emitted;
    std::function<void(const request::Ending&)> ended;
  };
  RouterNode(World& world, std::size_t process, const Settings& settings, Events events);

  void on_peer_up(const Member& peer) override { core.on_peer_up(peer, world_.now()); }
  void on_peer_lost(const Member& peer) override { core.on_peer_lost(peer.instance, world_.now()); }
  void on_message(const wire::Envelope& message) override { core.on_message(message, world_.now()); }
  void on_time() override { core.on_time(world_.now()); }
  Instant turn() override;
  [[nodiscard]] std::string held() const override;

  request::RouterCore core;

 private:
  World& world_;
  std::size_t process_;
  Events events_;
};

}  // namespace di::sim
