#include "net/inproc.h"

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "base/assert.h"

namespace di::net {

namespace {

// What an End's posted closures keep alive; `events` is for the loop thread only.
struct EndState {
  Transport::Events events;
  bool closed = false;              // the transport is destroyed
  std::set<ConnectionId> outgoing;  // opened by this end and neither closed nor reported broken
};

struct Message {
  std::vector<Bytes> frames;
};

}  // namespace

// All state is under one mutex; callbacks run from posts, never under it.
struct InprocNetwork::Impl {
  struct EndRecord {
    loop::Loop* loop = nullptr;
    std::shared_ptr<EndState> state;
    std::string address;
    bool frozen = false;
    std::deque<std::function<void()>> held;  // deliveries that wait for test_freeze(false)
  };
  struct Connection {
    std::uint64_t client = 0;  // end numbers; 0: that side closed it
    std::uint64_t server = 0;  // 0 while nobody is bound
    std::string address;
    // Not yet delivered, per direction (to client, to server).
    std::shared_ptr<std::atomic<int>> queued[2] = {std::make_shared<std::atomic<int>>(0),
                                                   std::make_shared<std::atomic<int>>(0)};
  };

  // Runs `deliver(state)` on the loop of end `to`, after what was delivered to it before; held
  // while either side is frozen.
  void deliver_locked(std::uint64_t to, std::uint64_t from, std::function<void(EndState&)> deliver) {
    const auto found = ends.find(to);
    if (found == ends.end()) return;
    EndRecord& end = found->second;
    auto post = [loop = end.loop, state = end.state, deliver = std::move(deliver)] {
      loop->post("inproc", [state, deliver] {
        if (!state->closed) deliver(*state);
      });
    };
    const auto sender = ends.find(from);
    if (end.frozen) {
      end.held.push_back(std::move(post));
    } else if (sender != ends.end() && sender->second.frozen) {
      sender->second.held.push_back(std::move(post));
    } else {
      post();
    }
  }

  void establish_locked(ConnectionId id, Connection& connection, std::uint64_t server) {
    connection.server = server;
    deliver_locked(connection.client, server, [id](EndState& state) {
      if (state.outgoing.contains(id) && state.events.connected) state.events.connected(id);
    });
  }

  // Ends a connection; the sides in `tell` are told.
  void break_locked(ConnectionId id, const std::set<std::uint64_t>& tell) {
    const auto found = connections.find(id);
    if (found == connections.end()) return;
    const std::uint64_t client = found->second.client;
    const std::uint64_t server = found->second.server;
    connections.erase(found);
    for (const auto& [end, other] : {std::pair{client, server}, std::pair{server, client}}) {
      if (end == 0 || !tell.contains(end)) continue;
      deliver_locked(end, other, [id, outgoing = end == client](EndState& state) {
        if (outgoing && state.outgoing.erase(id) == 0) return;  // closed meanwhile
        if (state.events.disconnected) state.events.disconnected(id);
      });
    }
  }

  std::uint64_t bound_locked(const std::string& address) const {
    for (const auto& [number, end] : ends) {
      if (end.address == address) return number;
    }
    return 0;
  }

  std::mutex mutex;
  std::uint64_t next = 1;
  std::map<std::uint64_t, EndRecord> ends;
  std::map<ConnectionId, Connection> connections;
};

class InprocNetwork::End final : public Transport {
 public:
  End(std::shared_ptr<Impl> network, loop::Loop& loop) : network_(std::move(network)) {
    const std::lock_guard lock(network_->mutex);
    number_ = network_->next++;
    network_->ends[number_] = {&loop, state_, {}, false, {}};
  }
  ~End() override {
    state_->closed = true;
    const std::lock_guard lock(network_->mutex);
    std::vector<std::pair<ConnectionId, std::uint64_t>> mine;
    for (const auto& [id, connection] : network_->connections) {
      if (connection.client == number_) mine.emplace_back(id, connection.server);
      if (connection.server == number_) mine.emplace_back(id, connection.client);
    }
    // A frozen end dies with what it had not delivered.
    network_->ends[number_].frozen = false;
    for (const auto& [id, other] : mine) network_->break_locked(id, {other});
    network_->ends.erase(number_);
  }

  void set_events(Events events) override { state_->events = std::move(events); }

  Result<std::string> bind(const std::string& address) override {
    const std::lock_guard lock(network_->mutex);
    if (network_->bound_locked(address) != 0) {
      return Error{Code::io, 0, "bind " + address + ": Address already in use"};
    }
    network_->ends[number_].address = address;
    for (auto& [id, connection] : network_->connections) {
      if (connection.server == 0 && connection.address == address) {
        network_->establish_locked(id, connection, number_);
      }
    }
    return address;
  }

  // Nobody else is in a process: keys are not looked at.
  Result<ConnectionId> connect(const std::string& address, const std::string&) override {
    const std::lock_guard lock(network_->mutex);
    const ConnectionId id = network_->next++;
    Impl::Connection& connection = network_->connections[id];
    connection.client = number_;
    connection.address = address;
    state_->outgoing.insert(id);
    const std::uint64_t server = network_->bound_locked(address);
    if (server != 0) network_->establish_locked(id, connection, server);
    return id;
  }

  void close(ConnectionId id) override {
    state_->outgoing.erase(id);
    const std::lock_guard lock(network_->mutex);
    const auto found = network_->connections.find(id);
    if (found == network_->connections.end()) return;
    const Impl::Connection& connection = found->second;
    network_->break_locked(id, {connection.client == number_ ? connection.server : connection.client});
  }

  void refuse(ConnectionId id) override { close(id); }
  [[nodiscard]] std::string peer_key(ConnectionId) const override { return {}; }
  [[nodiscard]] const TransportCounters& counters() const override { return counters_; }

  Status send(ConnectionId id, std::span<const ByteView> frames) override {
    DI_ASSERT(!frames.empty() && frames.size() <= frames_max);
    const std::lock_guard lock(network_->mutex);
    const auto found = network_->connections.find(id);
    if (found == network_->connections.end() || found->second.server == 0) {
      return Error{Code::unreachable, 0, "no connection"};
    }
    Impl::Connection& connection = found->second;
    const bool to_server = connection.client == number_;
    const std::shared_ptr<std::atomic<int>> queued = connection.queued[to_server ? 1 : 0];
    if (queued->load() >= transport_queue_max) return Error{Code::busy, 0, "queue full"};
    queued->fetch_add(1);
    auto message = std::make_shared<Message>();
    for (const ByteView frame : frames) message->frames.emplace_back(frame.begin(), frame.end());
    network_->deliver_locked(to_server ? connection.server : connection.client, number_,
                             [id, queued, message, to_server](EndState& state) {
                               queued->fetch_sub(1);
                               if (!to_server && !state.outgoing.contains(id)) return;
                               const std::vector<ByteView> views(message->frames.begin(),
                                                                 message->frames.end());
                               if (state.events.message) state.events.message(id, views);
                             });
    return {};
  }

 private:
  std::shared_ptr<Impl> network_;
  std::shared_ptr<EndState> state_ = std::make_shared<EndState>();
  std::uint64_t number_ = 0;
  const TransportCounters counters_;
};

InprocNetwork::InprocNetwork() : impl_(std::make_shared<Impl>()) {}
InprocNetwork::~InprocNetwork() = default;

std::unique_ptr<Transport> InprocNetwork::make_transport(loop::Loop& loop) {
  return std::make_unique<End>(impl_, loop);
}

void InprocNetwork::test_cut(const std::string& address) {
  const std::lock_guard lock(impl_->mutex);
  const std::uint64_t server = impl_->bound_locked(address);
  std::vector<ConnectionId> cut;
  for (const auto& [id, connection] : impl_->connections) {
    if (server != 0 && connection.server == server) cut.push_back(id);
  }
  for (const ConnectionId id : cut) impl_->break_locked(id, {impl_->connections[id].client, server});
}

void InprocNetwork::test_freeze(const std::string& address, bool frozen) {
  const std::lock_guard lock(impl_->mutex);
  const std::uint64_t number = impl_->bound_locked(address);
  DI_ASSERT(number != 0);
  Impl::EndRecord& end = impl_->ends[number];
  end.frozen = frozen;
  if (frozen) return;
  for (const auto& post : end.held) post();
  end.held.clear();
}

}  // namespace di::net
