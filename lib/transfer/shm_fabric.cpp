#include "transfer/shm_fabric.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "transfer/copy.h"
#include "transfer/exposure.h"
#include "transfer/shm.h"

namespace di::transfer {

namespace {

class Mapped final : public ShmFabric {
 public:
  Mapped(loop::Loop& loop, const ShmFabricOptions& options)
      : loop_(loop), options_(options), self_(options.self), alive_(std::make_shared<bool>(true)) {}
  ~Mapped() override { *alive_ = false; }

  void set_self(const Peer& self) override { self_ = self; }
  void set_events(Events events) override { events_ = std::move(events); }

  Status expose(const Peer& to, TransferId transfer, Access, std::vector<SlotName>) override {
    if (exposed_.size() >= exposures_max) return Error{Code::busy, 0, "too much is open to peers"};
    if (!exposed_.emplace(std::pair{to, transfer}, false).second) {
      return Error{Code::exists, 0, "the transfer is open already"};
    }
    return {};
  }
  Status extend(const Peer& to, TransferId transfer, std::vector<SlotName>) override {
    const auto at = exposed_.find({to, transfer});
    if (at == exposed_.end() || at->second) return Error{Code::not_found, 0, "no such transfer"};
    return {};
  }
  void conceal(const Peer& to, TransferId transfer) override {
    const auto at = exposed_.find({to, transfer});
    if (at != exposed_.end() && std::exchange(at->second, true)) return;
    later([this, to, transfer] {
      exposed_.erase({to, transfer});
      if (events_.concealed) events_.concealed(to, transfer);
    });
  }
  Result<Ticket> grant(const Peer&, bool) override {
    return Error{Code::unsupported, 0, "shared memory has no tickets"};
  }
  void ticket(const Peer&, const std::string&, const Ticket&) override {}
  void ticket_refused(const Peer&) override {}

  Result<OpId> write(const Peer& peer, TransferId, const Place& to, ByteView from, Class) override {
    // A write only reads from it.
    return submit(peer, {to, const_cast<std::byte*>(from.data()), true}, from.size());
  }
  Result<OpId> read(const Peer& peer, TransferId, const Place& from, MutableByteView into, Class) override {
    return submit(peer, {from, into.data(), false}, into.size());
  }
  void cancel(OpId op) override {
    // Copies are made in turns of their own, so nothing is half way here.
    const auto at = where_.find(op);
    if (at == where_.end()) return;
    Link& link = links_.at(at->second);
    const auto queued =
        std::find_if(link.queue.begin(), link.queue.end(), [op](const Op& each) { return each.id == op; });
    if (queued != link.queue.end()) end(link, queued, Code::cancelled);
  }

  void peer_lost(const Peer& peer) override {
    for (auto at = exposed_.lower_bound({peer, 0}); at != exposed_.end() && at->first.first == peer; ++at) {
      conceal(peer, at->first.second);
    }
    const auto at = links_.find(peer);
    if (at == links_.end()) return;
    detach(at->second);
    fail_all(at->second);
    at->second.gone = true;
    forget_idle();
  }

  void attach(const Peer& peer) override {
    if (Link* link = link_of(peer)) dial(*link);
  }
  Region* view(const Peer& peer) override {
    const auto at = links_.find(peer);
    return at == links_.end() ? nullptr : at->second.region.get();
  }
  LinkState link(const Peer& peer) const override {
    const auto at = links_.find(peer);
    if (at == links_.end()) return {};
    return {at->second.queued_bytes, at->second.bytes_per_s};
  }
  FabricGauges gauges() const override {
    std::size_t mapped = 0;
    for (const auto& [peer, link] : links_) mapped += link.region ? 1 : 0;
    return {mapped, where_.size(), exposed_.size(), 0};
  }
  FabricCounters counters() const override { return counters_; }
  void see_arrivals() const override {}  // the channel between the processes orders them

 private:
  struct Op {
    Place place;
    std::byte* local = nullptr;
    bool write = false;
    OpId id = 0;
    std::uint64_t copied = 0;
  };
  struct Link {
    explicit Link(Peer who) : peer(std::move(who)) {}
    const Peer peer;
    std::unique_ptr<ShmClient> client;
    std::unique_ptr<Region> region;
    std::unique_ptr<loop::Timer> timer;  // of the dial, or of the pause
    bool pausing = false;
    bool gone = false;  // to be forgotten when the last done() is out
    unsigned failures = 0;
    std::deque<Op> queue;
    std::size_t ops = 0;  // queued, or with done() under way
    std::uint64_t queued_bytes = 0;
    double bytes_per_s = 0;
  };

  void later(std::function<void()> what) {
    loop_.post("shm-fabric", [alive = alive_, what = std::move(what)] {
      if (*alive) what();
    });
  }

  Link* link_of(const Peer& peer) {
    if (const auto at = links_.find(peer); at != links_.end()) {
      at->second.gone = false;
      return &at->second;
    }
    if (links_.size() >= peers_max) return nullptr;
    return &links_.emplace(peer, Link(peer)).first->second;
  }

  Result<OpId> submit(const Peer& peer, Op&& op, std::size_t local_bytes) {
    const std::uint64_t bytes = op.place.bytes;
    if (bytes == 0 || bytes != local_bytes) return Error{Code::invalid, 0, "an operation of no or two sizes"};
    Link* link = link_of(peer);
    if (link == nullptr) return Error{Code::busy, 0, "too many peers"};
    if (link->ops >= ops_max || (link->ops > 0 && link->queued_bytes + bytes > queue_bytes_max)) {
      return Error{Code::busy, 0, "the peer's queue is full"};
    }
    op.id = next_op_++;
    const OpId id = op.id;
    ++link->ops;
    link->queued_bytes += bytes;
    where_[id] = peer;
    link->queue.push_back(std::move(op));
    if (link->region) {
      copy_later();
    } else if (link->failures > 0) {
      end(*link, std::prev(link->queue.end()), Code::unreachable);
    } else {
      dial(*link);
    }
    return id;
  }

  void end(Link& link, std::deque<Op>::iterator at, Code code) {
    const OpId id = at->id;
    link.queued_bytes -= at->place.bytes;
    link.queue.erase(at);
    if (code == Code::cancelled) {
      ++counters_.ops_cancelled;
    } else if (code != Code::ok) {
      ++counters_.ops_failed;
    }
    later([this, id, code, peer = link.peer] {
      where_.erase(id);
      --links_.at(peer).ops;
      forget_idle();
      if (events_.done) events_.done(id, code);
    });
  }
  void fail_all(Link& link) {
    while (!link.queue.empty()) end(link, link.queue.begin(), Code::unreachable);
  }
  void forget_idle() {
    std::erase_if(links_, [](const auto& entry) { return entry.second.gone && entry.second.ops == 0; });
  }

  void dial(Link& link) {
    if (link.region || link.client || link.pausing) return;
    ++counters_.dials;
    auto made = ShmClient::connect(
        loop_, options_.arena_path(link.peer), {self_.instance, self_.generation},
        {[this, &link](const wire::arena_region& region, Fd fd) { on_attached(link, region, std::move(fd)); },
         [this, &link](const Error&) { on_detached(link); }});
    if (!made) {
      failed(link);
      return;
    }
    link.client = *std::move(made);
    start_timer(link, options_.dial_wait);
  }
  void start_timer(Link& link, Duration after) {
    if (!link.timer) {
      link.timer = std::make_unique<loop::Timer>(loop_, loop::TimerKind::liveness, "shm-dial",
                                                 [this, &link] { on_timer(link); });
    }
    link.timer->start_after(after);
  }
  void on_timer(Link& link) {
    if (std::exchange(link.pausing, false)) {
      // The background look whether it is back; a lost peer has no link any more.
      dial(link);
    } else if (!link.region) {
      failed(link);
    }
  }
  void on_attached(Link& link, const wire::arena_region& region, Fd fd) {
    // Another process may have the path by now.
    if (region.instance != link.peer.instance || region.generation != link.peer.generation) {
      later([this, peer = link.peer] { fail_later(peer); });
      return;
    }
    auto mapped = options_.map(region, std::move(fd));
    if (!mapped) {
      later([this, peer = link.peer] { fail_later(peer); });
      return;
    }
    link.region = *std::move(mapped);
    link.failures = 0;
    link.timer->cancel();
    copy_later();
  }
  // Not from inside the client's own callback, which failed() would destroy.
  void fail_later(const Peer& peer) {
    const auto at = links_.find(peer);
    if (at != links_.end() && at->second.client && !at->second.region) failed(at->second);
  }
  void on_detached(Link& link) {
    later([this, peer = link.peer] {
      const auto at = links_.find(peer);
      if (at != links_.end() && at->second.client) failed(at->second);
    });
  }
  void detach(Link& link) {
    link.client.reset();
    link.region.reset();
    link.pausing = false;
    if (link.timer) link.timer->cancel();
  }
  void failed(Link& link) {
    detach(link);
    ++counters_.dials_failed;
    ++link.failures;
    link.pausing = true;
    start_timer(link, dial_pause(link.failures, options_.dial_pause_min, options_.dial_pause_max));
    fail_all(link);
  }

  void copy_later() {
    if (std::exchange(copying_, true)) return;
    later([this] {
      copying_ = false;
      copy_some();
    });
  }
  void copy_some() {
    std::uint64_t left = copy_turn_bytes;
    bool more = false;
    for (auto& [peer, link] : links_) {
      if (!link.region) continue;
      const Instant start = loop_.monotonic_now();
      const std::uint64_t before = left;
      while (!link.queue.empty() && left > 0) copy_step(link, left);
      if (before != left) measure(link, before - left, loop_.monotonic_now() - start);
      more = more || !link.queue.empty();
    }
    if (more) copy_later();
  }
  void copy_step(Link& link, std::uint64_t& left) {
    Op& op = link.queue.front();
    const Result<MutableByteView> slot = link.region->resolve(op.place.slot);
    if (!slot) {
      const bool stale = slot.error().code == Code::stale;
      ++(stale ? counters_.refused_stale : counters_.refused_bounds);
      end(link, link.queue.begin(), stale ? Code::stale : Code::invalid);
      return;
    }
    if (op.place.offset > slot->size() || op.place.bytes > slot->size() - op.place.offset) {
      ++counters_.refused_bounds;
      end(link, link.queue.begin(), Code::invalid);
      return;
    }
    const std::uint64_t bytes = std::min(left, op.place.bytes - op.copied);
    const MutableByteView theirs = slot->subspan(op.place.offset + op.copied, bytes);
    const MutableByteView ours(op.local + op.copied, bytes);
    if (op.write) {
      copy_streaming(theirs, ours);
    } else {
      copy_streaming(ours, theirs);
    }
    left -= bytes;
    op.copied += bytes;
    (op.write ? counters_.written_bytes : counters_.read_bytes) += bytes;
    if (op.copied == op.place.bytes) end(link, link.queue.begin(), Code::ok);
  }
  static void measure(Link& link, std::uint64_t bytes, Duration busy) {
    const double busy_s = std::max(static_cast<double>(busy.count()), 1.0) * 1e-9;
    const double rate = static_cast<double>(bytes) / busy_s;
    // The past weighs 1/e after a tenth of a second of copying.
    link.bytes_per_s = link.bytes_per_s == 0
                           ? rate
                           : link.bytes_per_s + (1 - std::exp(-busy_s / 0.1)) * (rate - link.bytes_per_s);
  }

  loop::Loop& loop_;
  const ShmFabricOptions options_;
  Peer self_;
  Events events_;
  FabricCounters counters_;
  std::map<std::pair<Peer, TransferId>, bool> exposed_;  // true: concealed() is under way
  std::map<Peer, Link> links_;
  std::map<OpId, Peer> where_;
  OpId next_op_ = 1;
  bool copying_ = false;
  std::shared_ptr<bool> alive_;
};

}  // namespace

std::unique_ptr<ShmFabric> make_shm_fabric(loop::Loop& loop, const ShmFabricOptions& options) {
  return std::make_unique<Mapped>(loop, options);
}

}  // namespace di::transfer
