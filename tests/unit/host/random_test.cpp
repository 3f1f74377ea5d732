// Random messages in random order, with losses, repetitions, wrong bytes, stale generations and dying
// peers: check() holds after every step, a store never writes into a slot that is somebody else's, and
// when everybody has gone nothing is held.
#include <cstdio>

#include "base/rng.h"
#include "tests/unit/host/world.h"

namespace di::host {
namespace {

constexpr std::uint64_t seeds = 25;
constexpr int steps = 6000;
constexpr std::uint32_t chains = 5;
constexpr std::uint32_t chain_blocks = 14;
constexpr std::uint32_t requests = 6;

class Chaos {
 public:
  explicit Chaos(std::uint64_t seed) : rng_(seed), core_(options(rng_), arena_, data_) {
    EXPECT_TRUE(core_.set_layout(layout_).ok());
    for (const auto& [name, kind] :
         std::vector<std::pair<std::string, PeerKind>>{{"di-meta.0", PeerKind::meta},
                                                       {"di-kvd.store0", PeerKind::store},
                                                       {"di-kvd.store1", PeerKind::store},
                                                       {"di-kvd.store2", PeerKind::store},
                                                       {"di-prefill.0", PeerKind::rank},
                                                       {"di-prefill.1", PeerKind::rank},
                                                       {"di-decode.0", PeerKind::rank},
                                                       {"di-decode.1", PeerKind::rank},
                                                       {"di-router.0", PeerKind::router},
                                                       {"di-kvd.host1", PeerKind::host}}) {
      actors_.emplace_back();
      actors_.back().name = name;
      actors_.back().kind = kind;
      actors_.back().remote = kind == PeerKind::host || name == "di-kvd.store2";
      come_or_go(actors_.back());
    }
  }

  void run() {
    for (int step = 0; step < steps && !::testing::Test::HasFatalFailure(); ++step) {
      one_step();
      after();
    }
    wind_down();
  }

 private:
  struct Actor {
    std::string name;
    PeerKind kind = PeerKind::other;
    bool remote = false;  // on another machine: it reaches the arena through the data plane
    std::uint32_t generation = 0;
    bool connected = false;  // for the core
    bool mapped = false;
    bool running = false;  // the process lives (it may be cut off)
    std::vector<std::pair<wire::SlotRef, wire::Scope>> grants;
  };
  struct Tail {
    Peer rank;
    wire::Scope scope;
    wire::SlotRef slot;
  };
  // A read that a store works on.
  struct Writing {
    Peer store;
    wire::kv_read read;
    bool remote = false;
    std::uint32_t next = 0;
    bool cancelled = false;
  };
  // A hand-over that another host makes to a seat here.
  struct Pushing {
    Peer host;
    wire::Scope scope;
    std::uint64_t seat = 0;
    std::uint64_t transfer = 0;
    std::optional<wire::SlotRef> tail;
    std::vector<std::vector<Key>> pages;  // offered, waiting for slots
    std::vector<std::pair<wire::SlotRef, std::vector<Key>>> slots;
    bool sealed = false;
  };

  static Core::Options options(Rng& rng) {
    Core::Options options;
    options.self = {"di-kvd.host0", 77};
    options.arena = {.payload_bytes = (8 + rng.below(80)) * test_layout().page_bytes(1),
                     .slots_max = static_cast<std::uint32_t>(8 + rng.below(80))};
    options.entries_max = static_cast<std::uint32_t>(2 + rng.below(12));
    options.fetch.reads_per_source = static_cast<std::uint32_t>(1 + rng.below(4));
    if (rng.chance(0.3)) options.fetch.fetch_delay = milliseconds(50);
    options.writeback.queue_pages = 1 + rng.below(12);
    options.writeback.linger = milliseconds(rng.below(2) * 100);
    if (rng.chance(0.3)) options.writeback.admit = Admit::second_sighting;
    return options;
  }

  Now now() const { return {{product_}, {liveness_}}; }
  Actor& actor(std::size_t i) { return actors_[i]; }
  Actor* pick(PeerKind kind) {
    std::vector<Actor*> some;
    for (Actor& a : actors_) {
      if (a.kind == kind) some.push_back(&a);
    }
    return some[rng_.below(some.size())];
  }
  wire::Scope scope() {
    return {test_request(static_cast<std::uint32_t>(rng_.below(requests))),
            static_cast<std::uint16_t>(rng_.chance(0.9) ? 1 : 2), 0, rng_.chance(0.2) ? 300u : 0u};
  }
  // Mostly those of the request, so that requests meet.
  std::vector<Key> keys(const wire::Scope& scope) {
    if (rng_.chance(0.15)) {
      return test_keys(static_cast<std::uint32_t>(rng_.below(chains)), 0,
                       static_cast<std::uint32_t>(1 + rng_.below(chain_blocks)));
    }
    const auto number = get_le<std::uint32_t>(scope.request.raw.data());
    return test_keys(number % chains, 0, 1 + 2 * number);
  }

  template <class M>
  void queue(const Peer& from, const wire::Scope& scope, const M& message) {
    pending_.push_back(wire::Envelope::make(from.instance, from.generation, scope, message));
  }

  void one_step() {
    if (!pending_.empty() && (pending_.size() > 20 || rng_.chance(0.5))) return deliver();
    const std::uint64_t what = rng_.below(100);
    data_acts();
    if (what < 50) {
      client_acts();
    } else if (what < 62) {
      host_acts();
    } else if (what < 85) {
      store_acts();
    } else if (what < 87) {
      advance();
    } else if (what < 91) {
      core_.flush(now());
    } else {
      // Most are there most of the time.
      Actor& a = actors_[rng_.below(actors_.size())];
      if (!a.connected || rng_.chance(0.15) || (!a.mapped && rng_.chance(0.5))) come_or_go(a);
    }
  }

  void deliver() {
    if (pending_.empty()) return;
    const std::size_t i = rng_.chance(0.7) ? 0 : rng_.below(pending_.size());
    const wire::Envelope message = pending_[i];
    if (!rng_.chance(0.03))
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));  // or it comes again
    if (rng_.chance(0.03)) return;                                        // lost
    core_.on_message(message, now());
  }

  void client_acts() {
    if (rng_.chance(0.1)) {
      Actor& router = *pick(PeerKind::router);
      const Peer from{router.name, router.generation};
      if (rng_.chance(0.7)) {
        const wire::Scope wanted = scope();
        queue(from, wanted, wire::kv_prefetch{keys(wanted), static_cast<std::uint8_t>(rng_.below(3))});
      } else {
        queue(from, scope(), wire::kv_release{});
      }
      return;
    }
    if (rng_.chance(0.05)) {
      garbage();
      return;
    }
    Actor& rank = *pick(PeerKind::rank);
    const Peer from{rank.name, rank.generation};
    const wire::Scope mine = scope();
    switch (rng_.below(9)) {
      case 0:
        queue(from, mine, wire::kv_fetch{keys(mine)});
        break;
      case 1:
      case 7:
      case 8:
        queue(from, mine, wire::kv_release{});
        break;
      case 2: {
        wire::kv_open open;
        for (std::uint64_t i = 1 + rng_.below(3); i > 0; --i) {
          open.page_blocks.push_back(
              static_cast<std::uint32_t>(rng_.chance(0.97) ? 1 + rng_.below(4) : rng_.below(6)));
        }
        queue(from, mine, open);
        break;
      }
      case 3:
      case 4:
        write_and_seal(rank);
        break;
      case 5: {
        const std::uint64_t seat = get_le<std::uint32_t>(mine.request.raw.data());
        queue(from, mine, wire::kv_expect{seat, keys(mine), Key{}, rng_.chance(0.9) ? 3u : 0u});
        break;
      }
      case 6:
        hand_over();
        break;
    }
  }

  void hand_over() {
    if (tails_.empty()) return;
    const Tail& tail = tails_[rng_.below(tails_.size())];
    Actor& decode = *pick(PeerKind::rank);
    wire::kv_handover message;
    message.seat = get_le<std::uint32_t>(tail.scope.request.raw.data());
    message.decode = decode.name;
    message.host = rng_.chance(0.9) ? core_.self().instance : "di-kvd.host1";
    message.keys = keys(tail.scope);
    if (rng_.chance(0.95)) message.tail = tail.slot;
    if (rng_.chance(0.7)) {  // a request whose pages are there, and a seat that waits for it
      while (!message.keys.empty() && !core_.pages().has(message.keys.back())) message.keys.pop_back();
      queue({decode.name, decode.generation}, tail.scope,
            wire::kv_expect{message.seat, message.keys, Key{}, 3});
    }
    queue(tail.rank, tail.scope, message);
  }

  void write_and_seal(Actor& rank) {
    if (rank.grants.empty() || !rank.running) return;
    const std::size_t i = rng_.below(rank.grants.size());
    const auto [slot, mine] = rank.grants[i];
    rank.grants.erase(rank.grants.begin() + static_cast<std::ptrdiff_t>(i));
    wire::kv_sealed sealed;
    sealed.slot = slot;
    sealed.reuse = static_cast<std::uint8_t>(rng_.below(2));
    if (slot.page_blocks == 1 && rng_.chance(0.4)) {
      tails_.push_back({{rank.name, rank.generation}, mine, slot});
      if (tails_.size() > 12) tails_.erase(tails_.begin());
    } else {
      const auto chain = static_cast<std::uint32_t>(rng_.below(chains));
      const auto first =
          static_cast<std::uint32_t>(rng_.chance(0.8) ? rng_.below(3) * 4 : rng_.below(chain_blocks));
      sealed.keys = test_keys(chain, first, slot.page_blocks);
      if (rng_.chance(0.05)) sealed.keys.pop_back();
    }
    sealed.crcs = test_crcs(sealed.keys);
    const bool good = !rng_.chance(0.05);
    // A process writes whenever it lives; what it writes into must be its own or nobody's.
    const Page* page = core_.pages().find(slot.slot, slot.generation);
    if (page != nullptr && page->state == PageState::granted) {
      for (std::uint32_t g = 0; g < 4; ++g) {
        arena_.write_at(page->place.offset, layout_, slot.page_blocks, g, sealed.crcs[g] + (good ? 0 : 1));
      }
    }
    queue({rank.name, rank.generation}, mine, sealed);
  }

  void store_acts() {
    if (writing_.empty()) return;
    const std::size_t i = rng_.below(writing_.size());
    Writing& work = writing_[i];
    const auto drop = [&] { writing_.erase(writing_.begin() + static_cast<std::ptrdiff_t>(i)); };
    if (work.cancelled) {
      queue(work.store, {}, wire::kv_read_cancelled{work.read.transfer});
      return drop();
    }
    // A store maps the arena when it first has work there.
    for (Actor& a : actors_) {
      if (a.name != work.store.instance || a.mapped || a.remote) continue;
      a.mapped = true;
      core_.on_attached(work.store);
    }
    if (rng_.chance(0.05)) {
      const Code code = std::array{Code::io, Code::not_found, Code::corrupt, Code::stale}[rng_.below(4)];
      queue(work.store, {},
            wire::kv_read_done{work.read.transfer, static_cast<std::uint16_t>(code), work.next});
      return drop();
    }
    // Through the data plane nothing arrives that is not exposed (any more).
    const transfer::SlotName name{work.read.slot.slot, work.read.slot.generation};
    if (work.remote && !writable(work.store, work.read.transfer, name)) {
      queue(work.store, {},
            wire::kv_read_done{work.read.transfer, static_cast<std::uint16_t>(Code::stale), 0});
      return drop();
    }
    // The bytes arrive.  The slot must still be the one of the read, whatever the core thinks of it.
    const Page* page = core_.pages().find(work.read.slot.slot, work.read.slot.generation);
    ASSERT_TRUE(page != nullptr) << "a slot was given away while a store writes into it";
    std::vector<Key> keys = page->keys;
    const std::uint32_t crc = test_crcs(keys)[work.next] + (rng_.chance(0.03) ? 1 : 0);
    arena_.write_at(page->place.offset, layout_, work.read.page_blocks, work.next, crc);
    if (rng_.chance(0.7) || work.next == 3) {
      queue(work.store, {}, wire::kv_read_done{work.read.transfer, 0, work.next});
    }
    if (++work.next == 4) drop();
  }

  bool writable(const Peer& peer, std::uint64_t transfer, const transfer::SlotName& slot) const {
    const auto exposure = data_.exposures.find({peer, transfer});
    return exposure != data_.exposures.end() && exposure->second.access == transfer::Access::write &&
           exposure->second.slots.contains(slot);
  }

  // The data plane answers, in any order, and keeps its promises.
  void data_acts() {
    data_.full = rng_.chance(0.02);
    data_.unreachable = rng_.chance(0.05);
    data_.bytes_per_s = rng_.chance(0.1) ? 1000 : 1e9;
    if (!data_.concealing.empty() && rng_.chance(0.5)) {
      const auto [peer, transfer] = data_.take_concealed();
      core_.on_concealed(peer, transfer, now());
    }
    if (data_.pushes.empty()) return;
    const std::size_t i = rng_.below(data_.pushes.size());
    const test::FakeData::Push push = data_.pushes[i];
    data_.pushes.erase(data_.pushes.begin() + static_cast<std::ptrdiff_t>(i));
    const Code code = push.cancelled && rng_.chance(0.8) ? Code::cancelled
                      : rng_.chance(0.03)                ? Code::unreachable
                                                         : Code::ok;
    core_.on_pushed(push.number, code, now());
  }

  // Another host hands over to a seat here, or reads here.
  void host_acts() {
    Actor& other = *pick(PeerKind::host);
    const Peer from{other.name, other.generation};
    if (rng_.chance(0.2)) {
      const std::vector<Key> some = keys(scope());
      wire::arena_read read{++remote_transfer_,
                            some[rng_.below(some.size())],
                            static_cast<std::uint32_t>(1 + rng_.below(4)),
                            {},
                            1};
      read.slot = {static_cast<std::uint32_t>(rng_.below(50)), 1, read.page_blocks, 0, read.page_blocks};
      queue(from, {}, read);
      return;
    }
    if (rng_.chance(0.1)) return queue(from, {}, wire::kv_read_cancel{rng_.below(remote_transfer_ + 1)});
    if (pushings_.empty() || rng_.chance(0.2)) {
      Actor& decode = *pick(PeerKind::rank);
      const wire::Scope mine = scope();
      const std::uint64_t seat = get_le<std::uint32_t>(mine.request.raw.data());
      const bool tail = rng_.chance(0.9);
      if (rng_.chance(0.9)) {
        queue({decode.name, decode.generation}, mine,
              wire::kv_expect{seat, keys(mine), Key{}, tail ? 3u : 0u});
      }
      queue(from, mine, wire::handover_open{seat, decode.name, keys(mine), tail});
      return;
    }
    Pushing& push = pushings_[rng_.below(pushings_.size())];
    if (!push.slots.empty() && rng_.chance(0.7)) {
      const auto [slot, page_keys] = push.slots.back();
      push.slots.pop_back();
      if (rng_.chance(0.05)) return;
      write(push, slot, test_crcs(page_keys), rng_.chance(0.03));
      return queue(push.host, push.scope, wire::handover_pushed{push.seat, push.transfer, {slot}});
    }
    if (!push.pages.empty() || push.sealed) return;
    push.sealed = true;
    wire::handover_sealed sealed;
    sealed.seat = push.seat;
    sealed.transfer = push.transfer;
    sealed.tail_crcs = test_crcs({});
    if (push.tail) write(push, *push.tail, sealed.tail_crcs, rng_.chance(0.03));
    queue(push.host, push.scope, sealed);
  }

  void write(const Pushing& push, const wire::SlotRef& slot, const std::vector<std::uint32_t>& crcs,
             bool wrong) {
    if (!writable(push.host, push.transfer, {slot.slot, slot.generation})) return;
    const Page* page = core_.pages().find(slot.slot, slot.generation);
    ASSERT_TRUE(page != nullptr) << "a slot was given away while another host may write into it";
    if (page->state == PageState::sealed) return;  // written and verified before
    for (std::uint32_t g = 0; g < 4; ++g) {
      arena_.write_at(page->place.offset, layout_, slot.page_blocks, g, crcs[g] + (wrong ? 1 : 0));
    }
  }

  void advance() {
    const Duration by = std::array<Duration, 4>{milliseconds(20), milliseconds(200), seconds(1),
                                                seconds(rng_.chance(0.2) ? 20 : 1)}[rng_.below(4)];
    product_ += by.count();
    liveness_ += by.count();
    core_.on_time(now());
  }

  void come_or_go(Actor& a) {
    const Peer peer{a.name, a.generation};
    if (!a.running) {  // a new process
      a.generation = ++last_generation_;
      a.running = true;
      a.connected = true;
      a.grants.clear();
      core_.on_peer_up({a.name, a.generation}, a.kind, a.remote, now());
      return;
    }
    switch (a.connected ? rng_.below(4) : 1) {
      case 0:  // it maps the arena
        if (!a.mapped && !a.remote && (a.kind == PeerKind::rank || a.kind == PeerKind::store)) {
          a.mapped = true;
          core_.on_attached(peer);
        }
        break;
      case 1:
      case 2:  // cut off, or back
        a.connected = !a.connected;
        if (a.connected) {
          core_.on_peer_up(peer, a.kind, a.remote, now());
        } else {
          core_.on_peer_lost(peer, now());
          // Without the arena it cannot be in the middle of a write, and drops what it was to do.
          if (!a.mapped) std::erase_if(writing_, [&](const Writing& work) { return work.store == peer; });
          std::erase_if(pushings_, [&](const Pushing& push) { return push.host == peer; });
        }
        break;
      default:
        die(a);
        break;
    }
  }

  // kill -9: the process writes nothing more; connection and socket end in either order.
  void die(Actor& a) {
    const Peer peer{a.name, a.generation};
    a.running = false;
    a.grants.clear();
    std::erase_if(writing_, [&](const Writing& work) { return work.store == peer; });
    std::erase_if(pushings_, [&](const Pushing& push) { return push.host == peer; });
    const bool socket_first = rng_.chance(0.5);
    if (socket_first && a.mapped) core_.on_detached(peer, now());
    if (a.connected) core_.on_peer_lost(peer, now());
    if (!socket_first && a.mapped) core_.on_detached(peer, now());
    a.connected = false;
    a.mapped = false;
  }

  void garbage() {
    wire::Envelope message;
    const Actor& a = actors_[rng_.below(actors_.size())];
    message.peer = rng_.chance(0.9) ? a.name : "di-nobody.0";
    message.peer_generation = rng_.chance(0.8) ? a.generation : static_cast<std::uint32_t>(rng_.below(100));
    message.scope = scope();
    const auto& table = wire::message_table();
    message.number = table[rng_.below(table.size())].number;
    message.body.resize(rng_.below(40));
    for (std::byte& byte : message.body) byte = static_cast<std::byte>(rng_.below(4));
    pending_.push_back(std::move(message));
  }

  // What the core sent reaches the others, and they answer, mostly.
  void after() {
    if (rng_.chance(0.5)) core_.flush(now());
    if (rng_.chance(0.5) && core_.next_due().liveness < now().liveness) core_.on_time(now());  // a step
    for (const wire::Envelope& message : core_.take_outgoing()) answer(message);
    if (pending_.size() > 200) pending_.erase(pending_.begin(), pending_.begin() + 100);
    const Status status = core_.check();
    ASSERT_TRUE(status.ok()) << status.error().message;
  }

  void answer(const wire::Envelope& message) {
    if (message.peer == core_.self().instance) {
      wire::Envelope back = message;
      back.peer_generation = core_.self().generation;
      pending_.push_back(std::move(back));
      return;
    }
    Actor* to = nullptr;
    for (Actor& a : actors_) {
      if (a.name == message.peer && a.generation == message.peer_generation && a.running) to = &a;
    }
    if (to == nullptr) return;
    const Peer from{to->name, to->generation};
    const wire::Scope& scope = message.scope;
    switch (message.number) {
      case wire::kv_opened::number: {
        auto body = message.as<wire::kv_opened>();
        for (const wire::SlotRef& slot : body->slots) to->grants.emplace_back(slot, scope);
        break;
      }
      case wire::meta_plan::number: {
        if (rng_.chance(0.1)) return;
        auto body = message.as<wire::meta_plan>();
        wire::meta_planned planned;
        planned.ttl_ms = 9000;
        std::size_t at = 0;
        while (at < body->keys.size() && rng_.chance(0.8)) {
          const std::size_t count = std::min<std::size_t>(1 + rng_.below(4), body->keys.size() - at);
          wire::PlannedPage page;
          page.page = ++stripe_ << 8;
          page.count = static_cast<std::uint32_t>(count);
          page.page_blocks = page.count;
          page.keys.assign(body->keys.begin() + static_cast<std::ptrdiff_t>(at),
                           body->keys.begin() + static_cast<std::ptrdiff_t>(at + count));
          page.crcs = test_crcs(page.keys);
          page.columns = {{pick(PeerKind::store)->name, 0, 0}};
          if (rng_.chance(0.2)) {  // in arenas only
            page.columns.clear();
            if (rng_.chance(0.8)) page.arenas = {core_.self().instance, "di-kvd.host1"};
          }
          if (rng_.chance(0.03)) page.crcs.pop_back();
          planned.pages.push_back(std::move(page));
          at += count;
        }
        planned.lease = rng_.chance(0.1) ? 0 : ++lease_;
        if (planned.lease != 0) leases_.insert(planned.lease);
        queue(from, scope, planned);
        break;
      }
      case wire::meta_renew::number: {
        auto body = message.as<wire::meta_renew>();
        for (const std::uint64_t lease : body->leases) {
          ASSERT_TRUE(leases_.contains(lease)) << "renewed after its release";
        }
        break;
      }
      case wire::meta_release::number: {
        auto body = message.as<wire::meta_release>();
        for (const std::uint64_t lease : body->leases) leases_.erase(lease);
        break;
      }
      case wire::meta_put_open::number: {
        wire::meta_put_opened opened;
        opened.code = static_cast<std::uint16_t>(
            std::array{Code::ok, Code::ok, Code::exists, Code::busy, Code::invalid}[rng_.below(5)]);
        opened.stripe = ++stripe_;
        opened.data_columns = static_cast<std::uint16_t>(1 + rng_.below(3));
        opened.parity_columns = static_cast<std::uint16_t>(rng_.below(3));
        const auto offered = message.as<wire::meta_put_open>()->pages;
        opened.first = static_cast<std::uint16_t>(rng_.chance(0.8) ? 0 : rng_.below(offered.size()));
        opened.pages = static_cast<std::uint16_t>(
            1 + rng_.below(std::min<std::size_t>(offered.size() - opened.first, opened.data_columns)));
        std::vector<std::uint32_t> blocks;
        for (std::size_t i = 0; i < opened.pages; ++i)
          blocks.push_back(static_cast<std::uint32_t>(offered[opened.first + i].keys.size()));
        const auto shape = *kv::StripeShape::of(layout_, opened.data_columns, opened.parity_columns, blocks);
        for (std::uint32_t i = 0; i < shape.columns_stored(); ++i) {
          opened.columns.push_back(
              {pick(PeerKind::store)->name, 0, static_cast<std::uint16_t>(shape.stored_column(i))});
        }
        opened.ttl_ms = 30000;
        queue(from, scope, opened);
        break;
      }
      case wire::meta_put_commit::number: {
        const Code code = std::array{Code::ok, Code::exists, Code::no_space}[rng_.below(3)];
        queue(from, scope,
              wire::meta_put_committed{static_cast<std::uint16_t>(code),
                                       message.as<wire::meta_put_commit>()->stripe});
        break;
      }
      case wire::kv_read::number:
        writing_.push_back({from, *message.as<wire::kv_read>(), to->remote, 0, false});
        break;
      case wire::arena_read::number: {
        const auto want = *message.as<wire::arena_read>();
        wire::kv_read read;
        read.transfer = want.transfer;
        read.page_blocks = want.page_blocks;
        read.slot = want.slot;
        writing_.push_back({from, read, true, 0, false});
        break;
      }
      case wire::kv_read_cancel::number: {
        const std::uint64_t transfer = message.as<wire::kv_read_cancel>()->transfer;
        bool known = false;
        for (Writing& work : writing_) {
          if (work.store == from && work.read.transfer == transfer) known = work.cancelled = true;
        }
        if (!known) queue(from, {}, wire::kv_read_cancelled{transfer});
        break;
      }
      case wire::kv_put::number: {
        auto body = message.as<wire::kv_put>();
        const Code code = rng_.chance(0.93) ? Code::ok : Code::io;
        queue(from, {}, wire::kv_put_done{body->stripe, body->column, static_cast<std::uint16_t>(code)});
        break;
      }
      case wire::handover_open::number: {
        auto body = message.as<wire::handover_open>();
        wire::handover_opened opened;
        opened.seat = body->seat;
        opened.code = static_cast<std::uint16_t>(rng_.chance(0.8) ? Code::ok : Code::not_found);
        opened.transfer = ++remote_transfer_;
        for (std::uint32_t block = 0; block < body->keys.size(); ++block) {
          if (rng_.chance(0.5)) opened.missing.push_back(rng_.chance(0.98) ? block : block + 1);
        }
        if (body->tail) opened.slots = {{3, 1, 1, 0, 1}};
        queue(from, scope, opened);
        break;
      }
      case wire::handover_pages::number: {
        auto body = message.as<wire::handover_pages>();
        wire::handover_slots slots{body->seat, body->transfer, 0, {}};
        if (rng_.chance(0.03)) slots.code = static_cast<std::uint16_t>(Code::busy);
        for (const wire::PushPage& page : body->pages) {
          const auto blocks = static_cast<std::uint32_t>(page.keys.size());
          slots.slots.push_back(
              {static_cast<std::uint32_t>(rng_.below(99)), 1, blocks, 0, rng_.chance(0.9) ? blocks : 0});
        }
        queue(from, scope, slots);
        break;
      }
      case wire::handover_opened::number: {
        auto body = message.as<wire::handover_opened>();
        if (body->code != 0) break;
        Pushing push{from, scope, body->seat, body->transfer, std::nullopt, {}, {}, false};
        if (!body->slots.empty()) push.tail = body->slots[0];
        // Pages of one block each, or of two where they follow each other.
        const std::vector<Key> all =
            test_keys(get_le<std::uint32_t>(scope.request.raw.data()) % chains, 0, 64);
        wire::handover_pages pages{push.seat, push.transfer, {}};
        for (const std::uint32_t block : body->missing) {
          push.pages.push_back({all[block]});
          if (rng_.chance(0.3)) push.pages.back().push_back(all[block + 1]);
          pages.pages.push_back({Key{}, push.pages.back(), test_crcs(push.pages.back())});
        }
        if (!pages.pages.empty()) queue(from, scope, pages);
        pushings_.push_back(std::move(push));
        if (pushings_.size() > 8) pushings_.erase(pushings_.begin());
        break;
      }
      case wire::handover_slots::number: {
        auto body = message.as<wire::handover_slots>();
        for (Pushing& push : pushings_) {
          if (push.host != from || push.transfer != body->transfer) continue;
          for (std::size_t i = 0; i < body->slots.size() && i < push.pages.size(); ++i) {
            if (body->slots[i].count > 0) push.slots.emplace_back(body->slots[i], push.pages[i]);
          }
          push.pages.clear();
        }
        break;
      }
      case wire::handover_sealed::number:
        queue(from, scope, wire::handover_ack{message.as<wire::handover_sealed>()->seat, 0});
        break;
      default:
        break;
    }
  }

  void wind_down() {
    for (Actor& a : actors_) {
      if (a.running) die(a);
    }
    after();
    while (!data_.pushes.empty() || !data_.concealing.empty()) data_acts();
    after();
    for (const Gauge& gauge : core_.gauges()) {
      // Holds end by themselves; written pages wait for a directory.
      if (gauge.name == "holds" || gauge.name == "pins" || gauge.name == "used_bytes" ||
          gauge.name == "pending_writebacks")
        continue;
      EXPECT_EQ(gauge.count, 0u) << gauge.name << " after everybody has gone";
    }
    product_ += Duration(seconds(60)).count();
    core_.on_time(now());
    after();
    const Peer meta{"di-meta.0", ++last_generation_};
    core_.on_peer_up(meta, PeerKind::meta, false, now());
    for (int i = 0; i < 1000 && !core_.idle(); ++i) {
      for (const wire::Envelope& message : core_.take_outgoing()) {
        if (message.number != wire::meta_put_open::number) continue;
        core_.on_message(wire::Envelope::make(
                             meta.instance, meta.generation, message.scope,
                             wire::meta_put_opened{static_cast<std::uint16_t>(Code::exists), 0, 0, 0, {}, 0}),
                         now());
      }
      liveness_ += Duration(seconds(1)).count();
      core_.on_time(now());
    }
    for (const Gauge& gauge : core_.gauges()) EXPECT_EQ(gauge.count, 0u) << gauge.name;
    EXPECT_TRUE(arena_.entries.empty());
    const Status status = core_.check();
    EXPECT_TRUE(status.ok()) << status.error().message;
    const Books& books = core_.fetches().books();
    std::uint64_t lost = 0;
    for (const std::uint64_t blocks : books.lost) lost += blocks;
    EXPECT_EQ(books.matched, books.fetched + lost);
    EXPECT_EQ(books.fetched, books.swapped + books.unused);
    matched += books.matched;
    fetched += books.fetched;
    seated += core_.handovers().counters().seated;
    written += core_.writeback().counters().written;
    reads += core_.reads().counters().reads;
    arena_reads += core_.reads().counters().arena_reads;
    taken += core_.handovers().counters().pages_taken;
    pushed += core_.pushes().counters().pages;
    served += core_.serves().counters().served;
    EXPECT_TRUE(data_.exposures.empty()) << data_.exposures.size() << " exposures are left";
  }

  const kv::Layout layout_ = test_layout();
  Rng rng_;
  test::FakeArena arena_;
  test::FakeData data_;
  Core core_;
  std::vector<Actor> actors_;
  std::vector<wire::Envelope> pending_;  // messages on their way to the core
  std::vector<Writing> writing_;
  std::vector<Pushing> pushings_;
  std::uint64_t remote_transfer_ = 0;
  std::vector<Tail> tails_;
  std::set<std::uint64_t> leases_;
  std::uint64_t lease_ = 0;
  std::uint64_t stripe_ = 0;
  std::uint32_t last_generation_ = 100;
  std::int64_t product_ = 1'000'000'000;
  std::int64_t liveness_ = 1'000'000'000;

 public:
  std::uint64_t matched = 0, fetched = 0, seated = 0, written = 0, reads = 0;
  std::uint64_t arena_reads = 0, taken = 0, pushed = 0, served = 0;
};

// F14: pins, grants and leases of whoever aborts, dies or loses messages come back.
TEST(HostRandom, NothingIsLostUnderChaos) {
  std::uint64_t fetched = 0, seated = 0, written = 0, reads = 0;
  std::uint64_t arena_reads = 0, taken = 0, pushed = 0, served = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE("seed=" + std::to_string(seed));
    Chaos chaos(seed);
    chaos.run();
    if (::testing::Test::HasFailure()) {
      std::printf("failed with seed=%llu\n", static_cast<unsigned long long>(seed));
      return;
    }
    fetched += chaos.fetched;
    seated += chaos.seated;
    written += chaos.written;
    reads += chaos.reads;
    arena_reads += chaos.arena_reads;
    taken += chaos.taken;
    pushed += chaos.pushed;
    served += chaos.served;
  }
  // The chaos must reach what it is to test.
  EXPECT_GT(fetched, 500u);
  EXPECT_GT(seated, 10u);
  EXPECT_GT(written, 50u);
  EXPECT_GT(reads, 500u);
  EXPECT_GT(arena_reads, 50u);
  EXPECT_GT(taken, 100u);
  EXPECT_GT(pushed, 40u);
  EXPECT_GT(served, 20u);
}

}  // namespace
}  // namespace di::host
