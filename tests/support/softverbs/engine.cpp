#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/assert.h"
#include "tests/support/softverbs/model.h"
#include "tests/support/softverbs/softverbs.h"

namespace di::softverbs {

namespace {

constexpr unsigned rests_max = 8;
constexpr std::chrono::milliseconds not_ready_pause(1);
constexpr std::chrono::milliseconds drop_pause_max(100);
constexpr unsigned retry_for_ever = 7;

// Half of it, for a torn one.
std::uint64_t first_part(std::uint64_t bytes) {
  return bytes / 2;
}

std::uint64_t total(const Pieces& pieces) {
  std::uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

SteadyTime after(std::chrono::nanoseconds pause) {
  // Deterministic: time stands still, so what waits goes on in the next step.
  return nic().deterministic ? SteadyTime() : std::chrono::steady_clock::now() + pause;
}

std::chrono::nanoseconds drop_pause(const Qp& qp) {
  const std::chrono::nanoseconds timer(4096ll << qp.attr.timeout);
  return std::min<std::chrono::nanoseconds>(timer, drop_pause_max);
}

}  // namespace

Nic& nic() {
  static Nic* const made = [] {
    auto* fresh = new Nic;
    std::uint32_t start = 0;
    DI_ASSERT(::getentropy(&start, sizeof start) == 0);
    // Keys and numbers of two processes are different ones, so that a mixed up one is found.
    fresh->next_key = (start & 0xffff) << 12 | 0x100;
    fresh->next_qpn = (start >> 8 & 0x7fffff) | 0x800000;
    for (std::size_t i = 0; i < devices; ++i) {
      ibv_device& device = fresh->device[i].base;
      device.node_type = IBV_NODE_CA;
      device.transport_type = IBV_TRANSPORT_IB;
      const std::string name = "softverbs" + std::to_string(i);
      std::copy(name.begin(), name.end(), device.name);
      std::copy(name.begin(), name.end(), device.dev_name);
      fresh->device[i].gid_last = static_cast<std::uint8_t>(i + 1);
    }
    return fresh;
  }();
  return *made;
}

bool is_write(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}
bool is_send(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM;
}
bool takes_receive(ibv_wr_opcode opcode) {
  return is_send(opcode) || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

// ---- completions and events

void push_event(Context& context, const ibv_async_event& event) {
  context.events.push_back(event);
  const std::uint64_t one = 1;
  DI_ASSERT(::write(context.verbs.context.async_fd, &one, sizeof one) == sizeof one);
}

void push_completion(Cq& cq, Completion&& completion, bool solicited) {
  if (cq.overrun) return;
  if (cq.entries.size() >= static_cast<std::size_t>(cq.base.cqe)) {
    cq.overrun = true;
    ibv_async_event event{};
    event.event_type = IBV_EVENT_CQ_ERR;
    event.element.cq = &cq.base;
    push_event(*context_of(cq.base.context), event);
    return;
  }
  const bool failed = completion.wc.status != IBV_WC_SUCCESS;
  cq.entries.push_back(std::move(completion));
  if (!cq.armed || (cq.solicited_only && !solicited && !failed)) return;
  cq.armed = false;
  if (cq.base.channel == nullptr) return;
  auto* channel = object<Channel>(cq.base.channel);
  channel->events.push_back(&cq);
  ++cq.unacked;
  const std::uint64_t one = 1;
  DI_ASSERT(::write(channel->base.fd, &one, sizeof one) == sizeof one);
}

void forget_completions(Cq& cq, const Qp& qp) {
  std::erase_if(cq.entries, [&](const Completion& each) { return each.qp == &qp; });
}

// ---- the ends of requests

namespace {

void complete_send(Qp& qp, const Send& send, ibv_wc_status status) {
  if (status == IBV_WC_SUCCESS && (!(send.signaled || qp.signal_all) || send.lost)) return;
  Completion completion;
  completion.qp = &qp;
  completion.send = true;
  completion.sequence = send.sequence;
  ibv_wc& wc = completion.wc;
  wc.wr_id = send.id;
  wc.status = status;
  wc.qp_num = qp.base.qp_num;
  wc.byte_len = static_cast<std::uint32_t>(send.bytes);
  wc.opcode = send.opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ
              : is_write(send.opcode)         ? IBV_WC_RDMA_WRITE
                                              : IBV_WC_SEND;
  if (qp.holding) {
    qp.held.push_back(std::move(completion));
    return;
  }
  push_completion(*object<Cq>(qp.base.send_cq), std::move(completion), false);
}

void let_all_go() {
  for (const auto& [number, qp] : nic().qps) {
    qp->holding = false;
    for (; !qp->held.empty(); qp->held.pop_front()) {
      push_completion(*object<Cq>(qp->base.send_cq), std::move(qp->held.front()), false);
    }
  }
}

void complete_receive(Qp& qp, std::uint64_t id, ibv_wc_status status, ibv_wc_opcode opcode,
                      std::uint64_t bytes, std::optional<std::uint32_t> imm, bool solicited) {
  Completion completion;
  completion.qp = &qp;
  completion.srq = object<Srq>(qp.base.srq);
  ibv_wc& wc = completion.wc;
  wc.wr_id = id;
  wc.status = status;
  wc.opcode = opcode;
  wc.qp_num = qp.base.qp_num;
  wc.src_qp = qp.attr.dest_qp_num;
  wc.byte_len = static_cast<std::uint32_t>(bytes);
  if (imm) {
    wc.wc_flags = IBV_WC_WITH_IMM;
    wc.imm_data = *imm;
  }
  push_completion(*object<Cq>(qp.base.recv_cq), std::move(completion), solicited);
}

}  // namespace

void to_error(Qp& qp) {
  qp.base.state = IBV_QPS_ERR;
  qp.awaited = 0;
  while (!qp.sends.empty()) {
    const Send send = std::move(qp.sends.front());
    qp.sends.pop_front();
    complete_send(qp, send, IBV_WC_WR_FLUSH_ERR);
  }
  while (!qp.recvs.empty()) {
    const std::uint64_t id = qp.recvs.front().id;
    qp.recvs.pop_front();
    complete_receive(qp, id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0, {}, false);
  }
}

void end_send(Qp& qp, ibv_wc_status status) {
  const Send send = std::move(qp.sends.front());
  qp.sends.pop_front();
  qp.awaited = 0;
  complete_send(qp, send, status);
  if (status != IBV_WC_SUCCESS) to_error(qp);
}

void settle_send(Qp& qp, Outcome outcome) {
  Send& send = qp.sends.front();
  switch (outcome) {
    case Outcome::done:
      end_send(qp, IBV_WC_SUCCESS);
      return;
    case Outcome::partly:
    case Outcome::under_way:
      return;
    case Outcome::dropped:
      qp.awaited = 0;
      if (++send.drops > qp.attr.retry_cnt) {
        end_send(qp, IBV_WC_RETRY_EXC_ERR);
        return;
      }
      send.not_before = after(drop_pause(qp));
      return;
    case Outcome::not_ready:
      qp.awaited = 0;
      if (qp.attr.rnr_retry != retry_for_ever && ++send.not_ready > qp.attr.rnr_retry) {
        end_send(qp, IBV_WC_RNR_RETRY_EXC_ERR);
        return;
      }
      send.not_before = after(not_ready_pause);
      return;
    case Outcome::access:
      end_send(qp, IBV_WC_REM_ACCESS_ERR);
      return;
    case Outcome::invalid:
      end_send(qp, IBV_WC_REM_INV_REQ_ERR);
      return;
  }
}

// ---- receives

std::optional<Recv> take_receive(Qp& qp) {
  auto& queue = qp.base.srq == nullptr ? qp.recvs : object<Srq>(qp.base.srq)->queue;
  if (queue.empty()) return std::nullopt;
  Recv receive = std::move(queue.front());
  queue.pop_front();
  return receive;
}

void give_back_receive(Qp& qp, Recv&& receive) {
  auto& queue = qp.base.srq == nullptr ? qp.recvs : object<Srq>(qp.base.srq)->queue;
  queue.push_front(std::move(receive));
}

void deliver(Qp& qp, const Recv& receive, ibv_wr_opcode opcode, std::uint64_t bytes, std::uint32_t imm,
             bool solicited) {
  const bool with_imm = opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  complete_receive(qp, receive.id, IBV_WC_SUCCESS,
                   opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV, bytes,
                   with_imm ? std::optional(imm) : std::nullopt, solicited);
}

void too_long(Qp& qp, const Recv& receive) {
  complete_receive(qp, receive.id, IBV_WC_LOC_LEN_ERR, IBV_WC_RECV, 0, {}, false);
  to_error(qp);
}

void refuse_access(Qp& qp) {
  ibv_async_event event{};
  event.event_type = IBV_EVENT_QP_ACCESS_ERR;
  event.element.qp = &qp.base;
  push_event(*context_of(qp.base.context), event);
  to_error(qp);
}

// ---- checks

std::optional<Pieces> local_pieces(const Qp& qp, const std::vector<ibv_sge>& sges, bool to_write) {
  Pieces pieces;
  for (const ibv_sge& sge : sges) {
    if (sge.length == 0) continue;
    const auto at = nic().regions.find(sge.lkey);
    if (at == nic().regions.end() || at->second->base.pd != qp.base.pd) return std::nullopt;
    const Mr& region = *at->second;
    const auto begin = reinterpret_cast<std::uint64_t>(region.base.addr);
    if (sge.addr < begin || sge.length > region.base.length ||
        sge.addr - begin > region.base.length - sge.length) {
      return std::nullopt;
    }
    if (to_write && (region.access & IBV_ACCESS_LOCAL_WRITE) == 0) return std::nullopt;
    pieces.push_back({reinterpret_cast<std::byte*>(sge.addr), sge.length});
  }
  return pieces;
}

std::optional<Pieces> remote_piece(const Qp& qp, std::uint32_t rkey, std::uint64_t address,
                                   std::uint64_t bytes, unsigned access) {
  if (bytes == 0) return Pieces();
  const auto at = nic().regions.find(rkey);
  if (at == nic().regions.end() || at->second->base.pd != qp.base.pd) return std::nullopt;
  const Mr& region = *at->second;
  const auto begin = reinterpret_cast<std::uint64_t>(region.base.addr);
  if ((region.access & access) == 0 || address < begin || bytes > region.base.length ||
      address - begin > region.base.length - bytes) {
    return std::nullopt;
  }
  return Pieces{{reinterpret_cast<std::byte*>(address), bytes}};
}

Asking asking_of(const Qp& qp, const Send& send) {
  return {qp.base.qp_num,        qp.attr.sq_psn, static_cast<std::uint32_t>(qp.attr.path_mtu),
          qp.attr.max_rd_atomic, send.opcode,    send.bytes,
          send.address,          send.rkey};
}

namespace {

bool port_passes(const Qp& qp) {
  const Device& device = *context_of(qp.base.context)->device;
  return device.up && device.path;
}

}  // namespace

Outcome admit(const Qp& target, const Asking& asking) {
  if (!port_passes(target)) return Outcome::dropped;
  const bool answers = target.base.state == IBV_QPS_RTR || target.base.state == IBV_QPS_RTS;
  if (!answers || target.attr.dest_qp_num != asking.qpn || target.attr.rq_psn != asking.psn)
    return Outcome::dropped;
  if (asking.mtu > static_cast<std::uint32_t>(target.attr.path_mtu)) return Outcome::invalid;
  const unsigned rights = target.attr.qp_access_flags;
  if (asking.opcode == IBV_WR_RDMA_READ) {
    if ((rights & IBV_ACCESS_REMOTE_READ) == 0) return Outcome::invalid;
    // The other side of a real one would queue only that many.
    if (target.attr.max_dest_rd_atomic < asking.reads_max) return Outcome::invalid;
    return remote_piece(target, asking.rkey, asking.address, asking.bytes, IBV_ACCESS_REMOTE_READ)
               ? Outcome::done
               : Outcome::access;
  }
  if (is_write(asking.opcode)) {
    if ((rights & IBV_ACCESS_REMOTE_WRITE) == 0) return Outcome::invalid;
    return remote_piece(target, asking.rkey, asking.address, asking.bytes, IBV_ACCESS_REMOTE_WRITE)
               ? Outcome::done
               : Outcome::access;
  }
  return Outcome::done;
}

// ---- copies

Copying::Copying(Lock& lock, std::vector<Qp*> qps, std::vector<Mr*> regions)
    : lock_(lock), qps_(std::move(qps)), regions_(std::move(regions)) {
  for (Qp* qp : qps_) ++qp->busy;
  for (Mr* region : regions_) ++region->users;
  lock_.unlock();
}

Copying::~Copying() {
  lock_.lock();
  for (Qp* qp : qps_) --qp->busy;
  for (Mr* region : regions_) --region->users;
  nic().idle.notify_all();
}

std::vector<Mr*> regions_of(const std::vector<ibv_sge>& sges) {
  std::vector<Mr*> regions;
  for (const ibv_sge& sge : sges) {
    if (const auto at = nic().regions.find(sge.lkey); at != nic().regions.end())
      regions.push_back(at->second);
  }
  return regions;
}

void copy_pieces(const Pieces& to, const Pieces& from, std::uint64_t skip, std::uint64_t bytes) {
  std::size_t t = 0;
  std::size_t f = 0;
  std::uint64_t at_to = skip;
  std::uint64_t at_from = skip;
  while (bytes > 0) {
    while (at_to >= to[t].bytes) at_to -= to[t++].bytes;
    while (at_from >= from[f].bytes) at_from -= from[f++].bytes;
    const std::uint64_t part = std::min({bytes, to[t].bytes - at_to, from[f].bytes - at_from});
    std::memmove(to[t].at + at_to, from[f].at + at_from, part);
    at_to += part;
    at_from += part;
    bytes -= part;
  }
}

void flip_bit(const Pieces& pieces, std::uint64_t at) {
  for (const Piece& piece : pieces) {
    if (at < piece.bytes) {
      piece.at[at] ^= std::byte{1};
      return;
    }
    at -= piece.bytes;
  }
}

bool flips(std::uint64_t bytes) {
  Nic& n = nic();
  if (!n.flip_min || bytes < *n.flip_min) return false;
  n.flip_min.reset();
  return true;
}

// ---- progress

void begin_send(Qp& qp) {
  Send& send = qp.sends.front();
  if (send.begun) return;
  send.begun = true;
  Nic& n = nic();
  ++n.begun;
  if (n.lose_at == n.begun) {
    n.lose_at.reset();
    send.lost = true;
  }
  if (n.hold_at == n.begun) {
    n.hold_at.reset();
    qp.holding = true;
  }
}

namespace {

Outcome move_here(Lock& lock, Qp& qp, Qp& target) {
  Send& send = qp.sends.front();
  const Outcome admitted = admit(target, asking_of(qp, send));
  if (admitted == Outcome::access || admitted == Outcome::invalid) {
    refuse_access(target);
    return admitted;
  }
  if (admitted != Outcome::done) return admitted;
  std::optional<Recv> receive;
  if (takes_receive(send.opcode)) {
    receive = take_receive(target);
    if (!receive) return Outcome::not_ready;
  }
  const Pieces ours = send.inlined ? Pieces{{send.own.data(), send.own.size()}}
                                   : *local_pieces(qp, send.sges, send.opcode == IBV_WR_RDMA_READ);
  Pieces theirs;
  std::vector<Mr*> regions = regions_of(send.sges);
  if (is_send(send.opcode)) {
    std::optional<Pieces> into = local_pieces(target, receive->sges, true);
    if (!into || total(*into) < send.bytes) {
      too_long(target, *receive);
      return Outcome::invalid;
    }
    theirs = *std::move(into);
    for (Mr* region : regions_of(receive->sges)) regions.push_back(region);
  } else if (send.bytes > 0) {
    theirs = {{reinterpret_cast<std::byte*>(send.address), send.bytes}};
    regions.push_back(nic().regions.at(send.rkey));
  }
  const bool read = send.opcode == IBV_WR_RDMA_READ;
  const bool torn = nic().tear && !is_send(send.opcode) && send.bytes > 2 && send.moved == 0;
  const std::uint64_t skip = send.moved;
  const std::uint64_t bytes = torn ? first_part(send.bytes) : send.bytes - skip;
  const bool flip = flips(bytes);
  {
    const Copying copying(lock, {&qp, &target}, std::move(regions));
    const Pieces& to = read ? ours : theirs;
    copy_pieces(to, read ? theirs : ours, skip, bytes);
    if (flip) flip_bit(to, skip + bytes / 2);
  }
  nic().bytes += bytes;
  send.moved += bytes;
  if (torn) {
    if (receive) give_back_receive(target, *std::move(receive));
    return Outcome::partly;
  }
  if (receive) deliver(target, *receive, send.opcode, send.bytes, send.imm, send.solicited);
  return Outcome::done;
}

}  // namespace

// False when this queue pair can do nothing now.
bool advance(Lock& lock, Qp& qp) {
  if (qp.base.state != IBV_QPS_RTS || qp.sends.empty() || qp.busy + qp.wanted > 0 || qp.awaited != 0)
    return false;
  Nic& n = nic();
  Send& send = qp.sends.front();
  if (send.not_before > std::chrono::steady_clock::now()) return false;
  if (n.deterministic && send.rests < rests_max && n.rng.chance(n.delay)) {
    ++send.rests;
    return true;
  }
  begin_send(qp);
  if (n.fail_at == n.begun) {
    n.fail_at.reset();
    end_send(qp, n.fail_with);
    return true;
  }
  if (!send.inlined && !local_pieces(qp, send.sges, send.opcode == IBV_WR_RDMA_READ)) {
    end_send(qp, IBV_WC_LOC_PROT_ERR);
    return true;
  }
  if (send.opcode == IBV_WR_RDMA_READ && qp.attr.max_rd_atomic == 0) {
    end_send(qp, IBV_WC_LOC_QP_OP_ERR);
    return true;
  }
  if (!port_passes(qp)) {
    settle_send(qp, Outcome::dropped);
    return true;
  }
  const auto target = n.qps.find(qp.attr.dest_qp_num);
  if (target != n.qps.end()) {
    if (target->second->busy + target->second->wanted > 0) return false;
    const Outcome outcome = move_here(lock, qp, *target->second);
    // A queue pair that sends to itself was refused, and is in error, already.
    if (qp.sends.empty()) return true;
    settle_send(qp, outcome);
    return outcome != Outcome::not_ready || qp.attr.rnr_retry != retry_for_ever;
  }
  settle_send(qp, n.deterministic ? Outcome::dropped : wire_send(lock, qp));
  return true;
}

// ---- the thread

void ring(Nic& n) {
  if (n.doorbell < 0) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(n.doorbell, &one, sizeof one);
}

namespace {

void run_thread() {
  Nic& n = nic();
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  Lock lock(n.mutex);
  while (!n.stopping) {
    std::vector<std::uint32_t> numbers;
    bool waits = false;
    for (const auto& [number, qp] : n.qps) {
      if (!qp->sends.empty() && qp->base.state == IBV_QPS_RTS && qp->awaited == 0) numbers.push_back(number);
    }
    bool moved = false;
    for (const std::uint32_t number : numbers) {
      const auto at = n.qps.find(number);
      if (at == n.qps.end()) continue;
      moved = advance(lock, *at->second) || moved;
      waits = true;
    }
    wire_wait(lock, moved ? 0 : waits ? 1 : -1);
  }
}

}  // namespace

void start_thread(Lock&) {
  Nic& n = nic();
  if (n.deterministic || n.thread.joinable()) return;
  n.doorbell = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  DI_ASSERT(n.doorbell >= 0);
  n.stopping = false;
  wire_start();
  n.thread = std::thread(run_thread);
}

void stop_thread(Lock& lock) {
  Nic& n = nic();
  if (!n.thread.joinable()) return;
  n.stopping = true;
  ring(n);
  std::thread thread = std::move(n.thread);
  lock.unlock();
  thread.join();
  lock.lock();
  wire_stop();
  ::close(n.doorbell);
  n.doorbell = -1;
}

// ---- what a test may do

void run_threaded() {
  const Lock lock(nic().mutex);
  DI_ASSERT(nic().contexts.empty());
  nic().deterministic = false;
}

void run_deterministic(std::uint64_t seed) {
  const Lock lock(nic().mutex);
  DI_ASSERT(nic().contexts.empty());
  nic().deterministic = true;
  nic().rng = Rng(seed);
}

bool step() {
  Nic& n = nic();
  Lock lock(n.mutex);
  DI_ASSERT(n.deterministic);
  std::vector<Qp*> ready;
  for (const auto& [number, qp] : n.qps) {
    if (!qp->sends.empty() && qp->base.state == IBV_QPS_RTS) ready.push_back(qp);
  }
  while (!ready.empty()) {
    const std::size_t at = n.rng.below(ready.size());
    if (advance(lock, *ready[at])) return true;
    ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return false;
}

void run_all() {
  while (step()) {
  }
}

void fail_nth(std::uint64_t nth, int wc_status) {
  const Lock lock(nic().mutex);
  nic().fail_at = nic().begun + nth;
  nic().fail_with = static_cast<ibv_wc_status>(wc_status);
}
void lose_completion_nth(std::uint64_t nth) {
  const Lock lock(nic().mutex);
  nic().lose_at = nic().begun + nth;
}
void flip_next(std::size_t bytes_min) {
  const Lock lock(nic().mutex);
  nic().flip_min = bytes_min;
}
void hold_nth(std::uint64_t nth) {
  const Lock lock(nic().mutex);
  nic().hold_at = nic().begun + nth;
}
void let_go() {
  const Lock lock(nic().mutex);
  let_all_go();
}
void set_delay(double chance) {
  const Lock lock(nic().mutex);
  nic().delay = chance;
}
void set_tear(bool tear) {
  const Lock lock(nic().mutex);
  DI_ASSERT(nic().deterministic || !tear);
  nic().tear = tear;
}
void set_port(std::size_t device, bool up) {
  Nic& n = nic();
  const Lock lock(n.mutex);
  DI_ASSERT(device < devices);
  n.device[device].up = up;
  for (Context* context : n.contexts) {
    if (context->device != &n.device[device]) continue;
    ibv_async_event event{};
    event.event_type = up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR;
    event.element.port_num = 1;
    push_event(*context, event);
  }
}
void set_path(std::size_t device, bool whole) {
  const Lock lock(nic().mutex);
  DI_ASSERT(device < devices);
  nic().device[device].path = whole;
}
void set_gid(std::size_t device, std::uint8_t last) {
  const Lock lock(nic().mutex);
  DI_ASSERT(device < devices);
  nic().device[device].gid_last = last;
}
void no_faults() {
  const Lock lock(nic().mutex);
  nic().hold_at.reset();
  let_all_go();
  nic().fail_at.reset();
  nic().lose_at.reset();
  nic().flip_min.reset();
  nic().delay = 0;
  nic().tear = false;
}

Counts counts() {
  const Lock lock(nic().mutex);
  return {nic().begun, nic().bytes, nic().objects};
}

}  // namespace di::softverbs
