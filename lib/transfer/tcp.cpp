#include "transfer/tcp.h"

#include <map>
#include <utility>

#include "base/assert.h"
#include "base/crypto.h"
#include "transfer/address.h"
#include "transfer/mover.h"

namespace di::transfer {

namespace {

// Every operation and exposure can have one event waiting.
constexpr std::size_t events_max = peers_max * ops_max + exposures_max + 4096;
// Commands that may be refused leave room for those that may not.
constexpr std::size_t commands_high = 1 << 20;

class Front final : public TcpFabric {
 public:
  Front(loop::Loop& loop, const TcpOptions& options, Fd listener, std::string endpoint)
      : endpoint_(std::move(endpoint)),
        region_(options.region != nullptr),
        events_box_(events_max),
        mover_(std::make_unique<Mover>(options, std::move(listener), events_box_)),
        reader_(loop, events_box_, "fabric",
                [this](Mover::Event&& event) { std::visit([this](auto& what) { on(what); }, event); }) {}

  std::string endpoint() const override { return endpoint_; }
  void set_self(const Peer& self) override { mover_->post(Mover::Self{self}); }
  void set_events(Events events) override { events_ = std::move(events); }

  Status expose(const Peer& to, TransferId transfer, Access access, std::vector<SlotName> slots) override {
    if (!region_) return Error{Code::invalid, 0, "no memory to open to a peer"};
    if (exposures_.contains({to, transfer})) return Error{Code::exists, 0, "the transfer is open already"};
    if (exposures_.size() >= exposures_max || exposed_slots_ + slots.size() > exposed_slots_max) {
      return Error{Code::busy, 0, "too much is open to peers"};
    }
    exposures_.emplace(std::pair{to, transfer}, Exposure{slots.size(), false});
    exposed_slots_ += slots.size();
    mover_->post(Mover::Expose{to, transfer, access, std::move(slots)});
    return {};
  }

  Status extend(const Peer& to, TransferId transfer, std::vector<SlotName> slots) override {
    const auto at = exposures_.find({to, transfer});
    if (at == exposures_.end() || at->second.concealing) return Error{Code::not_found, 0, "no such transfer"};
    if (exposed_slots_ + slots.size() > exposed_slots_max || mover_->commands() > commands_high) {
      return Error{Code::busy, 0, "too much is open to peers"};
    }
    at->second.slots += slots.size();
    exposed_slots_ += slots.size();
    mover_->post(Mover::Extend{to, transfer, std::move(slots)});
    return {};
  }

  void conceal(const Peer& to, TransferId transfer) override {
    const auto at = exposures_.find({to, transfer});
    if (at != exposures_.end()) {
      if (std::exchange(at->second.concealing, true)) return;
    }
    mover_->post(Mover::Conceal{to, transfer});
  }

  Result<Ticket> grant(const Peer& to, bool seal) override {
    if (mover_->tickets() >= tickets_max) return Error{Code::busy, 0, "too many tickets are out"};
    Ticket ticket;
    random_bytes(std::as_writable_bytes(std::span(ticket.secret)));
    ticket.seal = seal;
    if (seal) random_bytes(std::as_writable_bytes(std::span(ticket.key)));
    mover_->ticket_counted();
    mover_->post(Mover::Grant{to, ticket});
    return ticket;
  }

  void ticket(const Peer& peer, const std::string& endpoint, const Ticket& ticket) override {
    mover_->post(Mover::Dial{peer, endpoint, ticket});
  }
  void ticket_refused(const Peer& peer) override { mover_->post(Mover::Dial{peer, {}, std::nullopt}); }

  Result<OpId> write(const Peer& peer, TransferId transfer, const Place& to, ByteView from,
                     Class cls) override {
    // The mover only reads from it.
    return submit({0, peer, true, transfer, to, const_cast<std::byte*>(from.data()), cls}, from.size());
  }
  Result<OpId> read(const Peer& peer, TransferId transfer, const Place& from, MutableByteView into,
                    Class cls) override {
    return submit({0, peer, false, transfer, from, into.data(), cls}, into.size());
  }

  void cancel(OpId op) override {
    const auto at = ops_.find(op);
    if (at == ops_.end() || std::exchange(at->second.cancelled, true)) return;
    mover_->post(Mover::Cancel{op});
  }

  void peer_lost(const Peer& peer) override {
    for (auto at = exposures_.lower_bound({peer, 0}); at != exposures_.end() && at->first.first == peer;
         ++at) {
      at->second.concealing = true;
    }
    mover_->post(Mover::Lost{peer});
    if (const auto at = peers_.find(peer); at != peers_.end()) {
      at->second.bytes_per_s = 0;
      if (at->second.ops == 0) peers_.erase(at);
    }
  }

  Region* view(const Peer&) override { return nullptr; }

  LinkState link(const Peer& peer) const override {
    const auto at = peers_.find(peer);
    return at == peers_.end() ? LinkState{} : LinkState{at->second.queued_bytes, at->second.bytes_per_s};
  }
  FabricGauges gauges() const override {
    return {mover_->connections(), ops_.size(), exposures_.size(), mover_->tickets()};
  }
  FabricCounters counters() const override { return mover_->counters(); }
  void see_arrivals() const override { mover_->see_arrivals(); }

 private:
  struct Exposure {
    std::size_t slots = 0;
    bool concealing = false;
  };
  struct OpState {
    Peer peer;
    std::uint64_t bytes = 0;
    bool cancelled = false;
  };
  struct PeerState {
    std::size_t ops = 0;
    std::uint64_t queued_bytes = 0;
    double bytes_per_s = 0;
  };

  Result<OpId> submit(Mover::Submit&& what, std::size_t local_bytes) {
    const std::uint64_t bytes = what.place.bytes;
    if (bytes == 0 || bytes != local_bytes) return Error{Code::invalid, 0, "an operation of no or two sizes"};
    if (!peers_.contains(what.peer) && peers_.size() >= peers_max) {
      std::erase_if(peers_, [](const auto& entry) { return entry.second.ops == 0; });
      if (peers_.size() >= peers_max) return Error{Code::busy, 0, "too many peers"};
    }
    PeerState& peer = peers_[what.peer];
    if (peer.ops >= ops_max || (peer.ops > 0 && peer.queued_bytes + bytes > queue_bytes_max)) {
      return Error{Code::busy, 0, "the peer's queue is full"};
    }
    ++peer.ops;
    peer.queued_bytes += bytes;
    what.id = next_op_++;
    const OpId id = what.id;
    ops_.emplace(id, OpState{what.peer, bytes, false});
    mover_->post(std::move(what));
    return id;
  }

  void on(const Mover::WantTicket& event) {
    if (events_.want_ticket) {
      events_.want_ticket(event.peer);
    } else {
      ticket_refused(event.peer);
    }
  }
  void on(const Mover::Done& event) {
    const auto at = ops_.find(event.id);
    DI_ASSERT(at != ops_.end());
    const auto peer = peers_.find(at->second.peer);
    DI_ASSERT(peer != peers_.end());
    --peer->second.ops;
    peer->second.queued_bytes -= at->second.bytes;
    ops_.erase(at);
    if (events_.done) events_.done(event.id, event.code);
  }
  void on(const Mover::Concealed& event) {
    if (const auto at = exposures_.find({event.to, event.transfer}); at != exposures_.end()) {
      exposed_slots_ -= at->second.slots;
      exposures_.erase(at);
    }
    if (events_.concealed) events_.concealed(event.to, event.transfer);
  }
  void on(const Mover::Rate& event) {
    if (const auto at = peers_.find(event.peer); at != peers_.end())
      at->second.bytes_per_s = event.bytes_per_s;
  }

  const std::string endpoint_;
  const bool region_;
  Events events_;
  std::map<std::pair<Peer, TransferId>, Exposure> exposures_;
  std::size_t exposed_slots_ = 0;
  std::map<OpId, OpState> ops_;
  std::map<Peer, PeerState> peers_;
  OpId next_op_ = 1;
  loop::Mailbox<Mover::Event> events_box_;
  std::unique_ptr<Mover> mover_;
  loop::MailboxReader<Mover::Event> reader_;
};

}  // namespace

Result<std::unique_ptr<TcpFabric>> make_tcp_fabric(loop::Loop& loop, const TcpOptions& options) {
  if (options.max_unit_bytes == 0 || options.max_unit_bytes > frame_payload_bytes_max) {
    return Error{Code::invalid, 0, "max_unit_bytes: want 1 to " + std::to_string(frame_payload_bytes_max)};
  }
  Result<DataListener> listener = data_listen(options.listen);
  if (!listener) return listener.error();
  return std::unique_ptr<TcpFabric>(
      std::make_unique<Front>(loop, options, std::move(listener->fd), std::move(listener->endpoint)));
}

}  // namespace di::transfer
