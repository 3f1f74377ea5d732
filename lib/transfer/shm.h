// transfer/shm.h: how the memfd of an arena reaches the processes of a host, and how both sides notice
// that the other one is gone.
//
// RUNDIR/INSTANCE.arena is a SOCK_SEQPACKET socket.  A client sends one arena_hello (64-byte header and
// body in one packet); the server answers arena_region with the memfd beside it.  The connection then
// stays open: its end is the sign that the other process is gone.  Nothing else travels on it.
//
// Owner: loop thread.  Both sides are of one user (SO_PEERCRED); anybody else is refused.
// Bounds: shm_clients_max connections; a connection that does not say hello within shm_hello_within is
// closed; one packet of shm_packet_bytes_max each way.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "base/fd.h"
#include "base/result.h"
#include "loop/loop.h"
#include "wire/messages.h"

namespace di::transfer {

inline constexpr std::size_t shm_clients_max = 256;
inline constexpr std::size_t shm_packet_bytes_max = 4096;
inline constexpr Duration shm_hello_within = seconds(5);
// Without a descriptor for a client, the next try.
inline constexpr Duration shm_accept_pause = milliseconds(500);

class ShmServer {
 public:
  struct Region {
    int fd = -1;  // stays the caller's and open
    std::uint64_t bytes = 0;
    std::uint32_t generation = 0;
    std::string instance;  // of the host daemon
  };
  struct Events {
    // A client has the region.  The same instance may come again after it went.
    std::function<void(const wire::arena_hello& client)> attached;
    // The connection of an attached client ended.  Once per `attached`.
    std::function<void(const wire::arena_hello& client)> detached;
  };

  // Binds `path`, replacing what a killed process left there.  Errors: invalid (path too long), io.
  static Result<std::unique_ptr<ShmServer>> listen(loop::Loop& loop, const std::string& path, Region region,
                                                   Events events);
  // Ends every connection (no events) and removes the path.
  ~ShmServer();
  ShmServer(const ShmServer&) = delete;
  ShmServer& operator=(const ShmServer&) = delete;

  // Ends the connections of an instance: `detached` is not called for them.
  void drop(const std::string& instance);
  [[nodiscard]] std::size_t attached_count() const;

 private:
  struct Connection;
  ShmServer(loop::Loop& loop, std::string path, Fd fd, Region region, Events events);
  void accept_again();
  void accept_all();
  void receive(Connection& connection);
  void end(Connection& connection);

  loop::Loop& loop_;
  std::string path_;
  Fd fd_;
  Region region_;
  Events events_;
  std::list<std::unique_ptr<Connection>> connections_;
  loop::Timer accept_timer_;
  bool accept_failed_ = false;  // and said so
  std::unique_ptr<loop::Watch> watch_;
};

class ShmClient {
 public:
  struct Events {
    // The region; map it (kv::ArenaClient::map) and let go of the descriptor.  At most once.
    std::function<void(const wire::arena_region& region, Fd fd)> attached;
    // The server is gone, or answered nonsense.  Once; destroy the client, connect anew later.
    std::function<void(const Error& why)> detached;
  };

  // Does not block.  Errors: unreachable when nobody listens, invalid (path too long), denied, io.
  static Result<std::unique_ptr<ShmClient>> connect(loop::Loop& loop, const std::string& path,
                                                    const wire::arena_hello& hello, Events events);
  ~ShmClient();
  ShmClient(const ShmClient&) = delete;
  ShmClient& operator=(const ShmClient&) = delete;

 private:
  ShmClient(loop::Loop& loop, Fd fd, Events events);
  void receive();
  void end(const Error& why);

  Fd fd_;
  Events events_;
  bool attached_ = false;
  std::unique_ptr<loop::Watch> watch_;
};

}  // namespace di::transfer
