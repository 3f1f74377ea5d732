// A host's core with peers that say what the test tells them to say.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "host/core.h"
#include "tests/support/fake_data.h"

namespace di::host {

// Four blocks a page, four groups, 1 MiB a page: 256 KiB a unit.
inline kv::Layout test_layout() {
  return *kv::layout_mla("test-1", 4, 4, 16384);
}

inline Key test_key(std::uint32_t chain, std::uint32_t block) {
  Key key;
  key.raw[0] = std::byte{1};
  put_le<std::uint32_t>(&key.raw[4], chain);
  put_le<std::uint32_t>(&key.raw[8], block);
  return key;
}
// Keys of blocks [first, first + count) of a chain.
inline std::vector<Key> test_keys(std::uint32_t chain, std::uint32_t first, std::uint32_t count) {
  std::vector<Key> keys;
  for (std::uint32_t i = 0; i < count; ++i) keys.push_back(test_key(chain, first + i));
  return keys;
}
inline RequestId test_request(std::uint32_t number) {
  RequestId id;
  id.raw[15] = std::byte{0xab};
  put_le<std::uint32_t>(id.raw.data(), number);
  return id;
}
// Checksums of a page, from what is in it.
inline std::vector<std::uint32_t> test_crcs(const std::vector<Key>& keys, std::uint32_t salt = 0) {
  std::vector<std::uint32_t> crcs;
  for (std::uint32_t g = 0; g < 4; ++g) {
    std::uint32_t crc = 17 * (g + 1) + salt * 1000003;
    for (const Key& key : keys)
      crc = crc * 31 + get_le<std::uint32_t>(&key.raw[8]) * 7 + get_le<std::uint32_t>(&key.raw[4]);
    crcs.push_back(crc);
  }
  return crcs;
}

class World : public ::testing::Test {
 protected:
  explicit World(std::uint64_t units = 64) { restart(options(units)); }

  static Core::Options options(std::uint64_t units) {
    Core::Options options;
    options.self = {"di-kvd.host0", 7};
    options.arena = {.payload_bytes = units * test_layout().page_bytes(1), .slots_max = 256};
    options.entries_max = 64;
    return options;
  }
  void restart(const Core::Options& with) {
    arena = test::FakeArena();
    data = test::FakeData();
    core.emplace(with, arena, data);
    ASSERT_TRUE(core->set_layout(layout).ok());
    out.clear();
  }

  void up(const Peer& peer, PeerKind kind, bool remote = false) {
    core->on_peer_up(peer, kind, remote, now);
    turn();
  }
  void lose(const Peer& peer) {
    core->on_peer_lost(peer, now);
    turn();
  }
  void usual_peers() {
    up(meta, PeerKind::meta);
    up(store, PeerKind::store);
    up(prefill, PeerKind::rank);
    up(decode, PeerKind::rank);
    up(router, PeerKind::router);
    out.clear();
  }

  template <class M>
  void say(const Peer& from, const wire::Scope& scope, const M& message) {
    core->on_message(wire::Envelope::make(from.instance, from.generation, scope, message), now);
    turn();
  }
  // Takes what the core wants to send; messages to itself come back at once.
  void turn() {
    core->flush(now);
    for (Outbox sent = core->take_outgoing(); !sent.empty(); sent = core->take_outgoing()) {
      for (wire::Envelope& message : sent) {
        if (message.peer != core->self().instance) {
          out.push_back(std::move(message));
        } else if (hold_back_self) {
          held.push_back(std::move(message));
        } else {
          core->on_message(message, now);
        }
      }
      core->flush(now);
    }
    const Status status = core->check();
    ASSERT_TRUE(status.ok()) << status.error().message;
  }
  // The data plane's answer to its oldest push, or to its oldest conceal.
  void answer_push(Code code) {
    ASSERT_FALSE(data.pushes.empty());
    const std::uint64_t push = data.pushes.front().number;
    data.pushes.pop_front();
    core->on_pushed(push, code, now);
    turn();
  }
  void answer_conceal() {
    ASSERT_FALSE(data.concealing.empty());
    const auto [peer, transfer] = data.take_concealed();
    core->on_concealed(peer, transfer, now);
    turn();
  }
  void advance(Duration by) {
    now.product = now.product + by;
    now.liveness = now.liveness + by;
    core->on_time(now);
    turn();
  }

  // The first message of this type to `peer`, taken out.
  template <class M>
  std::optional<M> heard(const Peer& peer, wire::Scope* scope = nullptr) {
    for (auto message = out.begin(); message != out.end(); ++message) {
      if (message->number != M::number || message->peer != peer.instance) continue;
      wire::Decoded<M> body = message->as<M>();
      EXPECT_TRUE(static_cast<bool>(body));
      EXPECT_EQ(message->peer_generation, peer.generation);
      if (scope != nullptr) *scope = message->scope;
      out.erase(message);
      return *body;
    }
    return std::nullopt;
  }
  std::uint64_t gauge(const std::string& name) const {
    for (const Gauge& gauge : core->gauges()) {
      if (gauge.name == name) return gauge.count;
    }
    ADD_FAILURE() << "no gauge " << name;
    return 0;
  }
  ::testing::AssertionResult idle() const {
    for (const Gauge& gauge : core->gauges()) {
      if (gauge.count != 0) return ::testing::AssertionFailure() << gauge.name << " is " << gauge.count;
    }
    return ::testing::AssertionSuccess();
  }

  // A rank's page: granted, written and sealed.
  wire::SlotRef seal(const Peer& rank, const wire::Scope& scope, const std::vector<Key>& keys,
                     std::uint32_t salt = 0) {
    const std::uint32_t blocks = keys.empty() ? 1 : static_cast<std::uint32_t>(keys.size());
    say(rank, scope, wire::kv_open{{blocks}, 99});
    const auto opened = heard<wire::kv_opened>(rank);
    EXPECT_TRUE(opened && opened->code == 0 && opened->slots.size() == 1);
    if (!opened || opened->slots.empty()) return {};
    const wire::SlotRef slot = opened->slots[0];
    const std::vector<std::uint32_t> crcs = test_crcs(keys, salt);
    for (std::uint32_t g = 0; g < 4; ++g) arena.write(layout, slot, g, crcs[g]);
    say(rank, scope, wire::kv_sealed{slot, Key{}, keys, crcs, 0});
    return slot;
  }
  // The same without anybody holding it afterwards, and written back.
  void cached(const std::vector<Key>& keys) {
    const wire::Scope scope{test_request(900000 + next_cached++), 1, 0, 0};
    seal(prefill, scope, keys);
    say(prefill, scope, wire::kv_release{});
    settle_puts();
  }
  // di-meta says that the store has everything already.
  void settle_puts() {
    wire::Scope scope;
    while (heard<wire::meta_put_open>(meta, &scope)) {
      wire::meta_put_opened answer;
      answer.code = static_cast<std::uint16_t>(Code::exists);
      say(meta, scope, answer);
    }
  }
  wire::PlannedPage planned(std::uint64_t stripe, const std::vector<Key>& keys, std::uint32_t first,
                            std::uint32_t count) const {
    wire::PlannedPage page;
    page.page = stripe << 8;
    page.first = first;
    page.count = count;
    page.page_blocks = static_cast<std::uint32_t>(keys.size());
    page.keys = keys;
    page.crcs = test_crcs(keys);
    page.columns = {{store.instance, 0, 0}};
    return page;
  }
  // The store writes segment `group` and says so.
  void deliver(const wire::kv_read& read, const std::vector<Key>& keys, std::uint32_t group,
               std::uint32_t salt = 0) {
    arena.write(layout, read.slot, group, test_crcs(keys, salt)[group]);
    say(store, {}, wire::kv_read_done{read.transfer, 0, group});
  }

  const kv::Layout layout = test_layout();
  const Peer meta{"di-meta.0", 1};
  const Peer store{"di-kvd.store0", 2};
  const Peer prefill{"di-prefill.0", 3};
  const Peer decode{"di-decode.0", 4};
  const Peer router{"di-router.0", 5};
  test::FakeArena arena;
  test::FakeData data;
  std::optional<Core> core;
  Now now{{1'000'000'000}, {1'000'000'000}};
  std::deque<wire::Envelope> out;
  std::deque<wire::Envelope> held;  // messages of the host to itself, while they are held back
  bool hold_back_self = false;
  std::uint32_t next_cached = 0;
};

}  // namespace di::host
