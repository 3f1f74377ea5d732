// An exhaustive search over seat, hand-over and re-entry, made before the daemons (spec/path.md,
// section 6): one request, two prefill ranks, two decode ranks, two hosts; any one of them is lost at
// any step; one message is delayed past others, duplicated or dropped together with its connection.
//
// The model keeps only what decides: who holds what for which attempt, and which messages are on their
// way.  Each rule is one of the real cores' rules (request/core.cpp, rank/*.cpp, host/*).  The search visits
// every reachable state and checks in each:
//   - every token index is emitted once and in order (emit() panics otherwise);
//   - a state without any next step is an end: the client was answered, and nothing is held by a living
//     process (seats, pins, grants, pool rows);
//   - no wait without a bound: a state that can only move by a timer does move by it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr int attempts_max = 4;
constexpr int nobody = -1;

enum class Kind : std::uint8_t {
  bind,          // router -> prefill
  seat,          // router -> decode
  seat_granted,  // decode -> router
  seat_release,  // router -> decode
  target,        // router -> prefill
  handover,      // prefill's host -> decode's host, seat in `decode`
  handed,        // back to prefill; `ok`
  started,       // decode -> router
  token,         // rank -> router, `index`
  done,          // rank -> router, `ok`
  stop,          // router -> rank
};

// One message; ordered per (from, to) as connections keep order.
struct Message {
  Kind kind{};
  int from = 0;  // 0 router, 1-2 prefill, 3-4 decode
  int to = 0;
  int attempt = 0;
  int decode = nobody;
  int index = 0;
  bool ok = true;
  int generation_from = 0;
  int generation_to = 0;
  friend auto operator<=>(const Message&, const Message&) = default;
};

enum class Stage : std::uint8_t { none, bound, token_out, handing };
struct Prefill {
  int generation = 0;
  Stage stage = Stage::none;
  int attempt = 0;
  int first = 0;
  int target = nobody;
  friend auto operator<=>(const Prefill&, const Prefill&) = default;
};
enum class Place : std::uint8_t { none, seated, running };
struct Decode {
  int generation = 0;
  Place place = Place::none;
  int attempt = 0;
  int next = 0;  // index it produces next
  friend auto operator<=>(const Decode&, const Decode&) = default;
};

struct State {
  // Router.
  int attempt = 0;  // 0: not begun
  int produced = 0;
  int first = 0;
  int prefill = nobody;
  int prefill_generation = 0;
  int decode = nobody;
  int decode_generation = 0;
  bool granted = false;
  bool started = false;
  bool prefill_token = false;
  bool ended = false;
  bool failed = false;
  std::uint8_t early = 0;  // bit i: token i waits for an earlier one
  std::array<Prefill, 2> prefills;
  std::array<Decode, 2> decodes;
  std::vector<Message> wire;
  int faults_left = 1;    // losses of a process
  int mischief_left = 1;  // delay (by order), duplicate, or drop with its connection
  friend auto operator<=>(const State&, const State&) = default;
};

int prefill_of(int node) {
  return node - 1;
}
int decode_of(int node) {
  return node - 3;
}
bool is_prefill(int node) {
  return node == 1 || node == 2;
}

int generation_of(const State& s, int node) {
  if (node == 0) return 0;
  return is_prefill(node) ? s.prefills[static_cast<std::size_t>(prefill_of(node))].generation
                          : s.decodes[static_cast<std::size_t>(decode_of(node))].generation;
}

void send(State& s, Message m) {
  m.generation_from = generation_of(s, m.from);
  m.generation_to = generation_of(s, m.to);
  s.wire.push_back(m);
}

class Search {
 public:
  // Token 0 comes from prefill, the others from decode.
  explicit Search(int tokens) : output_tokens(tokens) {}

  // Returns the number of states; the failures are reported to GoogleTest.
  std::size_t run(int faults, int mischief) {
    State begin;
    begin.faults_left = faults;
    begin.mischief_left = mischief;
    start_attempt(begin);
    visit(begin);
    while (!queue_.empty() && !testing::Test::HasFailure()) {
      const State s = queue_.front();
      queue_.pop_front();
      expand(s);
    }
    return seen_.size();
  }

 private:
  const int output_tokens;

  void visit(State s) {
    // The order of unrelated messages does not matter: keep one canonical form.
    std::stable_sort(s.wire.begin(), s.wire.end(), [](const Message& a, const Message& b) {
      return std::tie(a.from, a.to) < std::tie(b.from, b.to);
    });
    if (seen_.insert(s).second) queue_.push_back(std::move(s));
  }

  // ---- Router -----------------------------------------------------------------------------------

  void start_attempt(State& s) {
    if (s.attempt >= attempts_max) {
      s.ended = s.failed = true;
      return;
    }
    ++s.attempt;
    s.first = s.produced;
    s.prefill = s.decode = nobody;
    s.granted = s.started = s.prefill_token = false;
    s.early = 0;
  }

  void reenter(State& s) {
    if (s.ended) return;
    stop_legs(s);
    start_attempt(s);
  }

  void stop_legs(State& s) {
    if (s.prefill != nobody) send(s, {.kind = Kind::stop, .from = 0, .to = s.prefill, .attempt = s.attempt});
    if (s.decode != nobody) {
      send(s, {.kind = s.started ? Kind::stop : Kind::seat_release,
               .from = 0,
               .to = s.decode,
               .attempt = s.attempt});
    }
    s.prefill = s.decode = nobody;
  }

  void end(State& s) {
    s.ended = true;
    if (s.decode != nobody && !s.started) {
      send(s, {.kind = Kind::seat_release, .from = 0, .to = s.decode, .attempt = s.attempt});
      s.decode = nobody;
    }
  }

  void emit(State& s, int index) {
    ASSERT_EQ(index, s.produced) << "a token out of order";
    ASSERT_LT(s.produced, output_tokens) << "a token after the last one";
    ++s.produced;
    if (s.produced == output_tokens) end(s);
  }

  void take_token(State& s, int index) {
    if (s.ended || index < s.produced) return;
    if (index > s.produced) {
      s.early = static_cast<std::uint8_t>(s.early | (1u << index));
      return;
    }
    emit(s, index);
    while (!s.ended && (s.early & (1u << s.produced)) != 0) {
      s.early = static_cast<std::uint8_t>(s.early & ~(1u << s.produced));
      emit(s, s.produced);
    }
  }

  void seat_lost(State& s) {
    s.decode = nobody;
    s.granted = s.started = false;
    if (!s.ended && s.prefill == nobody) reenter(s);
  }

  void router_takes(State& s, const Message& m) {
    if (m.attempt != s.attempt) return;  // an old attempt
    switch (m.kind) {
      case Kind::seat_granted:
        if (s.decode != m.from || s.ended) return;
        s.granted = true;
        if (s.prefill != nobody) {
          send(s, {.kind = Kind::target, .from = 0, .to = s.prefill, .attempt = s.attempt, .decode = m.from});
        }
        break;
      case Kind::started:
        if (s.decode == m.from && !s.ended) s.started = true;
        break;
      case Kind::token:
        if (s.ended) return;
        if (m.from == s.prefill && m.index == s.first) s.prefill_token = true;
        take_token(s, m.index);
        break;
      case Kind::done:
        if (m.from == s.prefill) {
          s.prefill = nobody;
          if (!m.ok && !s.started) reenter(s);
        } else if (m.from == s.decode) {
          s.decode = nobody;
          if (!m.ok) reenter(s);
        }
        break;
      case Kind::handed:  // prefill reports a failed hand-over: another seat
        if (m.from == s.prefill && s.decode != nobody) {
          send(s, {.kind = Kind::seat_release, .from = 0, .to = s.decode, .attempt = s.attempt});
          seat_lost(s);
        }
        break;
      case Kind::bind:
      case Kind::seat:
      case Kind::seat_release:
      case Kind::target:
      case Kind::handover:
      case Kind::stop:
        break;
    }
  }

  void router_loses(State& s, int node) {
    if (s.prefill == node) {
      s.prefill = nobody;
      if (!s.started || !s.prefill_token) reenter(s);
    }
    if (s.decode == node) {
      if (s.started) {
        s.decode = nobody;
        reenter(s);
      } else {
        seat_lost(s);
      }
    }
  }

  // ---- Ranks (each with its host's di-kvd) --------------------------------------------------------

  void prefill_takes(State& s, int node, const Message& m) {
    Prefill& p = s.prefills[static_cast<std::size_t>(prefill_of(node))];
    if (m.kind == Kind::bind) {
      if (p.stage != Stage::none) {
        if (p.attempt == m.attempt) return;  // a duplicate
        return;                              // the model has one place; stop of the old attempt comes first
      }
      p.stage = Stage::bound;
      p.attempt = m.attempt;
      p.first = m.index;
      p.target = nobody;
      return;
    }
    if (p.stage == Stage::none || p.attempt != m.attempt) return;
    if (m.kind == Kind::target) {
      p.target = m.decode;
      if (p.stage == Stage::token_out || p.stage == Stage::handing) hand_over(s, node);
    } else if (m.kind == Kind::handed) {
      if (p.stage != Stage::handing || p.target != m.from) return;
      if (m.ok) {
        send(s, {.kind = Kind::done, .from = node, .to = 0, .attempt = p.attempt});
        p = Prefill{.generation = p.generation};
      } else {
        p.stage = Stage::token_out;
        p.target = nobody;
        send(s, {.kind = Kind::handed, .from = node, .to = 0, .attempt = p.attempt, .ok = false});
      }
    } else if (m.kind == Kind::stop) {
      send(s, {.kind = Kind::done, .from = node, .to = 0, .attempt = p.attempt, .ok = false});
      p = Prefill{.generation = p.generation};
    }
  }

  void hand_over(State& s, int node) {
    Prefill& p = s.prefills[static_cast<std::size_t>(prefill_of(node))];
    p.stage = Stage::handing;
    send(s, {.kind = Kind::handover, .from = node, .to = p.target, .attempt = p.attempt, .index = p.first});
  }

  void decode_takes(State& s, int node, const Message& m) {
    Decode& d = s.decodes[static_cast<std::size_t>(decode_of(node))];
    if (m.kind == Kind::seat) {
      if (d.place != Place::none) return;
      d.place = Place::seated;
      d.attempt = m.attempt;
      send(s, {.kind = Kind::seat_granted, .from = node, .to = 0, .attempt = m.attempt});
    } else if (m.kind == Kind::handover) {
      const bool mine = d.place != Place::none && d.attempt == m.attempt;
      // A repeated hand-over of a running request is acknowledged again.
      send(s, {.kind = Kind::handed, .from = node, .to = m.from, .attempt = m.attempt, .ok = mine});
      if (!mine || d.place == Place::running) return;
      d.place = Place::running;
      d.next = m.index + 1;
      send(s, {.kind = Kind::started, .from = node, .to = 0, .attempt = m.attempt});
    } else if (m.kind == Kind::seat_release || m.kind == Kind::stop) {
      if (d.place == Place::none || d.attempt != m.attempt) return;
      if (d.place == Place::running) {
        send(s, {.kind = Kind::done, .from = node, .to = 0, .attempt = d.attempt, .ok = false});
      }
      d = Decode{.generation = d.generation};
    }
  }

  // ---- Steps ----------------------------------------------------------------------------------------

  void deliver(State& s, const Message& m) {
    // Messages of or for another generation are dropped.
    if (m.generation_from != generation_of(s, m.from) || m.generation_to != generation_of(s, m.to)) return;
    if (m.to == 0) {
      router_takes(s, m);
    } else if (is_prefill(m.to)) {
      prefill_takes(s, m.to, m);
    } else {
      decode_takes(s, m.to, m);
    }
  }

  // A process dies and comes back empty with a new generation; everybody hears of it.
  void lose(State& s, int node) {
    if (is_prefill(node)) {
      Prefill& p = s.prefills[static_cast<std::size_t>(prefill_of(node))];
      p = Prefill{.generation = p.generation + 1};
    } else {
      Decode& d = s.decodes[static_cast<std::size_t>(decode_of(node))];
      d = Decode{.generation = d.generation + 1};
      // Whoever hands over to it learns from its host that the seat is unknown.
      for (int other : {1, 2}) {
        Prefill& p = s.prefills[static_cast<std::size_t>(prefill_of(other))];
        if (p.stage == Stage::handing && p.target == node) {
          p.stage = Stage::token_out;
          p.target = nobody;
          send(s, {.kind = Kind::handed, .from = other, .to = 0, .attempt = p.attempt, .ok = false});
        }
      }
    }
    std::erase_if(s.wire, [&](const Message& m) { return m.from == node || m.to == node; });
    router_loses(s, node);
  }

  // A connection breaks: what was on it is gone, and both ends treat the other as lost.
  void cut(State& s, int a, int b) {
    std::erase_if(s.wire,
                  [&](const Message& m) { return (m.from == a && m.to == b) || (m.from == b && m.to == a); });
    if (a == 0) {
      if (is_prefill(b)) {
        Prefill& p = s.prefills[static_cast<std::size_t>(prefill_of(b))];
        p = Prefill{.generation = p.generation};  // on_router_lost forgets its requests
      } else {
        Decode& d = s.decodes[static_cast<std::size_t>(decode_of(b))];
        d = Decode{.generation = d.generation};
      }
      router_loses(s, b);
      return;
    }
    // Between hosts: the hand-over fails, the pages are still held.
    Prefill& p = s.prefills[static_cast<std::size_t>(prefill_of(a))];
    if (p.stage == Stage::handing && p.target == b) {
      p.stage = Stage::token_out;
      p.target = nobody;
      send(s, {.kind = Kind::handed, .from = a, .to = 0, .attempt = p.attempt, .ok = false});
    }
  }

  void expand(const State& s) {
    bool moved = false;
    const auto step = [&](State next) {
      moved = true;
      visit(std::move(next));
    };
    // The first message of each connection is delivered (order per connection is kept).
    std::set<std::pair<int, int>> connections;
    for (std::size_t i = 0; i < s.wire.size(); ++i) {
      const Message& m = s.wire[i];
      if (!connections.insert({m.from, m.to}).second) continue;
      State next = s;
      next.wire.erase(next.wire.begin() + static_cast<std::ptrdiff_t>(i));
      deliver(next, m);
      step(std::move(next));
      if (s.mischief_left > 0) {
        State twice = s;  // duplicated
        twice.mischief_left = 0;
        deliver(twice, m);
        visit(std::move(twice));
        State broken = s;  // dropped, as messages are: with the connection
        broken.mischief_left = 0;
        const int a = std::min(m.from, m.to);
        const int b = std::max(m.from, m.to);
        cut(broken, a, b);
        visit(std::move(broken));
        for (std::size_t later = i + 1; later < s.wire.size(); ++later) {
          const Message& other = s.wire[later];
          if (other.from != m.from || other.to != m.to) continue;
          State overtaken = s;  // delayed past the next one of its connection
          overtaken.mischief_left = 0;
          overtaken.wire.erase(overtaken.wire.begin() + static_cast<std::ptrdiff_t>(later));
          deliver(overtaken, other);
          visit(std::move(overtaken));
          break;
        }
      }
    }
    // The router moves by itself: bind, ask for a seat (also before prefill is done).
    if (!s.ended && s.prefill == nobody && !s.started && !s.prefill_token) {
      for (int node : {1, 2}) {
        if (s.prefills[static_cast<std::size_t>(prefill_of(node))].stage != Stage::none) continue;
        State next = s;
        next.prefill = node;
        send(next, {.kind = Kind::bind, .from = 0, .to = node, .attempt = s.attempt, .index = s.first});
        step(std::move(next));
      }
    }
    if (!s.ended && !s.started && s.prefill != nobody && s.decode == nobody && s.first + 1 < output_tokens) {
      for (int node : {3, 4}) {
        if (s.decodes[static_cast<std::size_t>(decode_of(node))].place != Place::none) continue;
        State next = s;
        next.decode = node;
        next.granted = next.started = false;
        send(next, {.kind = Kind::seat, .from = 0, .to = node, .attempt = s.attempt});
        step(std::move(next));
      }
    }
    // Ranks work.
    for (int node : {1, 2}) {
      const Prefill& p = s.prefills[static_cast<std::size_t>(prefill_of(node))];
      if (p.stage != Stage::bound) continue;
      State next = s;
      Prefill& q = next.prefills[static_cast<std::size_t>(prefill_of(node))];
      send(next, {.kind = Kind::token, .from = node, .to = 0, .attempt = q.attempt, .index = q.first});
      if (q.first + 1 == output_tokens) {  // final at once: no hand-over
        send(next, {.kind = Kind::done, .from = node, .to = 0, .attempt = q.attempt});
        q = Prefill{.generation = q.generation};
      } else {
        q.stage = Stage::token_out;
        if (q.target != nobody) hand_over(next, node);
      }
      step(std::move(next));
    }
    for (int node : {3, 4}) {
      const Decode& d = s.decodes[static_cast<std::size_t>(decode_of(node))];
      if (d.place != Place::running) continue;
      State next = s;
      Decode& e = next.decodes[static_cast<std::size_t>(decode_of(node))];
      send(next, {.kind = Kind::token, .from = node, .to = 0, .attempt = e.attempt, .index = e.next});
      if (++e.next == output_tokens) {
        send(next, {.kind = Kind::done, .from = node, .to = 0, .attempt = e.attempt});
        e = Decode{.generation = e.generation};
      }
      step(std::move(next));
    }
    // Timers: only when nothing else is on its way, which is when they matter.
    if (!moved) timers(s, step);
    // Loss of any one process at any step.  The other two are the same by symmetry: binding to either and
    // a seat at either are steps of their own.
    if (s.faults_left > 0 && !s.ended) {
      for (int node : {1, 3}) {
        State next = s;
        --next.faults_left;
        lose(next, node);
        visit(std::move(next));
      }
    }
    if (!moved) check_end(s);
  }

  template <class Step>
  void timers(const State& s, Step step) {
    for (int node : {3, 4}) {  // seat_ttl
      if (s.decodes[static_cast<std::size_t>(decode_of(node))].place != Place::seated) continue;
      State next = s;
      Decode& d = next.decodes[static_cast<std::size_t>(decode_of(node))];
      const int attempt = d.attempt;
      d = Decode{.generation = d.generation};
      if (next.decode == node && next.attempt == attempt) seat_lost(next);
      step(std::move(next));
      return;
    }
    for (int node : {1, 2}) {  // hold
      const Prefill& p = s.prefills[static_cast<std::size_t>(prefill_of(node))];
      if (p.stage == Stage::none || p.stage == Stage::bound) continue;
      State next = s;
      send(next, {.kind = Kind::done, .from = node, .to = 0, .attempt = p.attempt, .ok = false});
      next.prefills[static_cast<std::size_t>(prefill_of(node))] = Prefill{.generation = p.generation};
      step(std::move(next));
      return;
    }
    if (!s.ended) {  // gap_wait and next_token_wait
      State next = s;
      reenter(next);
      step(std::move(next));
      return;
    }
    if (s.prefill != nobody || s.decode != nobody) {  // kill_after
      State next = s;
      next.prefill = next.decode = nobody;
      step(std::move(next));
    }
  }

  void check_end(const State& s) {
    if (!s.wire.empty()) return;
    const bool timer_pending = !s.ended || s.prefill != nobody || s.decode != nobody;
    bool held = false;
    for (const Prefill& p : s.prefills) held = held || p.stage != Stage::none;
    for (const Decode& d : s.decodes) held = held || d.place != Place::none;
    if (timer_pending || held) return;  // a timer moved it: the state after is checked
    ++ends_;
    EXPECT_TRUE(s.failed || s.produced == output_tokens) << "an end without an answer";
    EXPECT_FALSE(s.failed) << "one fault and one mischief used up " << attempts_max << " attempts";
  }

  std::set<State> seen_;
  std::deque<State> queue_;

 public:
  std::size_t ends_ = 0;
};

TEST(HandoverModel, UndisturbedRunsEndWithEveryTokenOnce) {
  Search search(3);
  const std::size_t states = search.run(0, 0);
  std::printf("states=%zu ends=%zu\n", states, search.ends_);
  EXPECT_GT(search.ends_, 0U);
}

TEST(HandoverModel, LossOfAnyProcessAtAnyStep) {
  Search search(3);
  const std::size_t states = search.run(1, 0);
  std::printf("states=%zu ends=%zu\n", states, search.ends_);
  EXPECT_GT(search.ends_, 0U);
}

TEST(HandoverModel, OneMessageDelayedDuplicatedOrDropped) {
  Search search(3);
  const std::size_t states = search.run(0, 1);
  std::printf("states=%zu ends=%zu\n", states, search.ends_);
  EXPECT_GT(search.ends_, 0U);
}

TEST(HandoverModel, BothTogether) {
  Search search(2);
  const std::size_t states = search.run(1, 1);
  std::printf("states=%zu ends=%zu\n", states, search.ends_);
  EXPECT_GT(search.ends_, 0U);
}

}  // namespace
