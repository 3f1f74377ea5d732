#include "tests/sim/cluster.h"

#include <algorithm>

#include "kv/chain.h"
#include "tests/sim/nodes.h"

namespace di::sim {

namespace {

// From the first request to the last, and for the faults.
constexpr Duration busy_time = milliseconds(2500);
// After the last fault and the last request everything is over within this time.  The longest waits one
// after the other: a seat or a hold of 60 s, an open put of 30 s with its grace, a lease.
constexpr Duration calm_time = seconds(240);
// Processes are away for at most 5 s at a time; a request that takes longer than a few of those has waited
// for the router's patience (20 s here), which means that somebody forgot to say something.
constexpr double slowest_max_s = 19;
// With one message lost: the time after which it is said again, twice, and the work.
constexpr double slowest_loss_s = 6;

// A hand-over and its seat, whose messages are said again every 2 s until they are answered.
constexpr std::uint16_t repeated[] = {
    wire::decode_seat::number,  wire::seat_granted::number, wire::kv_expect::number,
    wire::kv_expected::number,  wire::kv_handover::number,  wire::handover_sealed::number,
    wire::handover_ack::number, wire::kv_handed::number,
};

std::string number(std::uint64_t value) {
  return std::to_string(value);
}

// The script: eight questions.  Some take their time, some stall or refuse once in each process.
std::vector<engine::ScriptLine> make_script(Rng& rng) {
  std::string text;
  for (int question = 0; question < 8; ++question) {
    const std::string match = "{\"match\":\"q" + std::to_string(question) + "\"";
    const auto pieces = 1 + rng.below(24);
    std::string list;
    std::string begin;
    for (std::uint64_t i = 0; i < pieces; ++i) {
      std::string piece = "{\"text\":\"" + std::to_string(question) + "." + number(i) + " \"";
      if (question == 1 && i % 3 == 1) piece += ",\"delay_ms\":" + number(rng.below(30));
      piece += "}";
      list += (i == 0 ? "" : ",") + piece;
      if (i < pieces / 2) begin = list;
    }
    if (question == 2 && pieces >= 2)
      text += match + ",\"pieces\":[" + begin + "],\"finish\":\"stall\",\"times\":1}\n";
    if (question == 3) text += match + ",\"pieces\":[],\"finish\":\"refuse\",\"times\":1}\n";
    text += match + ",\"pieces\":[" + list + "],\"finish\":\"" + (question == 4 ? "length" : "stop") + "\"";
    if (question == 5) text += ",\"lag\":2";
    text += "}\n";
  }
  auto lines = engine::script_parse(text, "script");
  DI_ASSERT(lines.ok());
  return *std::move(lines);
}

Settings make_settings(Rng& rng, bool calm) {
  Settings settings;
  // Few bytes and one page per writer, or pages of four blocks of 256 KiB.
  const bool wide = rng.chance(0.15);
  settings.layout = wide ? *kv::layout_mla("sim-wide", 4, 2, 32768) : *kv::layout_mla("sim-small", 4, 3, 16);
  settings.arena_units = static_cast<std::uint32_t>(wide ? 48 + rng.below(100) : 20 + rng.below(80));
  settings.prefill_pool_blocks = static_cast<std::uint32_t>(40 + rng.below(60));
  settings.decode_pool_blocks = static_cast<std::uint32_t>(48 + rng.below(80));
  settings.requests_max = static_cast<std::uint32_t>(2 + rng.below(6));
  settings.chunk_tokens = static_cast<std::uint32_t>(8 + rng.below(40));
  settings.entries = static_cast<std::uint32_t>(16 + rng.below(48));
  settings.attempts_max = rng.chance(0.5) ? 4 : 40;
  settings.fetch_delay = rng.chance(0.4) ? Duration(milliseconds(rng.below(15))) : Duration{};
  settings.step_delay = rng.chance(0.3) ? Duration(milliseconds(rng.below(10))) : Duration{};
  settings.hold = rng.chance(0.5) ? seconds(60) : seconds(2);
  settings.seat_ttl = rng.chance(0.7) ? seconds(30) : milliseconds(300);
  settings.overlap = rng.chance(0.7);
  settings.admit = rng.chance(0.7) ? host::Admit::always : host::Admit::second_sighting;
  settings.store_fails = rng.chance(0.4) ? rng.uniform() * 0.2 : 0;
  settings.reconcile = rng.chance(0.5) ? milliseconds(200 + rng.below(3000)) : Duration{};
  settings.cross_check = settings.reconcile / 4;
  // Of these some hosts' encoders are wrong now and then, and their checksums are right.
  settings.encodes_wrong = settings.reconcile > seconds(2);
  switch (rng.below(3)) {
    case 0:
      break;  // 1+0
    case 1:
      settings.geometry = {2, 1};
      settings.stores = 2 + rng.below(2);
      break;
    default:
      settings.geometry = {4, 2};
      settings.stores = 4 + rng.below(3);
      break;
  }
  settings.lines = make_script(rng);
  // What a step takes here is what the script says, so that the costs learn anything: both choices are made.
  settings.arbiter = rng.chance(0.5);
  if (calm) {
    // No hold that is shorter than what is measured, and no store that refuses.
    settings.hold = seconds(60);
    settings.seat_ttl = seconds(30);
    settings.store_fails = 0;
  }
  return settings;
}

class Cluster {
 public:
  // `lost`: the only fault there is.
  Cluster(std::uint64_t seed, bool trace, std::optional<std::uint16_t> lost)
      : lost_(lost),
        world_(seed, trace),
        settings_(make_settings(world_.rng, lost.has_value())),
        data_(world_, settings_.store_fails),
        hosts_(world_.rng.chance(0.5) || lost ? 2 : 1),
        store_apart_(world_.rng.chance(0.5)),
        parks_(seed % 4 != 0) {
    settings_.ranks = seed % 3 == 0 ? 2 : 1;
    add_processes();
    make_requests();
    lost ? make_loss(*lost) : make_faults();
  }

  Report run() {
    const Instant limit = world_.now() + busy_time + calm_time;
    Instant over = limit;
    while (world_.step()) {
      if (world_.now() > limit) {
        world_.fail("not over in time:" + unfinished());
        break;
      }
      if (finished()) {
        over = world_.now();
        break;
      }
    }
    if (world_.failure().empty() && !finished()) world_.fail("waits without an end:" + unfinished());
    report_.failure = world_.failure();
    report_.events = world_.events();
    report_.seconds = static_cast<double>(to_ms(over - Instant{1'000'000'000})) / 1000;
    report_.requests = static_cast<int>(wants_.size());
    report_.moved = data_.moved();
    for (std::size_t i = 0; i < hosts_; ++i) {
      if (!world_.alive(host_[i])) continue;
      const host::Core& core = static_cast<HostNode*>(world_.node(host_[i]))->core();
      report_.cut += core.fetches().counters().fetches_cut;
      report_.rebuilt += core.fillings().counters().pages_rebuilt;
      report_.repaired += core.repairs().counters().columns;
      report_.cross_checked += core.repairs().counters().checks;
      report_.degraded += core.writeback().counters().degraded;
    }
    if (world_.alive(meta_)) {
      const directory::Index& index = static_cast<MetaNode*>(world_.node(meta_))->index();
      report_.encoded_wrong = index.counters().cross_checks_wrong;
    }
    if (router() != nullptr) report_.reentries = static_cast<int>(router()->core.reentries());
    return report_;
  }

 private:
  // A request as its client sees it.
  struct Want {
    request::NewRequest request;
    std::vector<Bytes> pieces;  // the whole answer
    bool cut = false;           // max_tokens ends it
    std::uint32_t next = 0;     // index
    bool last_seen = false;
    bool submitted = false;
    bool cancelled = false;
    bool ended = false;
    Instant taken_at{};
    std::uint32_t leaves_at = UINT32_MAX;  // index at which the client leaves
  };

  void add_processes() {
    const auto member = [&](std::string program, std::string name, std::string role) {
      Member m;
      m.instance = program + "." + name;
      m.program = std::move(program);
      m.role = std::move(role);
      m.host = "machine" + std::string(hosts_ == 2 && m.instance.back() == '1' ? "1" : "0");
      if (m.role == "store" && store_apart_) m.host = "store-machine";
      m.control = "sim://" + m.instance;
      if (m.program == "di-prefill" || m.program == "di-decode") {
        m.ranks = settings_.ranks;
        m.role = "script";
        m.model = "sim";
        m.layout = settings_.layout->descriptor();
        m.fingerprint = settings_.layout->fingerprint();
      }
      return m;
    };
    meta_ = world_.add_process(member("di-meta", "0", ""), [this](const Member&) {
      return std::make_unique<MetaNode>(world_, meta_, meta_disk_, settings_);
    });
    world_.set_meta(meta_, [this](const Member& self, std::uint64_t boot) {
      return static_cast<MetaNode*>(world_.node(meta_))->admit(self, boot, self.program == "di-meta");
    });
    for (std::size_t i = 0; i < hosts_; ++i) {
      host_[i] =
          world_.add_process(member("di-kvd", "host" + number(i), "host"), [this, i](const Member& self) {
            return std::make_unique<HostNode>(world_, host_[i], data_, self, settings_,
                                              parks_ ? &parked_[i] : nullptr);
          });
    }
    store_disks_.resize(settings_.stores);
    for (std::size_t i = 0; i < settings_.stores; ++i) {
      stores_.push_back(
          world_.add_process(member("di-kvd", "store" + number(i), "store"), [this, i](const Member&) {
            return std::make_unique<StoreNode>(world_, stores_[i], data_, store_disks_[i], settings_);
          }));
    }
    for (std::size_t i = 0; i < 2; ++i) {
      prefill_[i] = world_.add_process(member("di-prefill", number(i), ""), [this, i](const Member& self) {
        return std::make_unique<RankNode<rank::PrefillCore>>(world_, prefill_[i], self, settings_);
      });
      decode_[i] = world_.add_process(member("di-decode", number(i), ""), [this, i](const Member& self) {
        return std::make_unique<RankNode<rank::DecodeCore>>(world_, decode_[i], self, settings_);
      });
    }
    router_ = world_.add_process(member("di-router", "0", ""), [this](const Member&) {
      return std::make_unique<RouterNode>(
          world_, router_, settings_,
          RouterNode::Events{[this](const request::Emission& emission) { emitted(emission); },
                             [this](const request::Ending& ending) { ended(ending); }});
    });
    for (std::size_t process = 0; process < world_.count(); ++process) {
      if (process == meta_) {
        world_.start(process);
      } else {
        world_.after(world_.random_time(Duration(0), milliseconds(20)),
                     [this, process] { world_.start(process); });
      }
    }
  }

  // ---- clients

  void make_requests() {
    Rng& rng = world_.rng;
    Key root;
    root.raw[0] = std::byte{7};
    std::vector<std::vector<std::uint32_t>> prefixes(3);
    for (std::size_t i = 0; i < prefixes.size(); ++i) {
      const auto length = 4 + rng.below(40);
      for (std::uint64_t t = 0; t < length; ++t)
        prefixes[i].push_back(static_cast<std::uint32_t>(100 * i + rng.below(100)));
    }
    const auto count = 8 + rng.below(10);
    for (std::uint64_t i = 0; i < count; ++i) {
      Want want;
      put_le<std::uint64_t>(want.request.id.raw.data(), rng.next());
      put_le<std::uint64_t>(want.request.id.raw.data() + 8, i + 1);
      want.request.model = "sim";
      want.request.root = root;
      want.request.tenant = sim_tenant;
      auto question = rng.below(8);
      if (lost_ && question == 2) question = 0;  // that one stalls
      // The second digit of an id says what was asked.
      want.request.id.raw[0] = (want.request.id.raw[0] & std::byte{0xf0}) | static_cast<std::byte>(question);
      want.request.debug = "please q" + number(question);
      const std::vector<std::uint32_t>& prefix = prefixes[rng.below(3)];
      const auto shared = rng.chance(0.7) ? prefix.size() : rng.below(prefix.size()) + 1;
      want.request.prompt.assign(prefix.begin(), prefix.begin() + static_cast<std::ptrdiff_t>(shared));
      // The same question again, a longer one, or the next turn of a conversation.
      if (rng.chance(0.6)) {
        const auto more = rng.below(12);
        for (std::uint64_t t = 0; t < more; ++t)
          want.request.prompt.push_back(static_cast<std::uint32_t>(rng.below(1000)));
      } else if (rng.chance(0.5)) {
        const auto more = 1 + rng.below(24);
        for (std::uint64_t t = 0; t < more; ++t) {
          want.request.prompt.push_back(wire::script_token_base + static_cast<std::uint32_t>(t));
        }
      }
      want.request.keys = kv::chain_keys(root, want.request.prompt, settings_.layout->block_tokens());
      want.request.sampling.max_tokens = static_cast<std::uint32_t>(1 + rng.below(30));
      for (const engine::ScriptLine& line : settings_.lines) {
        if (want.request.debug.find(line.match) == std::string::npos) continue;
        want.pieces.clear();  // the last line that matches has all of it
        for (const engine::ScriptPiece& piece : line.pieces) want.pieces.push_back(piece.bytes);
      }
      want.cut = want.pieces.size() > want.request.sampling.max_tokens;
      if (want.cut) want.pieces.resize(want.request.sampling.max_tokens);
      if (rng.chance(0.15)) want.leaves_at = static_cast<std::uint32_t>(rng.below(want.pieces.size() + 1));
      const Duration when = milliseconds(60) + world_.random_time(Duration(0), busy_time);
      const bool leaves = rng.chance(0.1);
      const Duration stays = world_.random_time(Duration(0), milliseconds(120));
      wants_.push_back(std::move(want));
      const std::size_t index = wants_.size() - 1;
      world_.after(when, [this, index, leaves, stays] {
        submit(index);
        if (leaves) world_.after(stays, [this, index] { leave(index); });
      });
    }
  }

  RouterNode* router() { return static_cast<RouterNode*>(world_.node(router_)); }

  void submit(std::size_t index) {
    Want& want = wants_[index];
    if (want.ended) return;
    const auto again = [this, index] {
      ++report_.turned_away;
      world_.after(milliseconds(100), [this, index] { submit(index); });
    };
    if (router() == nullptr) return again();
    world_.at(router_, world_.now(), [this, index, again] {
      Want& asked = wants_[index];
      if (asked.ended) return;
      const Status status = router()->core.submit(asked.request, world_.now());
      if (!status.ok()) {
        if (status.error().code != Code::unreachable && status.error().code != Code::busy) {
          world_.fail("submit: " + status.error().message);
        }
        return again();
      }
      asked.submitted = true;
      asked.taken_at = world_.now();
    });
  }

  void leave(std::size_t index) {
    world_.at(router_, world_.now(), [this, index] {
      Want& want = wants_[index];
      if (want.ended) return;
      want.cancelled = true;
      if (!want.submitted) {  // gave up before it was taken
        want.ended = true;
        ++report_.cancelled;
        return;
      }
      router()->core.cancel(want.request.id, Code::cancelled, world_.now());
    });
  }

  Want* find(const RequestId& id) {
    for (Want& want : wants_) {
      if (want.request.id == id) return &want;
    }
    world_.fail("an answer to a request that nobody made");
    return nullptr;
  }

  void emitted(const request::Emission& emission) {
    Want* want = find(emission.id);
    if (want == nullptr) return;
    const std::string what =
        "request " + emission.id.text().substr(0, 4) + " index " + number(emission.index) + ": ";
    if (want->ended) return world_.fail(what + "a token after the end");
    if (emission.index != want->next) return world_.fail(what + "expected index " + number(want->next));
    if (want->last_seen) return world_.fail(what + "a token after the last one");
    if (emission.index >= want->pieces.size()) return world_.fail(what + "past the answer");
    if (emission.token.bytes != want->pieces[emission.index]) return world_.fail(what + "another text");
    ++want->next;
    ++report_.tokens;
    want->last_seen = emission.finish != wire::Finish::none;
    if (want->last_seen != (want->next == want->pieces.size()))
      return world_.fail(what + "the answer ends elsewhere");
    if (want->next >= want->leaves_at && !want->last_seen) {
      const auto index = static_cast<std::size_t>(want - wants_.data());
      world_.at(router_, world_.now(), [this, index] { leave(index); });
    }
  }

  void ended(const request::Ending& ending) {
    Want* want = find(ending.id);
    if (want == nullptr) return;
    const std::string what = "request " + ending.id.text().substr(0, 4) + " ends with " +
                             std::string(code_name(ending.code)) + " (" + ending.reason + "), attempts " +
                             number(ending.attempts) + ": ";
    if (want->ended) return world_.fail(what + "a second ending");
    want->ended = true;
    if (ending.output_tokens != want->next) return world_.fail(what + "another count of tokens");
    if (ending.cached_tokens >= want->request.prompt.size() && ending.cached_tokens > 0) {
      return world_.fail(what + "more cached than there may be");
    }
    report_.cached_tokens += ending.cached_tokens;
    // A question that stalls waits for the router's patience, by design.
    if (want->request.debug.find("q2") == std::string::npos) {
      const double took_s = static_cast<double>(to_ms(world_.now() - want->taken_at)) / 1000;
      report_.slowest_s = std::max(report_.slowest_s, took_s);
      if (took_s > (lost_ ? slowest_loss_s : slowest_max_s) && !patient_)
        world_.fail(what + "took " + number(static_cast<std::uint64_t>(took_s)) + " s");
    }
    if (ending.code == Code::ok) {
      ++report_.ok;
      if (!want->last_seen) world_.fail(what + "without its last token");
    } else if (ending.code == Code::cancelled) {
      ++report_.cancelled;
      if (!want->cancelled) world_.fail(what + "nobody left");
    } else if (ending.code == Code::unreachable && ending.attempts == 4 && settings_.attempts_max == 4) {
      ++report_.out_of_attempts;
    } else {
      world_.fail(what + "not an ending for this");
    }
  }

  // ---- faults

  void make_faults() {
    Rng& rng = world_.rng;
    const auto count = rng.chance(0.1) ? 0 : 3 + rng.below(4);
    report_.faults = static_cast<int>(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      const Duration when = milliseconds(60) + world_.random_time(Duration(0), busy_time);
      const auto kind = rng.below(100);
      const std::size_t mortal[] = {
          prefill_[0], prefill_[1],       decode_[0], decode_[1],
          host_[0],    host_[hosts_ - 1], meta_,      stores_[rng.below(stores_.size())]};
      const std::size_t victim = mortal[rng.below(std::size(mortal))];
      const Duration away = rng.chance(0.7) ? world_.random_time(milliseconds(20), milliseconds(500))
                                            : world_.random_time(milliseconds(500), seconds(5));
      const std::size_t a = rng.below(world_.count());
      const std::size_t b = rng.below(world_.count());
      const Duration notice = world_.random_time(Duration(0), milliseconds(200));
      const Duration length = rng.chance(0.5) ? world_.random_time(milliseconds(10), seconds(2))
                                              : world_.random_time(seconds(3), seconds(5));
      if (rng.chance(0.5)) {
        make_ambush();
        continue;
      }
      if (rng.chance(0.1)) {
        make_drop();
        continue;
      }
      if (rng.chance(0.3)) {
        make_damage(when, rng.below(stores_.size()), rng.chance(0.3));
        continue;
      }
      world_.after(when, [=, this] {
        if (kind < 55) {
          if (!world_.alive(victim)) return;
          world_.kill(victim);
          world_.after(away, [this, victim] { world_.start(victim); });
        } else if (kind < 80) {
          if (a != b && world_.linked(a, b)) world_.cut(a, b, notice);
        } else if (kind < 92) {
          world_.freeze(a, length);
        } else {
          drain(rng_pick(a), length);
        }
      });
    }
  }

  // At the n-th message of a kind, when it is sent or taken, one of the two ends dies, stops, or loses
  // the other.  The sender's death may be before or after what else it said in that turn.
  struct Ambush {
    std::uint16_t message = 0;
    std::uint64_t count = 0;
    bool taken = false;
    bool sender = false;
    std::uint64_t kind = 0;
    Duration away{};
  };

  void make_loss(std::uint16_t message) {
    world_.drops = [this, message, count = 1 + world_.rng.below(4)](std::uint16_t number) mutable {
      if (number != message || count == 0 || --count > 0) return false;
      ++report_.lost;
      return true;
    };
  }

  // What `fault.at` can drop (daemon/faults.def), and what answers the same questions.
  void make_drop() {
    static constexpr std::uint16_t droppable[] = {
        wire::kv_fetch::number,     wire::kv_fetching::number,     wire::kv_sealed::number,
        wire::kv_handover::number,  wire::kv_handed::number,       wire::kv_opened::number,
        wire::request_done::number, wire::done_ack::number,        wire::meta_plan::number,
        wire::meta_planned::number, wire::meta_put_commit::number, wire::meta_put_committed::number,
        wire::kv_put_done::number,  wire::kv_expected::number,     wire::meta_matched::number,
        wire::seat_granted::number, wire::decode_started::number,  wire::token_batch::number,
    };
    Rng& rng = world_.rng;
    const std::uint16_t message = droppable[rng.below(std::size(droppable))];
    const auto count = std::make_shared<std::uint64_t>(1 + rng.below(12));
    patient_ = patient_ || std::find(std::begin(repeated), std::end(repeated), message) == std::end(repeated);
    world_.drops = [message, count, next = world_.drops](std::uint16_t number) {
      if (number == message && *count > 0 && --*count == 0) return true;
      return next && next(number);
    };
  }

  void make_ambush() {
    static constexpr std::uint16_t places[] = {
        wire::prefill_bind::number,       wire::prefill_target::number,
        wire::prefill_progress::number,   wire::decode_seat::number,
        wire::seat_granted::number,       wire::decode_started::number,
        wire::token_batch::number,        wire::request_done::number,
        wire::request_stop::number,       wire::kv_fetch::number,
        wire::kv_fetching::number,        wire::kv_open::number,
        wire::kv_opened::number,          wire::kv_sealed::number,
        wire::kv_handover::number,        wire::kv_handed::number,
        wire::kv_expect::number,          wire::kv_expected::number,
        wire::kv_seated::number,          wire::kv_release::number,
        wire::kv_ready::number,           wire::kv_read::number,
        wire::kv_read_done::number,       wire::kv_put::number,
        wire::kv_put_done::number,        wire::meta_plan::number,
        wire::meta_planned::number,       wire::meta_put_open::number,
        wire::meta_put_opened::number,    wire::meta_put_commit::number,
        wire::meta_put_committed::number, wire::meta_matched::number,
        wire::meta_inventory_ack::number, wire::kv_push::number,
        wire::handover_open::number,      wire::handover_opened::number,
        wire::handover_pages::number,     wire::handover_slots::number,
        wire::handover_pushed::number,    wire::handover_sealed::number,
        wire::handover_ack::number,       wire::arena_read::number,
    };
    Rng& rng = world_.rng;
    Ambush ambush;
    ambush.message = places[rng.below(std::size(places))];
    ambush.count = 1 + rng.below(12);
    ambush.taken = rng.chance(0.5);
    ambush.sender = rng.chance(0.5);
    ambush.kind = rng.below(100);
    ambush.away = ambush.kind >= 80 || rng.chance(0.2)
                      ? world_.random_time(milliseconds(3200), seconds(5))
                      : world_.random_time(milliseconds(20), milliseconds(500));
    ambushes_.push_back(ambush);
    world_.watch = [this](std::size_t from, std::size_t to, std::uint16_t message, bool taken) {
      for (Ambush& waiting : ambushes_) {
        if (waiting.message != message || waiting.taken != taken || waiting.count == 0 || --waiting.count > 0)
          continue;
        if (waiting.count == 0) spring(waiting, from, to);
      }
    };
  }

  void spring(const Ambush& ambush, std::size_t from, std::size_t to) {
    std::size_t victim = ambush.sender ? from : to;
    if (victim == router_) victim = victim == from ? to : from;  // the router stays
    if (ambush.kind < 60) {
      // Not in the middle of its own event.
      world_.after(Duration(0), [this, victim, away = ambush.away] {
        if (!world_.alive(victim)) return;
        world_.kill(victim);
        world_.after(away, [this, victim] { world_.start(victim); });
      });
    } else if (ambush.kind < 80) {
      world_.cut(from, to, milliseconds(50));
    } else {
      world_.freeze(ambush.sender ? from : to, ambush.away);
    }
  }

  // Bits of a column flip where it is kept, or a disk is gone with all there is on it.
  void make_damage(Duration when, std::size_t store, bool all) {
    world_.after(when, [this, store, all] {
      StoreDisk& disk = store_disks_[store];
      if (all) {
        if (world_.alive(stores_[store])) world_.kill(stores_[store]);
        disk.columns.clear();
        world_.after(milliseconds(300), [this, store] { world_.start(stores_[store]); });
      } else if (!disk.columns.empty()) {
        auto column = disk.columns.begin();
        std::advance(column, static_cast<std::ptrdiff_t>(world_.rng.below(disk.columns.size())));
        Bytes& bytes = column->second.payload;
        bytes[world_.rng.below(bytes.size())] ^= std::byte{0x20};
      }
    });
  }

  std::size_t rng_pick(std::size_t any) const { return any % 2 == 0 ? prefill_[0] : decode_[0]; }

  void drain(std::size_t process, Duration length) {
    const auto set = [this, process](bool on) {
      if (!world_.alive(process)) return;
      world_.at(process, world_.now(), [this, process, on] {
        if (process == prefill_[0]) {
          static_cast<RankNode<rank::PrefillCore>*>(world_.node(process))->drain(on);
        } else {
          static_cast<RankNode<rank::DecodeCore>*>(world_.node(process))->drain(on);
        }
      });
    };
    set(true);
    world_.after(length, [set] { set(false); });
  }

  // ---- the end

  bool finished() {
    if (world_.now() < Instant{1'000'000'000} + milliseconds(60) + busy_time) return false;
    for (const Want& want : wants_) {
      if (!want.ended) return false;
    }
    if (!world_.all_up()) return false;
    for (std::size_t process = 0; process < world_.count(); ++process) {
      if (!world_.alive(process) || !world_.node(process)->held().empty()) return false;
    }
    return true;
  }

  std::string unfinished() {
    std::string text;
    for (const Want& want : wants_) {
      if (want.ended) continue;
      text += " [request " + want.request.id.text().substr(0, 4) + (want.submitted ? "" : " not taken");
      if (const request::Flight* flight =
              router() == nullptr ? nullptr : router()->core.find(want.request.id)) {
        text += " " + std::string(request::flight_state_name(flight->state)) + " attempt " +
                number(flight->attempt);
      }
      text += "]";
    }
    for (std::size_t process = 0; process < world_.count(); ++process) {
      const std::string held = world_.alive(process) ? world_.node(process)->held() : " away";
      if (!held.empty()) text += " [" + world_.member(process).instance + held + "]";
      for (std::size_t other = process + 1; other < world_.count(); ++other) {
        if (world_.linked(process, other) && !world_.up(process, other)) {
          text += " [no connection " + world_.member(process).instance + " " + world_.member(other).instance +
                  "]";
        }
      }
    }
    return text;
  }

  const std::optional<std::uint16_t> lost_;
  World world_;
  Settings settings_;
  DataPlane data_;
  const std::size_t hosts_;  // machines with an arena; the second has the ranks with an odd number
  const bool store_apart_;   // on a machine of its own
  MetaDisk meta_disk_;
  std::vector<StoreDisk> store_disks_;
  const bool parks_;  // arenas outlive their hosts' daemons
  Fd parked_[2];
  std::size_t meta_ = 0;
  std::size_t host_[2] = {};
  std::vector<std::size_t> stores_;
  std::size_t router_ = 0;
  std::size_t prefill_[2] = {};
  std::size_t decode_[2] = {};
  std::vector<Want> wants_;
  std::vector<Ambush> ambushes_;
  bool patient_ = false;  // a message is lost by itself: only time tells
  Report report_;
};

}  // namespace

Report run_cluster(std::uint64_t seed, bool trace) {
  Cluster cluster(seed, trace, std::nullopt);
  return cluster.run();
}

Report run_loss(std::uint64_t seed, std::uint16_t message, bool trace) {
  Cluster cluster(seed, trace, message);
  return cluster.run();
}

std::span<const std::uint16_t> said_again() {
  return repeated;
}

}  // namespace di::sim
