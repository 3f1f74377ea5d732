#include "net/meta_client.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/crypto.h"
#include "base/log.h"

namespace di::net {

namespace {

// Between two registrations that di-meta answered with `busy`.
constexpr Duration register_again_after = milliseconds(500);
// A di-meta that has restarted knows nobody yet: whoever has the name that this process waits for comes first.  Longer
// than between two tries to connect, and shorter than a connection may be silent.
constexpr Duration holder_comes_within = seconds(2);
static_assert(holder_comes_within < peer_lost_after);

}  // namespace

struct MetaClient::Impl {
  Impl(loop::Loop& loop, Endpoint& e, Member s, Events v)
      : endpoint(e),
        self(std::move(s)),
        events(std::move(v)),
        boot(random_u64()),
        again(loop, loop::TimerKind::liveness, "register again", [this] { register_self(); }),
        told_late(loop, loop::TimerKind::liveness, "nobody hears that we leave", [this] { told(); }) {}

  // What di-meta says is believed of di-meta only: of the connection to its address.
  bool is_from_meta(const Incoming& in) const {
    if (in.from.id == 0) return true;  // before its hello: only that connection is heard then
    const Member* peer = endpoint.peer(in.from.id);
    if (peer != nullptr && in.from.id == meta_id) return true;
    log_warn(
        "net", "message that only di-meta may send",
        {{"from", peer == nullptr ? "" : peer->instance}, {"message", wire::message_name(in.header.number)}});
    return false;
  }

  // On the peer when it is up, else on the connection that was just established.
  void register_self() {
    const wire::meta_register message{self, boot};
    if (endpoint.up(meta_id)) {
      static_cast<void>(endpoint.send(meta_id, message));
    } else if (first) {
      static_cast<void>(endpoint.reply(*first, message));
    }
  }

  void answered(const Incoming& in, const wire::meta_registered& answer) {
    if (!is_from_meta(in)) return;
    const Code code = static_cast<Code>(answer.code);
    if (code == Code::busy) {
      if (std::exchange(put_off, answer.reason) != answer.reason)
        log_warn("net", "di-meta cannot register us yet", {{"reason", answer.reason}});
      again.start_after(register_again_after);
      return;
    }
    if (code != Code::ok) {
      const Error error{code, 0, "di-meta refused " + self.instance + ": " + answer.reason};
      if (events.refused) {
        events.refused(error);
      } else {
        log_error("net", "registration refused", {{"reason", answer.reason}});
      }
      return;
    }
    if (self.id != 0 &&
        (answer.cluster != cluster || answer.id != self.id || answer.generation != self.generation)) {
      // Everything we told our peers carries the old numbers.
      const Error error{Code::stale, 0,
                        answer.cluster != cluster
                            ? "di-meta has another catalogue than the one that this instance registered in"
                            : "di-meta issued another number or generation to a running instance"};
      if (events.refused) events.refused(error);
      return;
    }
    cluster = answer.cluster;
    put_off.clear();
    const bool first_time = self.id == 0;
    self.id = answer.id;
    self.generation = answer.generation;
    endpoint.identify(self, answer.cluster);
    meta_id = in.header.sender;
    endpoint.greet_bootstrap();
    if (first_time) {
      log_info("net", "registered", {{"id", self.id}, {"generation", self.generation}});
      if (events.registered) events.registered(answer);
    }
  }

  // What the fleet knows of our state.
  void listed(const std::vector<Member>& members) {
    const auto here = std::find_if(members.begin(), members.end(),
                                   [this](const Member& member) { return member.id == self.id; });
    constexpr std::uint8_t leaves = 2;
    known_state = here == members.end() ? leaves : here->state;
    if (known_state == self.state) return told();
    // It was set while di-meta was not up, or is still on its way: said twice it is the same.
    if (here != members.end()) say_state();
  }
  void say_state() {
    if (endpoint.up(meta_id)) static_cast<void>(endpoint.send(meta_id, wire::meta_state{self.state}));
  }
  void told() {
    told_late.cancel();
    if (const auto then = std::exchange(when_told, nullptr)) then();
  }

  Endpoint& endpoint;
  Member self;
  Events events;
  const std::uint64_t boot;
  std::optional<From> first;  // the connection of the registration
  std::uint32_t cluster = 0;
  PeerId meta_id = 0;
  std::uint64_t epoch = 0;             // on the present connection: a di-meta from a backup may count lower
  std::uint32_t epoch_generation = 0;  // di-meta's, whose epochs start over
  loop::Timer again;
  std::string put_off;  // why di-meta last said `busy`; empty: we are registered
  std::uint8_t known_state = 0;
  std::function<void()> when_told;
  loop::Timer told_late;
};

MetaClient::MetaClient(loop::Loop& loop, Endpoint& endpoint, const std::string& meta_endpoint, Member self,
                       Events events)
    : impl_(std::make_unique<Impl>(loop, endpoint, std::move(self), std::move(events))) {
  Impl* impl = impl_.get();
  endpoint.on<wire::meta_registered>(
      [impl](const Incoming& in, const wire::meta_registered& answer) { impl->answered(in, answer); });
  endpoint.on<wire::meta_members>([impl](const Incoming& in, const wire::meta_members& list) {
    if (!impl->is_from_meta(in)) return;
    const bool same = in.header.sender_generation == impl->epoch_generation;
    if (same && list.epoch < impl->epoch) return;
    impl->epoch = list.epoch;
    impl->epoch_generation = in.header.sender_generation;
    impl->endpoint.set_members(list.members);
    impl->listed(list.members);
    if (impl->events.members) impl->events.members(list.members);
  });
  endpoint.set_bootstrap(meta_endpoint, [impl](const From& from) {
    impl->first = from;
    impl->epoch = 0;
    if (impl->self.id == 0 && !impl->put_off.empty()) {
      impl->again.start_after(holder_comes_within);
    } else {
      impl->register_self();
    }
  });
}

MetaClient::~MetaClient() = default;

void MetaClient::publish(Member self) {
  self.id = impl_->self.id;
  self.generation = impl_->self.generation;
  impl_->self = std::move(self);
  impl_->register_self();
}

void MetaClient::set_state(std::uint8_t state) {
  impl_->self.state = state;
  impl_->say_state();
}

void MetaClient::when_told(std::function<void()> then) {
  impl_->when_told = std::move(then);
  if (!impl_->endpoint.up(impl_->meta_id) || impl_->known_state == impl_->self.state) {
    impl_->told();
  } else {
    impl_->told_late.start_after(told_wait);
  }
}

PeerId MetaClient::meta() const {
  return impl_->endpoint.up(impl_->meta_id) ? impl_->meta_id : 0;
}

bool MetaClient::registered() const {
  return impl_->self.id != 0;
}

}  // namespace di::net
