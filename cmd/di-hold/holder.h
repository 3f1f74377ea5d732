// cmd/di-hold/holder.h: one descriptor, and who may put and get it.
//
// On the socket, a SOCK_SEQPACKET, each packet is a line without its end:
//   put INSTANCE   with a descriptor beside it  -> ok      it replaces the one that was kept
//   get INSTANCE                                -> ok, with the descriptor beside it; or none
//   drop INSTANCE                               -> ok      nothing is kept any more
// INSTANCE must be the one that the holder was started for, and the caller must run as the same user;
// anything else ends the connection.
//
// One thread.  Bounds: one descriptor, connections_max connections, packets of packet_bytes_max.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "base/result.h"
#include "base/time.h"

namespace di::hold {

inline constexpr std::size_t connections_max = 8;
inline constexpr std::size_t packet_bytes_max = 256;

struct Options {
  std::string instance;  // "di-kvd.host0"
  std::string run_dir;
  int listen_fd = -1;
  Duration alone = seconds(600);  // without a connection, until the end
};

class Holder {
 public:
  // `signals`: readable when it is to end.  `listening` does not block.
  Holder(std::string instance, Duration alone, Fd listening, int signals, const Clock& clock);

  // Waits for the next thing to happen and answers it.  False: it is over, because it was told so or nobody
  // has been connected for `alone`.  Errors: io.
  Result<bool> round();

 private:
  void accept_one();
  bool answer(int connection);

  const std::string instance_;
  const Duration alone_;
  const Fd listening_;
  const int signals_;
  const Clock& clock_;
  Instant alone_since_;  // while there is no connection
  Fd kept_;
  std::vector<Fd> connections_;
};

// Returns after SIGTERM or SIGINT, or when nobody has been connected for `alone`.  Errors: io, exists
// (another holder serves this instance).
Status run(const Options& options);

}  // namespace di::hold
