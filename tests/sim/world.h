// tests/sim/world.h: time, processes, connections and arena sockets of a simulated fleet.
//
// One thread, one clock, one order of events, all from a seed.  A process is a Node (a shell around a
// core) that lives, freezes, dies and comes back with a new generation.  Two processes that talk share
// one connection: what one sends arrives in order after a random time, or, when the connection breaks,
// not at all from some message on; each end hears of the loss in its own time, and of the return after
// both have heard.  An arena socket is a connection of its own that only says "attached" and "gone".
// Bounds: `events_max` in all, `turns_max` at one instant (a timer that does not move is a busy loop).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"
#include "kv/arena.h"
#include "wire/envelope.h"

namespace di::sim {

using wire::Member;

class Node {
 public:
  virtual ~Node() = default;
  virtual void on_peer_up(const Member& peer) = 0;
  virtual void on_peer_lost(const Member& peer) = 0;
  virtual void on_message(const wire::Envelope& message) = 0;
  virtual void on_time() = 0;
  // After every event: sends what is to be sent, checks itself, says when on_time() is due next.
  virtual Instant turn() = 0;
  // Arena sockets: of the host (a client came, went) and of the client (its arena, or the end).
  virtual void on_client(const Member& client, bool attached) {
    static_cast<void>(client), static_cast<void>(attached);
  }
  virtual void on_arena(std::uint64_t socket, std::uint32_t generation,
                        std::shared_ptr<kv::ArenaClient> arena) {
    static_cast<void>(socket), static_cast<void>(generation), static_cast<void>(arena);
  }
  // What is held and should not be when nothing goes on; empty when idle.
  [[nodiscard]] virtual std::string held() const = 0;
  // Of a host: its arena.
  [[nodiscard]] virtual kv::ArenaOwner* arena() { return nullptr; }
};

class World {
 public:
  static constexpr std::uint64_t events_max = 2'000'000;
  static constexpr int turns_max = 20'000;

  World(std::uint64_t seed, bool trace) : rng(seed), trace_(trace) {}

  // ---- time

  void at(Instant when, std::function<void()> run) { add(when, -1, 0, std::move(run)); }
  void after(Duration wait, std::function<void()> run) { at(now() + wait, std::move(run)); }
  // For a process: dropped when it dies before, deferred while it is frozen.
  void at(std::size_t process, Instant when, std::function<void()> run) {
    add(when, static_cast<int>(process), places_[process].life, std::move(run));
  }
  void after(std::size_t process, Duration wait, std::function<void()> run) {
    at(process, now() + wait, std::move(run));
  }
  [[nodiscard]] Instant now() const { return clock.now(); }
  // Runs the next event; false when there is none, or something failed.
  bool step();

  // ---- processes

  using Start = std::function<std::unique_ptr<Node>(const Member& self)>;
  // Says where generations come from: asks di-meta's node; 0 when it refuses.
  using Register = std::function<Member(const Member& self, std::uint64_t boot)>;

  std::size_t add_process(Member member, Start start);
  void set_meta(std::size_t process, Register registrar) {
    meta_ = process;
    registrar_ = std::move(registrar);
  }
  void start(std::size_t process);
  void kill(std::size_t process);
  void freeze(std::size_t process, Duration length);
  [[nodiscard]] bool alive(std::size_t process) const { return places_[process].node != nullptr; }
  // Counts the starts of a process.
  [[nodiscard]] std::uint64_t life(std::size_t process) const { return places_[process].life; }
  [[nodiscard]] bool frozen(std::size_t process) const { return places_[process].frozen_until > now(); }
  [[nodiscard]] const Member& member(std::size_t process) const { return places_[process].member; }
  [[nodiscard]] Node* node(std::size_t process) { return places_[process].node.get(); }
  [[nodiscard]] std::size_t count() const { return places_.size(); }
  [[nodiscard]] std::size_t find(const std::string& instance) const;
  // Registration, as net/meta_client.h does it.
  void enroll(std::size_t process);

  // ---- connections

  // False when the message is dropped at once.
  bool send(std::size_t from, const wire::Envelope& message);
  // A connection breaks; both ends hear of it within `notice`.
  void cut(std::size_t a, std::size_t b, Duration notice);
  [[nodiscard]] bool linked(std::size_t a, std::size_t b) const;
  [[nodiscard]] bool up(std::size_t a, std::size_t b) const;
  [[nodiscard]] bool all_up() const;

  // Sees every message when it is sent and when it has been taken; may kill, cut and stop.
  std::function<void(std::size_t from, std::size_t to, std::uint16_t number, bool taken)> watch;

  // Asked about every message: true when it is lost, alone, while its connection stays.
  std::function<bool(std::uint16_t number)> drops;

  // ---- arena sockets

  // 0 when the host does not listen.
  std::uint64_t attach(std::size_t client, std::size_t host);
  void detach(std::uint64_t socket);

  // ---- for everybody

  Duration random_time(Duration from, Duration to) {
    return from + Duration(static_cast<std::int64_t>(
                      rng.below(static_cast<std::uint64_t>((to - from).count()) + 1)));
  }
  void fail(std::string what);
  [[nodiscard]] const std::string& failure() const { return failure_; }
  void say(const std::string& text) const;
  [[nodiscard]] bool tracing() const { return trace_; }
  [[nodiscard]] std::uint64_t events() const { return sequence_; }

  ManualClock clock;
  Rng rng;

 private:
  struct Event {
    int process = -1;
    std::uint64_t life = 0;
    std::function<void()> run;
  };
  struct Place {
    Member member;
    Start start;
    std::unique_ptr<Node> node;
    std::uint64_t life = 0;
    std::uint64_t boot = 0;
    bool registered = false;
    Instant frozen_until{};
    Instant due = instant_never;
    std::uint64_t due_number = 0;
  };
  struct Side {
    bool up = false;
    Member peer;             // as it was when it came up
    Instant last_arrival{};  // at this side
  };
  struct Link {
    std::uint64_t epoch = 0;
    bool broken = true;
    bool connecting = false;
    Side side[2];
  };
  struct Socket {
    std::size_t client = 0;
    std::uint64_t client_life = 0;
    Member client_member;
    std::size_t host = 0;
    std::uint64_t host_life = 0;
    bool open = true;
    bool seen = false;  // the host knows
  };
  using Pair = std::pair<std::size_t, std::size_t>;

  void add(Instant when, int process, std::uint64_t life, std::function<void()> run);
  void settle(std::size_t process);
  void try_enroll(std::size_t process, std::uint64_t life);
  void reach_out(std::size_t process);
  void connect_soon(Pair pair, Duration wait);
  void connect(Pair pair);
  void lose(std::size_t process, Pair pair, std::uint64_t epoch);
  static Pair pair_of(std::size_t a, std::size_t b) { return a < b ? Pair{a, b} : Pair{b, a}; }

  bool trace_;
  std::vector<Place> places_;
  std::size_t meta_ = 0;
  Register registrar_;
  std::map<std::pair<Instant, std::uint64_t>, Event> events_;
  std::uint64_t sequence_ = 0;
  std::uint64_t carried_out_ = 0;
  Instant last_time_{};
  int turns_ = 0;
  std::map<Pair, Link> links_;
  std::map<std::uint64_t, Socket> sockets_;
  std::uint64_t next_socket_ = 1;
  std::string failure_;
};

}  // namespace di::sim
