// transfer/verbs.h: one port of an RDMA device, and reliable connected queue pairs on it: what VerbsFabric
// needs of libibverbs, and none of its types.  verbs.cpp is the only file that knows the library;
// verbs_none.cpp stands in for it where there is none, and opens nothing.
//
// Memory handed to a queue pair is the device's until its completion has been polled or the queue pair is
// destroyed, which does not return before the device has let go of it.
//
// Owner: the loop thread.  Bounds: regions of region_bytes_max; the depths that a queue pair is made with,
// which its user keeps: a post that finds the queue full is a fault of ours and answered io.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"

namespace di::transfer {

// Devices translate larger ones badly or refuse them.
inline constexpr std::uint64_t verbs_region_bytes_max = 2ull << 30;
// Messages up to that travel in the work request itself; no buffer of theirs has to stay.
inline constexpr std::uint32_t verbs_inline_bytes = 64;

// Which port, and which entry of its GID table.  On RoCE the entry decides version and address: `show_gids`,
// or the files under /sys/class/infiniband/DEVICE/ports/PORT/gid_attrs, tell which.
struct VerbsPort {
  std::string device;  // empty: the first that has an active port
  std::uint8_t port = 1;
  std::uint8_t gid_index = 0;
};

// What the other side has to know of a queue pair.
struct VerbsAddress {
  std::uint32_t qpn = 0;
  std::uint32_t psn = 0;  // of the first packet that this side sends
  std::uint16_t lid = 0;
  std::uint8_t mtu = 0;        // as verbs counts: 1 is 256 bytes, 5 is 4096
  std::uint8_t reads_max = 0;  // READs that this side answers at a time
  bool global = true;          // is reached by its GID
  std::array<std::uint8_t, 16> gid{};

  bool operator==(const VerbsAddress&) const = default;
};

struct VerbsKeys {
  std::uint32_t local = 0;
  std::uint32_t remote = 0;
};

// A stretch of registered memory.
struct VerbsPiece {
  std::byte* at = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t local_key = 0;
};

struct VerbsCompletion {
  std::uint64_t id = 0;  // of the post
  bool ok = false;
  bool receive = false;
  std::string_view why;              // when it is not
  std::optional<std::uint32_t> imm;  // of a receive
  std::uint32_t bytes = 0;           // of a receive
};

struct VerbsEvent {
  enum class Kind : std::uint8_t { port_down, port_up, queue_pair, device, other };
  Kind kind = Kind::other;
  std::uint64_t id = 0;  // of queue_pair, which is in error: what it was made with
  std::string_view what;
};

class VerbsRail {
 public:
  // The port may be down.  Errors: not_found (no such device or port, or GID index), io, unsupported (a build
  // without it).
  static Result<std::unique_ptr<VerbsRail>> open(const VerbsPort& port);
  ~VerbsRail();  // after its queue pairs
  VerbsRail(const VerbsRail&) = delete;
  VerbsRail& operator=(const VerbsRail&) = delete;

  // "mlx5_0/1".
  [[nodiscard]] std::string name() const;
  // The port is, now.
  [[nodiscard]] bool active() const;
  // Registers memory for both sides' use, at most verbs_region_bytes_max, for the life of the rail.
  // Memory of a GPU goes in the same way: by its address where nvidia_peermem is loaded, or by `dmabuf`, the
  // descriptor that cuMemGetHandleForAddressRange gives out, and the offset in it.  Errors: io, no_space
  // (locked memory limit), unsupported (no dmabuf).
  [[nodiscard]] Result<VerbsKeys> add_memory(MutableByteView bytes, int dmabuf = -1,
                                             std::uint64_t dmabuf_offset = 0);

  // Readable when next_ready() has something to say.
  [[nodiscard]] int fd() const;
  // A queue pair, by the id it was made with, that has completions to poll, and may have more once it is
  // polled empty: it was armed anew before this returns, so that none is missed.
  [[nodiscard]] std::optional<std::uint64_t> next_ready();
  // Readable when next_event() has something to say.
  [[nodiscard]] int event_fd() const;
  [[nodiscard]] std::optional<VerbsEvent> next_event();

 private:
  friend class VerbsQueuePair;
  struct State;
  explicit VerbsRail(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class VerbsQueuePair {
 public:
  struct Options {
    std::uint64_t id = 0;
    std::uint32_t sends_max = 0;
    std::uint32_t receives_max = 0;
    // The other side may read and write this side's registered memory, given its keys.
    bool open_to_peer = false;
  };
  // With the address that the port has now: a GID, a LID or an MTU may have become another since the rail was
  // opened.  Errors: io, no_space, not_found (no such GID any more).
  static Result<std::unique_ptr<VerbsQueuePair>> make(VerbsRail& rail, const Options& options);
  ~VerbsQueuePair();
  VerbsQueuePair(const VerbsQueuePair&) = delete;
  VerbsQueuePair& operator=(const VerbsQueuePair&) = delete;

  [[nodiscard]] const VerbsAddress& address() const;
  // Post receives before.  Errors: io.
  Status connect(const VerbsAddress& other);

  // Each is answered by one completion.  Errors: io.
  Status receive(std::uint64_t id, const VerbsPiece& into);
  Status send(std::uint64_t id, ByteView message);  // at most verbs_inline_bytes
  Status read(std::uint64_t id, std::span<const VerbsPiece> into, std::uint64_t address,
              std::uint32_t remote_key);
  // The other side's next receive completes with `imm` after all of the bytes.
  Status write_imm(std::uint64_t id, std::span<const VerbsPiece> from, std::uint64_t address,
                   std::uint32_t remote_key, std::uint32_t imm);
  // At most completions.size(); how many.  Errors: io: the queue is lost.
  Result<std::size_t> poll(std::span<VerbsCompletion> completions);

 private:
  struct State;
  explicit VerbsQueuePair(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace di::transfer
