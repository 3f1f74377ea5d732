// host/core.h: the core of a di-kvd host: its arena's books, fetches, write-backs, hand-overs and what
// other hosts read here, behind one set of events.  Pure: messages, losses, answers of the data plane and
// time in; messages, index-page writes and orders to the data plane out.
//
// Everything a client acquires belongs to a Holder (client instance, its generation and rank, request, attempt)
// and is given back by kv_release or by the loss of the client; everything else is bounded by a hold, a
// lease or the answer of a peer that is up.  gauges() is at its base when nothing is going on, and
// check() says what does not add up.
//
// How a shell uses it: peers as they come and go, arena clients as they attach and detach, each message
// that arrives; after a batch of those flush(), then everything in take_outgoing() is sent; messages
// to self() come back through on_message(); a timer at next_due() calls on_time().  What takes long (the code of
// a stripe) is done in steps: next_due() is in the past while there are more, and each on_time() does one.
//
// Owner: the loop thread of di-kvd.  Bounds: Options.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "host/fetch.h"
#include "host/filling.h"
#include "host/handover.h"
#include "host/hedge.h"
#include "host/lease.h"
#include "host/pages.h"
#include "host/port.h"
#include "host/push.h"
#include "host/read.h"
#include "host/rebuild.h"
#include "host/recover.h"
#include "host/repair.h"
#include "host/serve.h"
#include "host/writeback.h"
#include "wire/envelope.h"

namespace di::host {

struct Gauge {
  std::string name;
  std::uint64_t count = 0;
};

struct CoreCounters {
  std::uint64_t ignored = 0;  // messages from who may not send them, is gone, or about what is gone
  std::uint64_t malformed = 0;
  std::uint64_t grants_refused = 0;  // kv_opened busy or invalid
  std::uint64_t seals_corrupt = 0;   // the bytes did not match the checksums of kv_sealed
  std::uint64_t seals_invalid = 0;
  std::uint64_t clients_lost = 0;
  std::uint64_t snapshots = 0;
  std::uint64_t deltas = 0;
};

class Core final : private Peers, private Handovers::Peers {
 public:
  struct Options {
    Peer self;
    Pages::Options arena;
    std::uint32_t entries_max = 1024;
    std::size_t delta_pages_max = 4096;  // pages in one meta_arena_delta
    Fetches::Limits fetch;
    Hedge::Limits hedge;
    Rebuilds::Limits rebuild;
    Repairs::Limits repair;
    Writeback::Limits writeback;
    Handovers::Limits handover;
    Pushes::Limits push;
    Serves::Limits serve;
  };

  Core(const Options& options, ArenaPort& port, DataPort& data);

  // Our generation, known after registration; before anything else happens.
  void set_self(const Peer& self);
  [[nodiscard]] Peer self() const override { return options_.self; }
  // What a page looks like: from the first rank that registers a model.  Errors: as Pages::set_layout.
  // One that came with the memory of an earlier start gives way, with its pages; busy while some process
  // still uses those.
  Status set_layout(const kv::Layout& layout);

  // The memory of an earlier start (host/recover.h): before anything else happens, and set_self comes later.
  // Errors: the memory is of no use, and neither is this object.
  Status restore(kv::Former former);
  [[nodiscard]] std::vector<Recovery::Check> take_checks() { return recovery_.take_checks(); }
  void on_checked(std::uint32_t slot, bool good, const Now& now);
  // Asked for while recovering().
  void on_former_gone(const Now& now);
  [[nodiscard]] bool recovering() const { return recovery_.active(); }
  [[nodiscard]] const Recovery& recovery() const { return recovery_; }

  // Throws out what nobody holds.
  Pages::Dropped drop_arena(const Now& now);

  // Up and lost strictly alternate for an instance (net/peer.h).  `remote`: on another machine, so that it
  // cannot map the arena.
  void on_peer_up(const Peer& peer, PeerKind kind, bool remote, const Now& now);
  void on_peer_lost(const Peer& peer, const Now& now);
  // A process maps the arena, or does so no longer.  May come before and after the two above.
  void on_attached(const Peer& peer);
  void on_detached(const Peer& peer, const Now& now);

  void on_message(const wire::Envelope& message, const Now& now);
  // Answers of the DataPort.
  void on_pushed(std::uint64_t push, Code code, const Now& now);
  void on_concealed(const Peer& peer, std::uint64_t transfer, const Now& now);
  void on_time(const Now& now);
  // The daemon is to stop: nothing waits for what may come later.
  void hurry() { writeback_.hurry(); }
  // What an earlier start learnt (Fetches::cost).  Errors: invalid.
  Status restore_costs(std::string_view text) { return fetches_.restore_cost(text); }
  // The end of a turn: what di-meta is told in one piece.
  void flush(const Now& now);
  [[nodiscard]] Due next_due() const;
  [[nodiscard]] std::vector<wire::Envelope> take_outgoing() { return std::exchange(out_, {}); }

  // Counts of what can be acquired; all zero when nobody holds anything and no page is on its way.
  [[nodiscard]] std::vector<Gauge> gauges() const;
  [[nodiscard]] bool idle() const;
  [[nodiscard]] const Pages& pages() const { return pages_; }
  [[nodiscard]] const Fetches& fetches() const { return fetches_; }
  [[nodiscard]] const Fillings& fillings() const { return fillings_; }
  [[nodiscard]] const Reads& reads() const { return reads_; }
  [[nodiscard]] const Hedge& hedge() const { return hedge_; }
  [[nodiscard]] const Rebuilds& rebuilds() const { return rebuilds_; }
  [[nodiscard]] const Repairs& repairs() const { return repairs_; }
  [[nodiscard]] const Writeback& writeback() const { return writeback_; }
  [[nodiscard]] const Handovers& handovers() const { return handovers_; }
  [[nodiscard]] const Pushes& pushes() const { return pushes_; }
  [[nodiscard]] const Serves& serves() const { return serves_; }
  [[nodiscard]] const CoreCounters& counters() const { return counters_; }
  [[nodiscard]] std::size_t attached_count() const { return attached_.size(); }
  // The loops that go on behind the requests.  One that waits and has not moved for long hangs: whatever it
  // waits for ends by time (leases 120 s, repair_wait 60 s, deadlines of puts 30 s).
  struct Work {
    std::string_view name;
    bool waits = false;
    std::uint64_t moves = 0;  // grows with everything that it brings forward
  };
  [[nodiscard]] std::array<Work, 3> background() const;
  // Directory and some store are up: what waits for write-back can go.
  [[nodiscard]] bool store_reachable() const;
  // For `show kv`: who holds what.
  struct HolderRow {
    Holder holder;
    std::size_t pins = 0;
    std::size_t grants = 0;
  };
  [[nodiscard]] std::vector<HolderRow> holders() const;

  // No page free and referenced, pins and holders agree, every holder's client is up, every number
  // balances.  The message says what is wrong.
  [[nodiscard]] Status check() const;

 private:
  struct Claim {
    PinSet pins;                                    // sealed by the holder
    std::map<std::uint32_t, std::uint64_t> grants;  // by slot: the tag of its kv_open
  };
  struct PeerState {
    std::uint32_t generation = 0;
    PeerKind kind = PeerKind::other;
    bool remote = false;
  };

  [[nodiscard]] std::optional<Peer> up(const std::string& instance, PeerKind kind) const;
  [[nodiscard]] std::optional<Peer> store_up(const std::string& instance) const override;
  [[nodiscard]] std::optional<Peer> arena_up(const std::string& instance) const override;
  [[nodiscard]] std::optional<Peer> meta_up() const override;
  [[nodiscard]] bool remote(const Peer& peer) const override;
  [[nodiscard]] bool attached(const Peer& peer) const override { return attached_.contains(peer); }
  [[nodiscard]] std::optional<Peer> host_up(const std::string& instance) const override;

  void from_rank(const Peer& rank, const wire::Envelope& message, const Now& now);
  void from_router(const Peer& router, const wire::Envelope& message, const Now& now);
  void from_meta(const wire::Envelope& message, const Now& now);
  void from_store(const Peer& store, const wire::Envelope& message, const Now& now);
  void from_host(const Peer& host, const wire::Envelope& message, const Now& now);
  // Of a store, or of a host whose arena is read.
  void from_source(const Peer& source, const wire::Envelope& message, const Now& now);
  void open(const Holder& holder, const wire::Scope& scope, const wire::kv_open& message);
  // Another client, a prefill rank, has pages of that request here, or fetches them.
  [[nodiscard]] bool is_made_here(const Holder& holder) const;
  // Grants whose answers were not heard.
  void give_back_since(const Holder& holder, std::uint64_t tag);
  // Slots that a request has pinned or been granted.
  [[nodiscard]] std::set<std::uint32_t> held_by(const Holder& holder) const;
  void seal(const Holder& holder, const wire::kv_sealed& message, const Now& now);
  void release(const Holder& holder, bool by_client, const Now& now);
  void release_claim(const Holder& holder, bool by_client);
  void drop_client(const Peer& client, const Now& now);
  void settle(const Now& now);
  // What reads and rebuilds have to tell.
  void settle_reads(const Now& now);
  // What fillings have to tell; after every event of theirs.
  void hear_fillings(const Now& now);
  template <class M>
  std::optional<M> decode(const wire::Envelope& message);

  Options options_;
  Numbers numbers_;
  Outbox out_;
  kv::EntryPool entries_;
  Pages pages_;
  Leases leases_;
  Reads reads_;
  Hedge hedge_;
  Rebuilds rebuilds_;
  Fillings fillings_;
  Fetches fetches_;
  Repairs repairs_;
  Writeback writeback_;
  Pushes pushes_;
  Serves serves_;
  Handovers handovers_;
  std::map<std::string, PeerState> peers_;
  std::optional<Peer> meta_;
  std::map<Peer, std::uint32_t> attached_;  // connections of a process
  std::map<Holder, Claim> claims_;
  // What lost ranks may still be reading: kept until they let go of the arena.
  std::map<Peer, PinSet> lingering_;
  Recovery recovery_{pages_};
  bool layout_inherited_ = false;  // no rank has registered with it yet
  bool snapshot_due_ = false;
  std::uint64_t delta_seq_ = 0;
  CoreCounters counters_;
};

// What `program` and `role` of a Member make of an instance.
[[nodiscard]] PeerKind peer_kind(std::string_view program, std::string_view role);

}  // namespace di::host
