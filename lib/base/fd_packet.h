// base/fd_packet.h: packets on a Unix socket, with at most one descriptor beside each.
//
// For SOCK_SEQPACKET and SOCK_DGRAM.  Neither side blocks.  Any thread, one at a time per socket.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <string>

#include "base/bytes.h"
#include "base/fd.h"
#include "base/result.h"

namespace di {

struct FdPacket {
  Bytes bytes;
  Fd fd;  // close-on-exec; invalid when none came
};

// Errors: busy when nothing is there yet, unreachable at the end of the connection, corrupt when the
// packet is longer than `bytes_max`.
Result<FdPacket> fd_packet_receive(int socket, std::size_t bytes_max);
// Sends `fd` beside the bytes unless it is -1.  The buffers of a fresh connection hold one packet, so a
// first packet need not be repeated.  Errors: busy, unreachable, io.
Status fd_packet_send(int socket, ByteView bytes, int fd);

// The address of a path.  Errors: invalid (too long).
Result<sockaddr_un> unix_address(const std::string& path);
// That the other end of a connected Unix socket runs as our user.  Errors: denied, io.
Status check_same_user(int socket);

}  // namespace di
