// transfer/mover.h: the thread that moves the bytes of a TcpFabric.
//
// It owns everything that a socket needs: connections, tickets, exposures, operations.  Commands come in
// the order they were given; all that are there are carried out before a frame is admitted, so a peer
// that heard of an exposure over the control channel finds it open.  Events are the answers.
//
// Its links: transfer/links.h.
//
// Slot memory and operations' memory are used by this thread alone.  It lets go of them at conceal and
// cancel: a frame that is half sent keeps a copy of its rest, one that is half received goes on into
// the drain.
//
// Bounds: what tcp.h says; answers_max unsent answers a connection, above which it is not read.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "loop/mailbox.h"
#include "transfer/exposure.h"
#include "transfer/links.h"
#include "transfer/stream.h"
#include "transfer/tcp.h"

namespace di::transfer {

inline constexpr std::size_t answers_max = 256;

class Mover {
 public:
  struct Submit {
    OpId id = 0;
    Peer peer;
    bool write = false;
    TransferId transfer = 0;
    Place place;
    std::byte* local = nullptr;  // only read from by a write
    Class cls = Class::fetch;
  };
  struct Cancel {
    OpId id = 0;
  };
  struct Expose {
    Peer to;
    TransferId transfer = 0;
    Access access = Access::read;
    std::vector<SlotName> slots;
  };
  struct Extend {
    Peer to;
    TransferId transfer = 0;
    std::vector<SlotName> slots;
  };
  struct Conceal {
    Peer to;
    TransferId transfer = 0;
  };
  struct Grant {
    Peer to;
    Ticket ticket;
  };
  struct Dial {  // without a ticket: it was refused
    Peer peer;
    std::string endpoint;
    std::optional<Ticket> ticket;
  };
  struct Lost {
    Peer peer;
  };
  struct Self {
    Peer peer;
  };
  using Command = std::variant<Submit, Cancel, Expose, Extend, Conceal, Grant, Dial, Lost, Self>;

  struct WantTicket {
    Peer peer;
  };
  struct Done {
    OpId id = 0;
    Code code = Code::ok;
  };
  struct Concealed {
    Peer to;
    TransferId transfer = 0;
  };
  struct Rate {
    Peer peer;
    double bytes_per_s = 0;
  };
  using Event = std::variant<WantTicket, Done, Concealed, Rate>;

  // Starts the thread.  `listener` may be invalid.
  Mover(const TcpOptions& options, Fd listener, loop::Mailbox<Event>& events);
  // Ends it: nothing is in use afterwards, no further events.
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // Any thread.
  void post(Command&& command);
  [[nodiscard]] std::size_t commands() const { return commands_.count(); }
  [[nodiscard]] FabricCounters counters() const;
  // Any thread: see Fabric.
  void see_arrivals() const { static_cast<void>(arrivals_.load(std::memory_order_acquire)); }
  [[nodiscard]] std::size_t connections() const { return connections_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::size_t tickets() const { return ticket_count_.load(std::memory_order_relaxed); }
  // Counts a ticket before its Grant is posted.
  void ticket_counted() { ticket_count_.fetch_add(1, std::memory_order_relaxed); }

 private:
  struct Connection;

  struct Unit {
    std::uint64_t number = 0;
    OpId op = 0;  // 0: nobody waits for it any more
    std::uint32_t bytes = 0;
    std::uint64_t offset = 0;  // in the operation
  };
  struct Op {
    Submit what;
    std::uint64_t next = 0;  // bytes that units were made of
    std::uint64_t acked = 0;
    Instant until;
  };
  struct Link : LinkBase {
    Connection* connection = nullptr;
    std::deque<Unit> under_way;
    std::uint64_t next_number = 1;
  };
  struct Connection {
    Connection(std::uint64_t number, Fd fd, MutableByteView drain)
        : id(number), stream(std::move(fd), drain) {}

    const std::uint64_t id;
    Stream stream;
    bool dialled = false;  // by this side
    bool connected = true;
    bool greeted = false;
    bool closed = false;
    bool stopped = false;  // not read, for too many answers wait to be sent
    bool again = false;    // in again_
    Link* link = nullptr;  // of a dialled one, while the link is there
    Peer peer;
    Instant until;  // of the greeting
    std::optional<Tickets::Granted> granted;
    Bytes said;
    Bytes heard;
    std::uint32_t armed = 0;
    // An incoming write that is under way.
    std::optional<TransferId> into;
    Code code = Code::ok;

    // A dialler always reads: if both waited for the other to read, both would wait for ever.
    [[nodiscard]] bool full() const { return !dialled && stream.queued() >= answers_max; }
  };

  void run();
  void carry_out_all();
  void carry_out(Submit& submit);
  void carry_out(Cancel& cancel);
  void carry_out(Expose& expose);
  void carry_out(Extend& extend);
  void carry_out(Conceal& conceal);
  void carry_out(Grant& grant);
  void carry_out(Dial& dial);
  void carry_out(Lost& lost);
  void carry_out(Self& self);
  void tell(Event&& event);
  void count(std::uint64_t FabricCounters::*field, std::uint64_t by = 1);

  // Links and operations.
  void begin_dial(Link& link);
  void dial_failed(Link& link, std::string_view why);
  void end_op(OpId id, Code code);
  void end_ops(Link& link, bool begun_only);
  [[nodiscard]] bool may_send(const Link& link) const;
  bool schedule();
  void pump();
  void answered(Connection& connection, Link& link);

  // Connections.
  void accept_all();
  Connection& add_connection(Fd fd);
  // `why`: of a dial that fails with it.
  void close(Connection& connection, std::string_view why = "the connection ended");
  void arm(Connection& connection);
  void on_event(Connection& connection, std::uint32_t events);
  [[nodiscard]] bool full() const;
  [[nodiscard]] bool make_room();
  void receive(Connection& connection);
  void flush(Connection& connection);
  // False when the connection was closed.
  bool on_header(Connection& connection);
  bool on_frame(Connection& connection);
  bool on_hello(Connection& connection);
  bool on_welcome(Connection& connection);
  void malformed(Connection& connection);
  [[nodiscard]] Admission admit(const Connection& connection, const Frame& frame, Access access);

  // Time.
  [[nodiscard]] bool timed() const;
  void sweep();
  // The link's rate after `bytes` were acknowledged.
  void measure(Link& link, std::uint64_t bytes);

  const TcpOptions options_;
  Peer self_;
  MonotonicClock clock_;
  Instant now_;
  Fd listener_;
  Fd epoll_;
  loop::Mailbox<Command> commands_;
  loop::Mailbox<Event>& events_;
  std::atomic<bool> stopping_{false};
  bool accepting_ = true;

  Bytes drain_;
  Budget budget_;
  Exposures exposures_;
  Tickets tickets_;
  std::map<OpId, Op> ops_;
  Links<Link> links_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> open_;
  std::vector<std::unique_ptr<Connection>> ended_;  // until nobody can hold them any more
  std::size_t greetings_ = 0;
  std::vector<std::uint64_t> again_;  // connections that may be read from, though no event says so
  std::uint64_t next_connection_ = 2;
  Instant swept_at_;

  mutable FabricCounters counters_;         // through atomic_ref only
  std::atomic<std::uint64_t> arrivals_{0};  // writes of peers that are complete here
  std::atomic<std::size_t> connections_{0};
  std::atomic<std::size_t> ticket_count_{0};
  std::thread thread_;
};

}  // namespace di::transfer
