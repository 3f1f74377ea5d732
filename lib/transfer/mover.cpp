#include "transfer/mover.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "transfer/address.h"

namespace di::transfer {

namespace {

constexpr std::uint64_t command_event = 0;
constexpr std::uint64_t listener_event = 1;

// Looks at deadlines this often while there are any.
constexpr Duration sweep_every = milliseconds(10);
// One connection gets this much of a turn, each way.
constexpr std::size_t turn_bytes = 4 << 20;
// Where payload goes that nobody wants.
constexpr std::size_t drain_bytes = 256 << 10;
constexpr std::size_t connections_max = 2 * peers_max + 64;
// More unread events than this: the loop is behind, and a rate is not worth the room.
constexpr std::size_t rate_events_max = 1024;
// Of every queued operation two (submit, cancel), of every exposure a few.
constexpr std::size_t commands_max = 1 << 22;

constexpr std::array counter_fields = {
    &FabricCounters::written_bytes,  &FabricCounters::read_bytes,
    &FabricCounters::received_bytes, &FabricCounters::served_bytes,
    &FabricCounters::ops_failed,     &FabricCounters::ops_cancelled,
    &FabricCounters::dials,          &FabricCounters::dials_failed,
    &FabricCounters::refused_ticket, &FabricCounters::refused_transfer,
    &FabricCounters::refused_late,   &FabricCounters::refused_stale,
    &FabricCounters::refused_bounds, &FabricCounters::refused_seal,
    &FabricCounters::malformed,      &FabricCounters::refused_connections,
};
static_assert(counter_fields.size() * sizeof(std::uint64_t) == sizeof(FabricCounters));

}  // namespace

Mover::Mover(const TcpOptions& options, Fd listener, loop::Mailbox<Event>& events)
    : options_(options),
      self_(options.self),
      now_(clock_.now()),
      listener_(std::move(listener)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      commands_(commands_max),
      events_(events),
      drain_(drain_bytes),
      budget_(options.budget),
      swept_at_(now_) {
  DI_ASSERT(epoll_.valid());
  const auto watch = [this](int fd, std::uint64_t id) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = id;
    DI_ASSERT(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0);
  };
  watch(commands_.event_fd(), command_event);
  if (listener_.valid()) watch(listener_.get(), listener_event);
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "fabric");
}

Mover::~Mover() {
  stopping_.store(true, std::memory_order_release);
  commands_.close();
  thread_.join();
}

void Mover::post(Command&& command) {
  const bool pushed = commands_.try_push(std::move(command));
  DI_ASSERT(pushed);  // its bounds are those of operations, exposures and tickets
}

void Mover::tell(Event&& event) {
  const bool pushed = events_.try_push(std::move(event));
  DI_ASSERT(pushed);  // likewise
}

void Mover::count(std::uint64_t FabricCounters::*field, std::uint64_t by) {
  std::atomic_ref(counters_.*field).fetch_add(by, std::memory_order_relaxed);
}

FabricCounters Mover::counters() const {
  FabricCounters copy;
  for (const auto field : counter_fields) {
    copy.*field = std::atomic_ref(counters_.*field).load(std::memory_order_relaxed);
  }
  return copy;
}

void Mover::run() {
  std::array<epoll_event, 64> events;
  while (!stopping_.load(std::memory_order_acquire)) {
    pump();
    ended_.clear();
    int timeout_ms = timed() ? static_cast<int>(to_ms(sweep_every)) : -1;
    const Duration held = budget_.ready_at(now_) - now_;
    if (held.count() > 0) timeout_ms = std::clamp(static_cast<int>(to_ms(held)) + 1, 1, 10);
    if (!again_.empty()) timeout_ms = 0;
    const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
    DI_ASSERT(count >= 0 || errno == EINTR);
    now_ = clock_.now();
    carry_out_all();
    for (const std::uint64_t id : std::exchange(again_, {})) {
      const auto at = open_.find(id);
      if (at == open_.end()) continue;
      at->second->again = false;
      on_event(*at->second, 0);
    }
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == command_event) continue;
      if (event.data.u64 == listener_event) {
        accept_all();
        continue;
      }
      // One of the events before may have ended it.
      if (const auto at = open_.find(event.data.u64); at != open_.end()) on_event(*at->second, event.events);
    }
    if (now_ - swept_at_ >= sweep_every) sweep();
  }
}

// ---- commands

void Mover::carry_out_all() {
  while (auto command = commands_.try_pop()) {
    std::visit([this](auto& what) { carry_out(what); }, *command);
  }
}

void Mover::carry_out(Submit& submit) {
  const OpId id = submit.id;
  Link* link = links_.find(submit.peer);
  if (link == nullptr) {
    link = links_.add(submit.peer);
    if (link == nullptr) {
      ops_.emplace(id, Op{std::move(submit), 0, 0, now_});
      end_op(id, Code::busy);
      return;
    }
  }
  link->wanted_at = now_;
  const auto cls = static_cast<std::size_t>(submit.cls);
  ops_.emplace(id, Op{std::move(submit), 0, 0, now_ + options_.op_wait});
  if (link->failed()) {
    end_op(id, Code::unreachable);
    return;
  }
  link->waiting[cls].push_back(id);
  if (link->phase == LinkPhase::idle) begin_dial(*link);
  if (link->phase == LinkPhase::up) link->rate.begin(now_);
}

void Mover::carry_out(Cancel& cancel) {
  end_op(cancel.id, Code::cancelled);
}

void Mover::carry_out(Expose& expose) {
  exposures_.open(expose.to, expose.transfer, expose.access, expose.slots);
}

void Mover::carry_out(Extend& extend) {
  exposures_.extend(extend.to, extend.transfer, extend.slots);
}

void Mover::carry_out(Conceal& conceal) {
  exposures_.close(conceal.to, conceal.transfer, now_);
  for (const auto& [id, connection] : open_) {
    if (connection->dialled || !connection->greeted || connection->peer != conceal.to) continue;
    if (connection->into == conceal.transfer) {
      connection->stream.payload_drain();
      connection->into.reset();
      connection->code = Code::stale;
      count(&FabricCounters::refused_late);
    }
    connection->stream.release_as(conceal.transfer, Code::stale);
  }
  tell(Concealed{std::move(conceal.to), conceal.transfer});
}

void Mover::carry_out(Grant& grant) {
  tickets_.add(grant.to, grant.ticket, now_ + options_.ticket_life);
}

void Mover::carry_out(Dial& dial) {
  Link* link = links_.find(dial.peer);
  if (link == nullptr || link->phase != LinkPhase::asked) return;  // the answer comes too late
  if (!dial.ticket) {
    dial_failed(*link, {});
    return;
  }
  count(&FabricCounters::dials);
  Result<Fd> fd = data_connect(dial.endpoint);
  if (!fd) {
    dial_failed(*link, fd.error().message);
    return;
  }
  Connection& connection = add_connection(*std::move(fd));
  connection.dialled = true;
  connection.connected = false;
  connection.link = link;
  connection.peer = dial.peer;
  link->connection = &connection;
  link->ticket = *dial.ticket;
  link->phase = LinkPhase::connecting;
  arm(connection);
}

void Mover::carry_out(Lost& lost) {
  ticket_count_.fetch_sub(tickets_.forget(lost.peer), std::memory_order_relaxed);
  // The link goes first: the end of its connection must not begin a dial.
  if (Link* link = links_.find(lost.peer)) {
    Connection* connection = link->connection;
    link->connection = nullptr;
    link->phase = LinkPhase::idle;
    link->under_way.clear();
    if (connection != nullptr) {
      connection->link = nullptr;
      close(*connection);
    }
    end_ops(*link, false);
    links_.remove(*link);
  }
  std::vector<Connection*> theirs;
  for (const auto& [id, connection] : open_) {
    const bool greets = connection->granted && connection->granted->to == lost.peer;
    if (greets || connection->peer == lost.peer) theirs.push_back(connection.get());
  }
  for (Connection* connection : theirs) close(*connection);
  for (const TransferId transfer : exposures_.transfers_of(lost.peer)) {
    exposures_.close(lost.peer, transfer, now_);
    tell(Concealed{lost.peer, transfer});
  }
}

void Mover::carry_out(Self& self) {
  self_ = std::move(self.peer);
}

// ---- links and operations

void Mover::begin_dial(Link& link) {
  link.phase = LinkPhase::asked;
  link.until = now_ + options_.dial_wait;
  tell(WantTicket{link.peer});
}

void Mover::dial_failed(Link& link, std::string_view why) {
  count(&FabricCounters::dials_failed);
  link.dial_failed(now_, options_.dial_pause_min, options_.dial_pause_max, why);
  if (Connection* connection = link.connection) {
    link.connection = nullptr;
    connection->link = nullptr;
    close(*connection);
  }
  end_ops(link, false);
}

// The one way in which an operation ends.  Afterwards its memory is in nobody's hands.
void Mover::end_op(OpId id, Code code) {
  const auto at = ops_.find(id);
  if (at == ops_.end()) return;  // what it became is said already
  const Op& op = at->second;
  Link* link = links_.find(op.what.peer);
  if (link != nullptr) {
    auto& waiting = link->waiting[static_cast<std::size_t>(op.what.cls)];
    if (op.next < op.what.place.bytes) std::erase(waiting, id);
  }
  if (link != nullptr && link->connection != nullptr && op.next > op.acked) {
    Stream& stream = link->connection->stream;
    for (const std::uint64_t number : stream.release(id)) {
      std::erase_if(link->under_way, [&](const Unit& unit) {
        if (unit.number != number) return false;
        link->under_way_bytes -= unit.bytes;
        return true;
      });
    }
    for (std::size_t i = 0; i < link->under_way.size(); ++i) {
      Unit& unit = link->under_way[i];
      if (unit.op != id) continue;
      unit.op = 0;
      if (i == 0 && !op.what.write) stream.payload_drain();  // it may be the one that is coming in
    }
  }
  if (link != nullptr && link->rate.busy()) measure(*link, 0);
  if (code == Code::cancelled) {
    count(&FabricCounters::ops_cancelled);
  } else if (code != Code::ok) {
    count(&FabricCounters::ops_failed);
  }
  ops_.erase(at);
  tell(Done{id, code});
}

void Mover::end_ops(Link& link, bool begun_only) {
  std::vector<OpId> ids;
  for (const auto& [id, op] : ops_) {
    if (op.what.peer == link.peer && (!begun_only || op.next > 0)) ids.push_back(id);
  }
  for (const OpId id : ids) end_op(id, Code::unreachable);
}

bool Mover::may_send(const Link& link) const {
  if (link.phase != LinkPhase::up) return false;
  if (link.under_way.empty()) return true;
  // Little in the queue of the connection, so that another class has not to wait behind it.
  return link.under_way_bytes + options_.max_unit_bytes <= options_.window_bytes &&
         link.connection->stream.unsent_bytes() < 2ull * options_.max_unit_bytes;
}

// Puts one unit on its way; false when none may go.
bool Mover::schedule() {
  const auto turn = links_.turn([this](const Link& link, OpId head) -> std::uint64_t {
    if (!may_send(link)) return 0;
    const Op& op = ops_.at(head);
    return std::min<std::uint64_t>(options_.max_unit_bytes, op.what.place.bytes - op.next);
  });
  const std::optional<Class> taken = budget_.take(turn.heads, now_);
  if (!taken) return false;
  const auto cls = static_cast<std::size_t>(*taken);
  Link& link = links_.take(turn, *taken);
  const OpId id = link.waiting[cls].front();
  Op& op = ops_.at(id);
  const auto bytes = static_cast<std::uint32_t>(turn.heads[cls].bytes);
  Frame frame;
  frame.kind = op.what.write ? FrameKind::write : FrameKind::read;
  frame.sealed = link.ticket.seal;
  frame.number = link.next_number++;
  frame.transfer = op.what.transfer;
  frame.slot = op.what.place.slot;
  frame.offset = op.what.place.offset + op.next;
  frame.bytes = bytes;
  if (link.under_way.empty()) link.moved_at = now_;
  link.under_way.push_back({frame.number, id, bytes, op.next});
  link.under_way_bytes += bytes;
  link.connection->stream.push(frame, op.what.write ? ByteView(op.what.local + op.next, bytes) : ByteView(),
                               id);
  op.next += bytes;
  if (op.next == op.what.place.bytes) link.waiting[cls].pop_front();
  return true;
}

void Mover::pump() {
  // What was flushed makes room for more; the windows end this.
  while (true) {
    bool any = false;
    while (schedule()) any = true;
    if (!any) return;
    for (std::size_t i = 0; i < links_.all().size(); ++i) {
      // A copy: the end of a connection may take a link out of the ring.
      Connection* connection = links_.all()[i]->connection;
      if (connection != nullptr && connection->connected && connection->stream.unsent_bytes() > 0) {
        flush(*connection);
      }
    }
  }
}

// The answer to the oldest unit of the link is complete.
void Mover::answered(Connection& connection, Link& link) {
  const Frame& frame = connection.stream.frame();
  const Unit unit = link.under_way.front();
  link.under_way.pop_front();
  link.under_way_bytes -= unit.bytes;
  measure(link, frame.code == Code::ok ? unit.bytes : 0);
  const auto at = ops_.find(unit.op);
  if (at == ops_.end()) return;
  if (frame.code != Code::ok) {
    end_op(unit.op, frame.code);
    return;
  }
  Op& op = at->second;
  count(op.what.write ? &FabricCounters::written_bytes : &FabricCounters::read_bytes, unit.bytes);
  op.acked += unit.bytes;
  if (op.acked == op.what.place.bytes) end_op(unit.op, Code::ok);
}

void Mover::measure(Link& link, std::uint64_t bytes) {
  const bool goes_on = link.phase == LinkPhase::up && (link.waits() || !link.under_way.empty());
  const std::optional<double> rate = link.rate.moved(bytes, goes_on, clock_.now());
  if (rate && events_.count() < rate_events_max) tell(Rate{link.peer, *rate});
}

// ---- connections

void Mover::accept_all() {
  while (true) {
    Result<Fd> fd = data_accept(listener_.get());
    if (!fd) {
      // The listener stays readable, so it is left alone until the sweep.
      accepting_ = false;
      epoll_event event{};
      event.data.u64 = listener_event;
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
    }
    if (!fd || !fd->valid()) return;
    if (!make_room()) {
      count(&FabricCounters::refused_connections);
      continue;
    }
    Connection& connection = add_connection(*std::move(fd));
    connection.until = now_ + options_.ticket_life;
    ++greetings_;
    arm(connection);
  }
}

bool Mover::full() const {
  return greetings_ >= options_.greetings_max || open_.size() >= connections_max;
}

// Makes room for one that came: the oldest that has shown nothing yet goes, which a peer of ours does at once.  It may
// have, in this very turn: of many that come together nothing is read before all are accepted.
bool Mover::make_room() {
  while (full()) {
    Connection* oldest = nullptr;
    for (const auto& [id, connection] : open_) {
      if (connection->dialled || connection->granted || (oldest != nullptr && oldest->id < id)) continue;
      oldest = connection.get();
    }
    if (oldest == nullptr) return false;
    on_event(*oldest, EPOLLIN);
    if (oldest->closed || oldest->granted) continue;
    count(&FabricCounters::refused_connections);
    close(*oldest);
  }
  return true;
}

Mover::Connection& Mover::add_connection(Fd fd) {
  const std::uint64_t id = next_connection_++;
  auto [at, fresh] = open_.emplace(id, std::make_unique<Connection>(id, std::move(fd), drain_));
  DI_ASSERT(fresh);
  connections_.store(open_.size(), std::memory_order_relaxed);
  return *at->second;
}

void Mover::close(Connection& connection, std::string_view why) {
  if (connection.closed) return;
  connection.closed = true;
  if (connection.armed != 0) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.stream.fd(), nullptr);
  }
  // The other side shall know now, not when the object goes.
  ::shutdown(connection.stream.fd(), SHUT_RDWR);
  if (!connection.dialled && !connection.greeted) --greetings_;
  const auto at = open_.find(connection.id);
  ended_.push_back(std::move(at->second));
  open_.erase(at);
  connections_.store(open_.size(), std::memory_order_relaxed);
  Link* link = connection.link;
  if (link == nullptr) return;
  connection.link = nullptr;
  link->connection = nullptr;
  if (link->phase != LinkPhase::up) {
    dial_failed(*link, why);
    return;
  }
  link->phase = LinkPhase::idle;
  link->rate.forget();
  tell(Rate{link->peer, 0});
  link->under_way.clear();
  link->under_way_bytes = 0;
  end_ops(*link, true);
  if (link->waits()) begin_dial(*link);
}

void Mover::arm(Connection& connection) {
  if (connection.closed) return;
  std::uint32_t want = 0;
  if (connection.connected && !connection.full()) want |= EPOLLIN;
  if (!connection.connected || connection.stream.unsent_bytes() > 0) want |= EPOLLOUT;
  if (want == connection.armed) return;
  epoll_event event{};
  event.events = want;
  event.data.u64 = connection.id;
  const int operation = connection.armed == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  DI_ASSERT(::epoll_ctl(epoll_.get(), operation, connection.stream.fd(), &event) == 0);
  connection.armed = want;
}

void Mover::on_event(Connection& connection, std::uint32_t events) {
  if (!connection.connected) {
    int error = 0;
    socklen_t length = sizeof error;
    if (::getsockopt(connection.stream.fd(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    if (error != 0) {
      close(connection, errno_error("connect", error).message);
      return;
    }
    connection.connected = true;
    const Ticket& ticket = connection.link->ticket;
    connection.link->phase = LinkPhase::greeting;
    connection.said = peer_encode(self_);
    Frame hello = frame_hello(ticket.secret, ticket.seal);
    hello.bytes = static_cast<std::uint32_t>(connection.said.size());
    if (ticket.seal) connection.stream.seal(ticket.key, SealDirection::from_dialler);
    connection.stream.push(hello, connection.said);
    flush(connection);
    return;
  }
  if ((events & EPOLLOUT) != 0) flush(connection);
  if (connection.closed) return;
  const bool readable = (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0;
  if (readable || (connection.stopped && !connection.full())) {
    receive(connection);
    if (connection.closed) return;
    flush(connection);
  }
  // What a stopped connection has in its input buffer raises no event.  It goes on in the next turn, for it may
  // ask as fast as it is answered, and others have to have theirs.
  if (connection.closed || !connection.stopped || connection.full() || connection.again) return;
  connection.again = true;
  again_.push_back(connection.id);
}

void Mover::flush(Connection& connection) {
  const std::size_t unsent = connection.stream.unsent_bytes();
  if (unsent > 0) {
    std::size_t budget = turn_bytes;
    if (connection.stream.flush(budget) == Stream::Sent::ended) {
      close(connection);
      return;
    }
    if (connection.link != nullptr && connection.stream.unsent_bytes() < unsent) {
      connection.link->moved_at = now_;
    }
  }
  arm(connection);
}

void Mover::malformed(Connection& connection) {
  count(&FabricCounters::malformed);
  close(connection, "a malformed answer");
}

void Mover::receive(Connection& connection) {
  std::size_t budget = turn_bytes;
  connection.stopped = false;
  while (!connection.closed) {
    if (connection.full()) {
      connection.stopped = true;
      return;
    }
    const std::size_t before = budget;
    const Stream::Got got = connection.stream.receive(budget);
    if (connection.link != nullptr && budget != before) connection.link->moved_at = now_;
    switch (got) {
      case Stream::Got::nothing:
        return;
      case Stream::Got::header:
        if (!on_header(connection)) return;
        break;
      case Stream::Got::frame:
        if (!on_frame(connection)) return;
        break;
      case Stream::Got::ended:
        // A stranger who leaves without a ticket is worth a count.
        if (!connection.dialled && !connection.greeted) count(&FabricCounters::refused_connections);
        close(connection);
        return;
      case Stream::Got::malformed:
        malformed(connection);
        return;
      case Stream::Got::forged:
        count(&FabricCounters::refused_seal);
        close(connection, "a forged answer");
        return;
    }
  }
}

bool Mover::on_hello(Connection& connection) {
  const Frame& frame = connection.stream.frame();
  if (frame.kind != FrameKind::hello || frame.bytes == 0 || frame.bytes > hello_payload_bytes_max) {
    malformed(connection);
    return false;
  }
  carry_out_all();
  if (connection.closed) return false;
  connection.granted = tickets_.use(frame_ticket(frame), now_);
  if (connection.granted) ticket_count_.fetch_sub(1, std::memory_order_relaxed);
  if (!connection.granted || connection.granted->ticket.seal != frame.sealed) {
    count(&FabricCounters::refused_ticket);
    close(connection);
    return false;
  }
  if (frame.sealed) connection.stream.seal(connection.granted->ticket.key, SealDirection::from_acceptor);
  connection.heard.resize(frame.bytes);
  connection.stream.payload_into(connection.heard);
  return true;
}

Admission Mover::admit(const Connection& connection, const Frame& frame, Access access) {
  if (options_.region == nullptr) return {Refusal{Refused::transfer, Code::not_found}, {}};
  return exposures_.check(connection.peer, frame.transfer, access, {frame.slot, frame.offset, frame.bytes},
                          *options_.region, now_);
}

bool Mover::on_header(Connection& connection) {
  const Frame& frame = connection.stream.frame();
  if (connection.dialled) {
    if (connection.greeted) {
      const Link& link = *connection.link;
      if (link.under_way.empty() || link.under_way.front().number != frame.number) {
        malformed(connection);
        return false;
      }
      const Unit& unit = link.under_way.front();
      const auto op = ops_.find(unit.op);
      const bool refused = frame.code != Code::ok;
      const bool fits = frame.kind == FrameKind::data ? frame.bytes == (refused ? 0 : unit.bytes)
                                                      : frame.kind == FrameKind::wrote && frame.bytes == 0;
      const bool meant = op == ops_.end() || op->second.what.write == (frame.kind == FrameKind::wrote);
      if (!fits || !meant) {
        malformed(connection);
        return false;
      }
      if (op != ops_.end() && frame.bytes > 0) {
        connection.stream.payload_into({op->second.what.local + unit.offset, unit.bytes});
      }
      return true;
    }
    if (frame.kind != FrameKind::welcome || frame.bytes == 0 || frame.bytes > hello_payload_bytes_max ||
        frame.sealed != connection.link->ticket.seal) {
      malformed(connection);
      return false;
    }
    connection.heard.resize(frame.bytes);
    connection.stream.payload_into(connection.heard);
    return true;
  }
  if (!connection.greeted) return on_hello(connection);
  if (frame.kind != FrameKind::write && frame.kind != FrameKind::read) {
    malformed(connection);
    return false;
  }
  // A read is admitted when its answer is made, see on_frame().
  if (frame.kind == FrameKind::read) return true;
  carry_out_all();
  if (connection.closed) return false;
  const Admission admission = admit(connection, frame, Access::write);
  connection.code = Code::ok;
  if (admission.refusal) {
    count(refusal_counter(admission.refusal->why));
    connection.code = admission.refusal->code;
  } else {
    connection.into = frame.transfer;
    connection.stream.payload_into(admission.bytes);
  }
  return true;
}

bool Mover::on_frame(Connection& connection) {
  const Frame& frame = connection.stream.frame();
  if (connection.dialled) {
    if (!connection.greeted) return on_welcome(connection);
    answered(connection, *connection.link);
    return !connection.closed;
  }
  Frame answer;
  answer.sealed = frame.sealed;
  answer.number = frame.number;
  answer.transfer = frame.transfer;
  if (!connection.greeted) {
    const Result<Peer> peer = peer_decode(connection.heard);
    if (!peer || *peer != connection.granted->to) {
      count(&FabricCounters::refused_ticket);
      close(connection);
      return false;
    }
    // The peer has given up what it had before: what is still on the way there must not come after what
    // it sends here.
    std::vector<Connection*> older;
    for (const auto& [id, other] : open_) {
      if (!other->dialled && other->greeted && other->peer == *peer) older.push_back(other.get());
    }
    for (Connection* other : older) close(*other);
    connection.greeted = true;
    --greetings_;
    connection.peer = *peer;
    connection.said = peer_encode(self_);
    answer.kind = FrameKind::welcome;
    answer.number = 0;
    answer.transfer = 0;
    answer.bytes = static_cast<std::uint32_t>(connection.said.size());
    connection.stream.push(answer, connection.said);
    return true;
  }
  if (frame.kind == FrameKind::write) {
    connection.into.reset();
    answer.kind = FrameKind::wrote;
    answer.code = connection.code;
    if (answer.code == Code::ok) {
      count(&FabricCounters::received_bytes, frame.bytes);
      arrivals_.fetch_add(1, std::memory_order_release);
    }
    connection.stream.push(answer);
    return true;
  }
  carry_out_all();
  if (connection.closed) return false;
  answer.kind = FrameKind::data;
  const Admission admission = admit(connection, frame, Access::read);
  if (admission.refusal) {
    count(refusal_counter(admission.refusal->why));
    answer.code = admission.refusal->code;
    connection.stream.push(answer);
    return true;
  }
  answer.bytes = frame.bytes;
  count(&FabricCounters::served_bytes, frame.bytes);
  connection.stream.push(answer, admission.bytes, frame.transfer);
  return true;
}

bool Mover::on_welcome(Connection& connection) {
  const Result<Peer> peer = peer_decode(connection.heard);
  if (!peer || *peer != connection.peer) {
    close(connection, "another process has the address by now");
    return false;
  }
  connection.greeted = true;
  Link& link = *connection.link;
  link.connected(now_);
  link.next_number = 1;
  return true;
}

// ---- time

bool Mover::timed() const {
  return !ops_.empty() || tickets_.count() > 0 || greetings_ > 0 || !accepting_ || links_.timed();
}

void Mover::sweep() {
  swept_at_ = now_;
  ticket_count_.fetch_sub(tickets_.expire(now_), std::memory_order_relaxed);
  if (!accepting_) {
    accepting_ = true;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = listener_event;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
  }
  if (greetings_ > 0) {
    std::vector<Connection*> late;
    for (const auto& [id, connection] : open_) {
      if (!connection->dialled && !connection->greeted && connection->until <= now_) {
        late.push_back(connection.get());
      }
    }
    for (Connection* connection : late) {
      count(&FabricCounters::refused_connections);
      close(*connection);
    }
  }
  // Numbers and deadlines of operations grow together.
  while (!ops_.empty() && ops_.begin()->second.until <= now_) end_op(ops_.begin()->first, Code::timeout);
  const std::vector<Link*> links = links_.all();
  for (Link* link : links) {
    switch (link->phase) {
      case LinkPhase::idle:
        break;
      case LinkPhase::asked:
      case LinkPhase::connecting:
      case LinkPhase::greeting:
        if (link->until <= now_) dial_failed(*link, link->late());
        break;
      case LinkPhase::up:
        if (link->rate.busy()) measure(*link, 0);
        if (link->under_way.empty()) break;
        if (link->moved_at + options_.stall_max <= now_) close(*link->connection);
        break;
      case LinkPhase::pause:
        if (link->until > now_) break;
        if (link->wanted_at + dial_interest > now_) {
          begin_dial(*link);
        } else {
          links_.remove(*link);
        }
        break;
    }
  }
}

}  // namespace di::transfer
