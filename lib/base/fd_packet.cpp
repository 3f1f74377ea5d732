#include "base/fd_packet.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace di {

Result<FdPacket> fd_packet_receive(int socket, std::size_t bytes_max) {
  FdPacket packet;
  packet.bytes.resize(bytes_max);
  iovec part{packet.bytes.data(), packet.bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) {
    if (errno == EAGAIN || errno == EINTR) return Error{Code::busy, errno, "nothing to read"};
    Error error = errno_error("recvmsg");
    error.code = Code::unreachable;
    return error;
  }
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    int received = -1;
    std::memcpy(&received, CMSG_DATA(head), sizeof received);
    packet.fd = Fd(received);
  }
  if (got == 0) return Error{Code::unreachable, 0, "the other side closed the connection"};
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0)
    return Error{Code::corrupt, 0, "a packet is too long"};
  packet.bytes.resize(static_cast<std::size_t>(got));
  return packet;
}

Status fd_packet_send(int socket, ByteView bytes, int fd) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &fd, sizeof fd);
  }
  if (::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    const int why = errno;
    Error error = errno_error("sendmsg", why);
    if (why == EPIPE || why == ECONNRESET || why == ECONNREFUSED) error.code = Code::unreachable;
    if (why == EAGAIN) error.code = Code::busy;
    return error;
  }
  return {};
}

Result<sockaddr_un> unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Error{Code::invalid, 0,
                 path + ": a socket path has 1 to " + std::to_string(sizeof address.sun_path - 1) + " bytes"};
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Status check_same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return errno_error("SO_PEERCRED");
  if (peer.uid != ::geteuid()) return Error{Code::denied, 0, "the other side runs as another user"};
  return {};
}

}  // namespace di
