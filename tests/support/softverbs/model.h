// tests/support/softverbs/model.h: the objects of softverbs.  The ibv_ struct comes first in each, so that
// one is the other by a cast.
//
// Owner: Nic::mutex.  While bytes are copied the lock is open; the copy holds `busy` of the queue pairs and
// `users` of the regions meanwhile, and whoever wants to change or remove one of those waits for Nic::idle.
#pragma once

#include <infiniband/verbs.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/rng.h"

namespace di::softverbs {

using SteadyTime = std::chrono::steady_clock::time_point;

inline constexpr std::size_t devices = 2;
inline constexpr int queue_depth_max = 16384;
inline constexpr int cq_depth_max = 1 << 20;
inline constexpr int sge_max = 16;
inline constexpr std::uint32_t inline_max = 256;
inline constexpr std::uint64_t region_bytes_max = 2ull << 30;  // so that larger ones do not go unnoticed
inline constexpr std::uint64_t message_bytes_max = 1ull << 30;
// Sent along with a request between processes instead of being fetched by the other side.
inline constexpr std::size_t eager_bytes_max = 4096;

struct Device {
  ibv_device base{};
  bool up = true;
  bool path = true;
  std::uint8_t gid_last = 0;
};

struct Cq;

struct Context {
  verbs_context verbs{};  // its last member is the ibv_context
  Device* device = nullptr;
  std::deque<ibv_async_event> events;
  std::size_t objects = 0;
};

struct Pd {
  ibv_pd base{};
  std::size_t users = 0;
};

struct Mr {
  ibv_mr base{};
  unsigned access = 0;
  std::size_t users = 0;  // copies under way
};

struct Channel {
  ibv_comp_channel base{};
  std::deque<Cq*> events;
};

struct Srq;
struct Qp;

struct Completion {
  ibv_wc wc{};
  Qp* qp = nullptr;
  bool send = false;
  std::uint64_t sequence = 0;  // of the send; frees what was posted up to it
  Srq* srq = nullptr;
};

struct Cq {
  ibv_cq base{};
  std::deque<Completion> entries;
  bool armed = false;
  bool solicited_only = false;
  bool overrun = false;
  std::size_t users = 0;
  unsigned unacked = 0;
  unsigned async_unacked = 0;
};

struct Recv {
  std::uint64_t id = 0;
  std::vector<ibv_sge> sges;
};

struct Srq {
  ibv_srq base{};
  std::deque<Recv> queue;
  std::size_t used = 0;  // posted and not yet polled
  std::size_t depth = 0;
  int sges = 0;
  std::size_t users = 0;
};

struct Send {
  std::uint64_t id = 0;
  std::uint64_t sequence = 0;
  ibv_wr_opcode opcode = IBV_WR_SEND;
  bool signaled = false;
  bool solicited = false;
  std::vector<ibv_sge> sges;
  std::vector<std::byte> own;  // of an inline one
  bool inlined = false;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;
  std::uint32_t rkey = 0;
  std::uint32_t imm = 0;
  // Its way.
  bool begun = false;
  bool lost = false;
  bool faulted = false;  // between processes: the bytes could not be fetched
  std::uint64_t moved = 0;
  unsigned rests = 0;
  unsigned drops = 0;
  unsigned not_ready = 0;
  SteadyTime not_before{};
};

struct Qp {
  ibv_qp base{};
  ibv_qp_cap cap{};
  bool signal_all = false;
  ibv_qp_attr attr{};
  std::deque<Send> sends;
  std::deque<Recv> recvs;
  std::uint64_t posted = 0;  // sequence of the last send
  std::uint64_t freed = 0;
  std::size_t recvs_used = 0;
  unsigned busy = 0;
  unsigned wanted = 0;  // by those who wait until it is not busy: nothing new begins
  unsigned async_unacked = 0;
  bool holding = false;  // completions of sends, in `held`
  std::deque<Completion> held;
  // Between processes: sockets, see wire.cpp.
  std::uint64_t listener = 0;
  std::uint64_t out = 0;
  std::uint64_t awaited = 0;  // sequence that an answer is awaited for
};

enum class Outcome : std::uint8_t {
  done,
  partly,     // torn: the rest moves later
  dropped,    // nobody there, or not in a state to answer
  not_ready,  // no receive is posted
  access,     // refused: key, bounds, rights
  invalid,    // refused: the request
  under_way,  // in another process
};

// One piece of memory.
struct Piece {
  std::byte* at = nullptr;
  std::uint64_t bytes = 0;
};
using Pieces = std::vector<Piece>;

struct Nic {
  std::mutex mutex;
  std::condition_variable idle;
  Device device[devices];
  std::map<std::uint32_t, Mr*> regions;  // by key
  std::map<std::uint32_t, Qp*> qps;      // by number
  std::vector<Context*> contexts;
  std::size_t objects = 0;
  std::uint32_t next_key = 0;
  std::uint32_t next_qpn = 0;

  bool deterministic = false;
  Rng rng{1};
  std::thread thread;
  bool stopping = false;
  int doorbell = -1;  // of the thread

  std::uint64_t begun = 0;
  std::uint64_t bytes = 0;
  std::optional<std::uint64_t> fail_at;
  ibv_wc_status fail_with = IBV_WC_GENERAL_ERR;
  std::optional<std::uint64_t> lose_at;
  std::optional<std::uint64_t> hold_at;
  std::optional<std::size_t> flip_min;
  double delay = 0;
  bool tear = false;
};

Nic& nic();
using Lock = std::unique_lock<std::mutex>;

template <class T, class Base>
T* object(Base* base) {
  return reinterpret_cast<T*>(base);
}
inline Context* context_of(ibv_context* context) {
  return object<Context>(reinterpret_cast<verbs_context*>(reinterpret_cast<std::byte*>(context) -
                                                          offsetof(verbs_context, context)));
}

// engine.cpp.
void push_completion(Cq& cq, Completion&& completion, bool solicited);
void push_event(Context& context, const ibv_async_event& event);
void to_error(Qp& qp);
void forget_completions(Cq& cq, const Qp& qp);
void begin_send(Qp& qp);
// What became of the send at the front.
void end_send(Qp& qp, ibv_wc_status status);
void settle_send(Qp& qp, Outcome outcome);
// The memory of a scatter list; nothing when a key or a bound is wrong.
std::optional<Pieces> local_pieces(const Qp& qp, const std::vector<ibv_sge>& sges, bool to_write);
std::optional<Pieces> remote_piece(const Qp& qp, std::uint32_t rkey, std::uint64_t address,
                                   std::uint64_t bytes, unsigned access);
// What the other side of a send is told, and what it checks before a byte moves; done when it may.
struct Asking {
  std::uint32_t qpn = 0;
  std::uint32_t psn = 0;
  std::uint32_t mtu = 0;
  std::uint32_t reads_max = 0;  // max_rd_atomic
  ibv_wr_opcode opcode = IBV_WR_SEND;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;
  std::uint32_t rkey = 0;
};
Asking asking_of(const Qp& qp, const Send& send);
Outcome admit(const Qp& target, const Asking& asking);
bool is_write(ibv_wr_opcode opcode);
bool is_send(ibv_wr_opcode opcode);
bool takes_receive(ibv_wr_opcode opcode);
std::optional<Recv> take_receive(Qp& qp);
void give_back_receive(Qp& qp, Recv&& receive);
// The completion of a receive; false when the message was too long for it, which ends the queue pair.
void deliver(Qp& qp, const Recv& receive, ibv_wr_opcode opcode, std::uint64_t bytes, std::uint32_t imm,
             bool solicited);
void too_long(Qp& qp, const Recv& receive);
void refuse_access(Qp& qp);
bool flips(std::uint64_t bytes);
void flip_bit(const Pieces& pieces, std::uint64_t at);  // of the byte at that offset
void copy_pieces(const Pieces& to, const Pieces& from, std::uint64_t skip, std::uint64_t bytes);
// Holds what a copy uses, with the lock open.
class Copying {
 public:
  Copying(Lock& lock, std::vector<Qp*> qps, std::vector<Mr*> regions);
  ~Copying();
  Copying(const Copying&) = delete;
  Copying& operator=(const Copying&) = delete;

 private:
  Lock& lock_;
  std::vector<Qp*> qps_;
  std::vector<Mr*> regions_;
};
std::vector<Mr*> regions_of(const std::vector<ibv_sge>& sges);
bool advance(Lock& lock, Qp& qp);
void start_thread(Lock& lock);
void stop_thread(Lock& lock);
void ring(Nic& nic);

// wire.cpp.
void wire_open(Qp& qp);
void wire_close(Qp& qp);
// The send at the front, to a queue pair of another process.
Outcome wire_send(Lock& lock, Qp& qp);
// The loop of the thread.
void wire_start();
void wire_stop();
void wire_wait(Lock& lock, int timeout_ms);

}  // namespace di::softverbs
