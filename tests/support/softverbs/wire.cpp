// Softverbs between processes of one user on one machine.
//
// Every queue pair listens on a Unix socket that is named by its number; who sends to it connects there.  One
// request of a queue pair is under way at a time.  Bytes are fetched by process_vm_readv, always by the side
// whose memory they go to, so that no process, however late it wakes up, writes into another's memory:
//   READ   the asker fetches, then asks; the answer says whether all that was allowed
//   WRITE  the asker asks; the other side checks, fetches, says `fetched`; the asker says whether the request
//   was
//          still under way (its memory unchanged), and only then a receive completes
// Up to eager_bytes_max travel in the request itself.  A socket that ends is a process that ended: the asker
// tries again as its attributes say, then RETRY_EXC_ERR.  A process that is stopped stops its softverbs as
// well, which a NIC would not: what is under way to it waits.
#include <dirent.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/assert.h"
#include "tests/support/softverbs/model.h"

namespace di::softverbs {

namespace {

enum class PacketKind : std::uint32_t { request, answer, fetched, confirm };

struct Packet {
  PacketKind kind = PacketKind::request;
  Outcome outcome = Outcome::done;  // of an answer
  bool valid = false;               // of a confirm
  bool eager = false;
  bool solicited = false;
  std::uint32_t imm = 0;
  std::uint64_t sequence = 0;
  Asking asking;
  std::uint32_t pieces = 0;
  std::array<Piece, sge_max> piece{};
  std::uint32_t payload = 0;
  std::array<std::byte, eager_bytes_max> bytes{};

  [[nodiscard]] std::size_t length() const { return offsetof(Packet, bytes) + payload; }
};

enum class SocketKind : std::uint8_t { listener, in, out };

// A write that was fetched and is not yet confirmed.
struct Fetched {
  Packet packet;
  std::optional<Recv> receive;
};

struct Socket {
  int fd = -1;
  SocketKind kind = SocketKind::listener;
  std::uint32_t qpn = 0;  // whose
  pid_t pid = 0;          // of the other side
  std::unique_ptr<Fetched> fetched;
};

struct Wire {
  int epoll = -1;
  std::uint64_t next = 1;
  std::map<std::uint64_t, Socket> sockets;
};
constexpr std::uint64_t doorbell_token = 0;

Wire& wire() {
  static Wire* const made = new Wire;
  return *made;
}

const std::string& directory() {
  static const std::string* const made = new std::string("/tmp/softverbs." + std::to_string(::getuid()));
  return *made;
}
std::string path_of(std::uint32_t qpn) {
  return directory() + "/" + std::to_string(qpn);
}
sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  DI_ASSERT(path.size() < sizeof address.sun_path);
  std::copy(path.begin(), path.end(), address.sun_path);
  return address;
}
int new_socket() {
  return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}
int connect_to(const std::string& path) {
  const int fd = new_socket();
  const sockaddr_un address = address_of(path);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  const int why = errno;
  ::close(fd);
  errno = why;
  return -1;
}

std::uint64_t add_socket(int fd, SocketKind kind, std::uint32_t qpn) {
  const std::uint64_t token = wire().next++;
  Socket socket;
  socket.fd = fd;
  socket.kind = kind;
  socket.qpn = qpn;
  if (kind != SocketKind::listener) {
    ucred other{};
    socklen_t length = sizeof other;
    DI_ASSERT(::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &length) == 0);
    socket.pid = other.pid;
  }
  wire().sockets.emplace(token, std::move(socket));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = token;
  DI_ASSERT(::epoll_ctl(wire().epoll, EPOLL_CTL_ADD, fd, &event) == 0);
  return token;
}

void close_socket(std::uint64_t token) {
  const auto at = wire().sockets.find(token);
  if (at == wire().sockets.end()) return;
  ::close(at->second.fd);
  wire().sockets.erase(at);
}

bool send_packet(int fd, const Packet& packet) {
  return ::send(fd, &packet, packet.length(), MSG_NOSIGNAL) == static_cast<ssize_t>(packet.length());
}

// Another process's memory into ours.  The errno, or 0.
int fetch(pid_t pid, const Pieces& to, const Pieces& from) {
  std::size_t t = 0;
  std::size_t f = 0;
  std::uint64_t at_to = 0;
  std::uint64_t at_from = 0;
  while (t < to.size() && f < from.size()) {
    const std::uint64_t part = std::min(to[t].bytes - at_to, from[f].bytes - at_from);
    const iovec ours{to[t].at + at_to, part};
    const iovec theirs{from[f].at + at_from, part};
    const ssize_t got = ::process_vm_readv(pid, &ours, 1, &theirs, 1, 0);
    if (got < 0) return errno;
    if (got == 0) return EFAULT;
    at_to += static_cast<std::uint64_t>(got);
    at_from += static_cast<std::uint64_t>(got);
    if (at_to == to[t].bytes) {
      ++t;
      at_to = 0;
    }
    if (at_from == from[f].bytes) {
      ++f;
      at_from = 0;
    }
  }
  return 0;
}

Qp* find_qp(std::uint32_t qpn) {
  const auto at = nic().qps.find(qpn);
  return at == nic().qps.end() ? nullptr : at->second;
}

// ---- the side that is asked

Packet answer_to(const Packet& request, PacketKind kind, Outcome outcome) {
  Packet answer;
  answer.kind = kind;
  answer.outcome = outcome;
  answer.sequence = request.sequence;
  return answer;
}

void on_request(Lock& lock, std::uint64_t token, const Packet& request) {
  Socket& socket = wire().sockets.at(token);
  Qp* qp = find_qp(socket.qpn);
  const auto answer = [&socket, &request](Outcome outcome) {
    send_packet(socket.fd, answer_to(request, PacketKind::answer, outcome));
  };
  const Asking& asking = request.asking;
  const Outcome admitted = admit(*qp, asking);
  if (admitted == Outcome::access || admitted == Outcome::invalid) refuse_access(*qp);
  if (admitted != Outcome::done) return answer(admitted);
  if (asking.opcode == IBV_WR_RDMA_READ) return answer(Outcome::done);
  std::optional<Recv> receive;
  if (takes_receive(asking.opcode)) {
    receive = take_receive(*qp);
    if (!receive) return answer(Outcome::not_ready);
  }
  Pieces into;
  std::vector<Mr*> regions;
  if (is_send(asking.opcode)) {
    std::optional<Pieces> room = local_pieces(*qp, receive->sges, true);
    std::uint64_t bytes = 0;
    for (const Piece& piece : room.value_or(Pieces())) bytes += piece.bytes;
    if (!room || bytes < asking.bytes) {
      too_long(*qp, *receive);
      return answer(Outcome::invalid);
    }
    into = *std::move(room);
    regions = regions_of(receive->sges);
  } else if (asking.bytes > 0) {
    into = {{reinterpret_cast<std::byte*>(asking.address), asking.bytes}};
    regions.push_back(nic().regions.at(asking.rkey));
  }
  nic().bytes += asking.bytes;
  if (request.eager) {
    if (asking.bytes > 0) {
      const Pieces from{{const_cast<std::byte*>(request.bytes.data()), asking.bytes}};
      copy_pieces(into, from, 0, asking.bytes);
    }
    if (receive) deliver(*qp, *receive, asking.opcode, asking.bytes, request.imm, request.solicited);
    return answer(Outcome::done);
  }
  const Pieces from(request.piece.begin(), request.piece.begin() + request.pieces);
  int failed = 0;
  {
    const Copying copying(lock, {qp}, std::move(regions));
    failed = fetch(socket.pid, into, from);
  }
  // The queue pair is still there, see Copying; its sockets go with it only.
  if (failed != 0) {
    if (receive) give_back_receive(*qp, *std::move(receive));
    return answer(failed == ESRCH ? Outcome::dropped : Outcome::invalid);
  }
  if (flips(asking.bytes)) flip_bit(into, asking.bytes / 2);
  socket.fetched = std::make_unique<Fetched>(Fetched{request, std::move(receive)});
  send_packet(socket.fd, answer_to(request, PacketKind::fetched, Outcome::done));
}

void on_confirm(Socket& socket, const Packet& packet) {
  if (!socket.fetched || socket.fetched->packet.sequence != packet.sequence) return;
  const std::unique_ptr<Fetched> fetched = std::move(socket.fetched);
  Qp* qp = find_qp(socket.qpn);
  const bool answers = qp->base.state == IBV_QPS_RTR || qp->base.state == IBV_QPS_RTS;
  if (!fetched->receive || !answers) return;
  const Packet& request = fetched->packet;
  if (packet.valid) {
    deliver(*qp, *fetched->receive, request.asking.opcode, request.asking.bytes, request.imm,
            request.solicited);
  } else {
    give_back_receive(*qp, *std::move(fetched->receive));
  }
}

// ---- the side that asks

void on_answer(Qp& qp, const Packet& packet) {
  if (qp.awaited != packet.sequence) return;
  qp.awaited = 0;
  if (packet.outcome == Outcome::done && qp.sends.front().faulted) {
    end_send(qp, IBV_WC_REM_OP_ERR);
    return;
  }
  settle_send(qp, packet.outcome);
}

void on_fetched(Socket& socket, Qp& qp, const Packet& packet) {
  Packet confirm = answer_to(packet, PacketKind::confirm, Outcome::done);
  confirm.valid = qp.awaited == packet.sequence;
  send_packet(socket.fd, confirm);
  if (confirm.valid) settle_send(qp, Outcome::done);
}

void on_end(std::uint64_t token) {
  Socket& socket = wire().sockets.at(token);
  Qp* qp = find_qp(socket.qpn);
  if (socket.kind == SocketKind::in && socket.fetched && socket.fetched->receive && qp != nullptr) {
    const bool answers = qp->base.state == IBV_QPS_RTR || qp->base.state == IBV_QPS_RTS;
    if (answers) give_back_receive(*qp, *std::move(socket.fetched->receive));
  }
  const bool out = socket.kind == SocketKind::out;
  close_socket(token);
  if (!out || qp == nullptr || qp->out != token) return;
  qp->out = 0;
  if (qp->awaited != 0) settle_send(*qp, Outcome::dropped);
}

void on_readable(Lock& lock, std::uint64_t token) {
  const auto at = wire().sockets.find(token);
  if (at == wire().sockets.end()) return;
  Socket& socket = at->second;
  if (socket.kind == SocketKind::listener) {
    const int fd = ::accept4(socket.fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) add_socket(fd, SocketKind::in, socket.qpn);
    return;
  }
  Qp* qp = find_qp(socket.qpn);
  // One that is about to change or go: the socket stays readable meanwhile.
  if (qp == nullptr || qp->wanted > 0) return;
  auto packet = std::make_unique<Packet>();
  const ssize_t got = ::recv(socket.fd, packet.get(), sizeof *packet, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got < static_cast<ssize_t>(offsetof(Packet, bytes)) ||
      static_cast<std::size_t>(got) != packet->length()) {
    on_end(token);
    return;
  }
  switch (packet->kind) {
    case PacketKind::request:
      return on_request(lock, token, *packet);
    case PacketKind::confirm:
      return on_confirm(socket, *packet);
    case PacketKind::answer:
      return on_answer(*qp, *packet);
    case PacketKind::fetched:
      return on_fetched(socket, *qp, *packet);
  }
}

// What killed processes left.
void sweep() {
  DIR* listing = ::opendir(directory().c_str());
  if (listing == nullptr) return;
  while (const dirent* entry = ::readdir(listing)) {
    const std::string name = entry->d_name;
    if (name.empty() || !std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; }))
      continue;
    const std::string path = directory() + "/" + name;
    const int fd = connect_to(path);
    if (fd >= 0) {
      ::close(fd);
    } else if (errno == ECONNREFUSED) {
      ::unlink(path.c_str());
    }
  }
  ::closedir(listing);
}

}  // namespace

void wire_open(Qp& qp) {
  Nic& n = nic();
  const int fd = new_socket();
  DI_ASSERT(fd >= 0);
  // Bound and listening under another name first, so that sweep() of another process never sees it deaf.
  const std::string early =
      directory() + "/new." + std::to_string(::getpid()) + "." + std::to_string(n.next_qpn);
  ::unlink(early.c_str());
  const sockaddr_un address = address_of(early);
  DI_ASSERT(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
            ::listen(fd, 64) == 0);
  do {
    n.next_qpn = (n.next_qpn * 5 + 12345) & 0xffffff;
  } while (n.next_qpn < 2 || n.qps.contains(n.next_qpn) ||
           ::renameat2(AT_FDCWD, early.c_str(), AT_FDCWD, path_of(n.next_qpn).c_str(), RENAME_NOREPLACE) !=
               0);
  qp.base.qp_num = n.next_qpn;
  qp.listener = add_socket(fd, SocketKind::listener, qp.base.qp_num);
}

void wire_close(Qp& qp) {
  if (qp.listener == 0) return;
  ::unlink(path_of(qp.base.qp_num).c_str());
  std::vector<std::uint64_t> theirs;
  for (const auto& [token, socket] : wire().sockets) {
    if (socket.qpn == qp.base.qp_num) theirs.push_back(token);
  }
  for (const std::uint64_t token : theirs) close_socket(token);
}

Outcome wire_send(Lock& lock, Qp& qp) {
  if (qp.out == 0) {
    const int fd = connect_to(path_of(qp.attr.dest_qp_num));
    if (fd < 0) return Outcome::dropped;
    qp.out = add_socket(fd, SocketKind::out, qp.base.qp_num);
  }
  const Socket socket_now = [&] {
    const Socket& socket = wire().sockets.at(qp.out);
    Socket copy;
    copy.fd = socket.fd;
    copy.pid = socket.pid;
    return copy;
  }();
  Send& send = qp.sends.front();
  auto packet = std::make_unique<Packet>();
  packet->sequence = send.sequence;
  packet->asking = asking_of(qp, send);
  packet->imm = send.imm;
  packet->solicited = send.solicited;
  const bool read = send.opcode == IBV_WR_RDMA_READ;
  const Pieces ours =
      send.inlined ? Pieces{{send.own.data(), send.own.size()}} : *local_pieces(qp, send.sges, read);
  if (read && send.bytes > 0) {
    int failed = 0;
    {
      const Copying copying(lock, {&qp}, regions_of(send.sges));
      failed = fetch(socket_now.pid, ours, {{reinterpret_cast<std::byte*>(send.address), send.bytes}});
    }
    send.faulted = failed != 0;
    nic().bytes += send.bytes;
    if (flips(send.bytes)) flip_bit(ours, send.bytes / 2);
  } else if (!read && send.bytes <= eager_bytes_max) {
    packet->eager = true;
    packet->payload = static_cast<std::uint32_t>(send.bytes);
    if (send.bytes > 0) copy_pieces({{packet->bytes.data(), send.bytes}}, ours, 0, send.bytes);
  } else if (!read) {
    packet->pieces = static_cast<std::uint32_t>(ours.size());
    std::copy(ours.begin(), ours.end(), packet->piece.begin());
  }
  if (!send_packet(socket_now.fd, *packet)) {
    close_socket(qp.out);
    qp.out = 0;
    return Outcome::dropped;
  }
  qp.awaited = send.sequence;
  return Outcome::under_way;
}

void wire_start() {
  ::mkdir(directory().c_str(), 0700);
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // others fetch from here
  sweep();
  wire().epoll = ::epoll_create1(EPOLL_CLOEXEC);
  DI_ASSERT(wire().epoll >= 0);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = doorbell_token;
  DI_ASSERT(::epoll_ctl(wire().epoll, EPOLL_CTL_ADD, nic().doorbell, &event) == 0);
}

void wire_stop() {
  DI_ASSERT(wire().sockets.empty());
  ::close(wire().epoll);
  wire().epoll = -1;
}

void wire_wait(Lock& lock, int timeout_ms) {
  const int epoll = wire().epoll;
  const int doorbell = nic().doorbell;
  lock.unlock();
  std::array<epoll_event, 32> events;
  const int count = ::epoll_wait(epoll, events.data(), static_cast<int>(events.size()), timeout_ms);
  std::uint64_t rung = 0;
  if (count > 0) [[maybe_unused]]
    const ssize_t got = ::read(doorbell, &rung, sizeof rung);
  lock.lock();
  for (int i = 0; i < count; ++i) {
    const std::uint64_t token = events[static_cast<std::size_t>(i)].data.u64;
    if (token != doorbell_token) on_readable(lock, token);
  }
}

}  // namespace di::softverbs
