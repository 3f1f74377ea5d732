#include "transfer/verbs.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/assert.h"
#include "base/crypto.h"

namespace di::transfer {

namespace {

// Transport timer of 4.096 us * 2^14 = 67 ms, seven times: a peer that does not answer ends its queue pair
// after half a second, which a switch that reroutes does not take.
constexpr std::uint8_t timeout_exponent = 14;
constexpr std::uint8_t retries = 7;
// Receives are counted out by the fabric, so the other side never finds none; should it, it tries for ever.
constexpr std::uint8_t not_ready_retries = 7;
constexpr std::uint8_t not_ready_timer = 12;  // 0.64 ms
constexpr std::uint8_t hops_max = 64;
constexpr int reads_max = 16;

Error verbs_error(const std::string& what, int os_errno) {
  if (os_errno == ENOMEM)
    return Error{Code::no_space, ENOMEM, what + ": no memory, or above the limit of locked memory"};
  return errno_error(what, os_errno);
}

// Non-blocking: the loop waits for us.
Status set_nonblocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) return errno_error("verbs: descriptor");
  return {};
}

struct CloseContext {
  void operator()(ibv_context* context) const { ::ibv_close_device(context); }
};
struct FreeDomain {
  void operator()(ibv_pd* domain) const { ::ibv_dealloc_pd(domain); }
};
struct Deregister {
  void operator()(ibv_mr* region) const { ::ibv_dereg_mr(region); }
};
struct DestroyChannel {
  void operator()(ibv_comp_channel* channel) const { ::ibv_destroy_comp_channel(channel); }
};
struct DestroyQueue {
  void operator()(ibv_cq* queue) const { ::ibv_destroy_cq(queue); }
};
struct DestroyQueuePair {
  void operator()(ibv_qp* qp) const { ::ibv_destroy_qp(qp); }
};

using Context = std::unique_ptr<ibv_context, CloseContext>;

Error no_device() {
  return Error{Code::not_found, 0, "verbs: this machine has no RDMA device"};
}

// The device of that name; when it is empty, the first with an active port.
Result<Context> open_context(const VerbsPort& wanted) {
  int count = 0;
  ibv_device** list = ::ibv_get_device_list(&count);
  // A kernel without RDMA.
  if (list == nullptr && errno == ENOSYS) return no_device();
  if (list == nullptr) return verbs_error("verbs: list of devices", errno);
  Context found;
  std::string named = "none";
  for (int i = 0; i < count && !found; ++i) {
    const std::string name = ::ibv_get_device_name(list[i]);
    if (!wanted.device.empty() && name != wanted.device) {
      named = named == "none" ? name : named + " " + name;
      continue;
    }
    Context context(::ibv_open_device(list[i]));
    if (!context) continue;
    ibv_port_attr attr{};
    const bool active =
        ibv_query_port(context.get(), wanted.port, &attr) == 0 && attr.state == IBV_PORT_ACTIVE;
    if (active || !wanted.device.empty()) found = std::move(context);
  }
  ::ibv_free_device_list(list);
  if (found) return found;
  if (count == 0) return no_device();
  if (wanted.device.empty()) return Error{Code::not_found, 0, "verbs: no device has an active port"};
  return Error{Code::not_found, 0, "verbs: no device " + wanted.device + "; there are: " + named};
}

}  // namespace

// ---- rail

struct VerbsRail::State {
  Context context;
  std::unique_ptr<ibv_pd, FreeDomain> domain;
  std::unique_ptr<ibv_comp_channel, DestroyChannel> channel;
  std::vector<std::unique_ptr<ibv_mr, Deregister>> regions;
  VerbsPort port;
  ibv_device_attr device{};
};

VerbsRail::VerbsRail(std::unique_ptr<State> state) : state_(std::move(state)) {}
VerbsRail::~VerbsRail() = default;

Result<std::unique_ptr<VerbsRail>> VerbsRail::open(const VerbsPort& port) {
  auto state = std::make_unique<State>();
  Result<Context> context = open_context(port);
  if (!context) return context.error();
  state->context = *std::move(context);
  ibv_context* device = state->context.get();
  state->port = port;
  state->port.device = ::ibv_get_device_name(device->device);
  const std::string name = "verbs: " + state->port.device + "/" + std::to_string(port.port);
  ibv_port_attr attr{};
  if (const int failed = ibv_query_port(device, port.port, &attr); failed != 0) {
    return Error{Code::not_found, failed, name + ": no such port"};
  }
  if (const int failed = ::ibv_query_device(device, &state->device); failed != 0)
    return verbs_error(name, failed);
  // One that is down may have none for the time being.
  ibv_gid gid{};
  if (attr.state == IBV_PORT_ACTIVE && ::ibv_query_gid(device, port.port, port.gid_index, &gid) != 0) {
    return Error{Code::not_found, errno, name + ": no GID with index " + std::to_string(port.gid_index)};
  }
  state->domain.reset(::ibv_alloc_pd(device));
  if (!state->domain) return verbs_error(name + ": protection domain", errno);
  state->channel.reset(::ibv_create_comp_channel(device));
  if (!state->channel) return verbs_error(name + ": completion channel", errno);
  DI_TRY(set_nonblocking(state->channel->fd));
  DI_TRY(set_nonblocking(device->async_fd));
  return std::unique_ptr<VerbsRail>(new VerbsRail(std::move(state)));
}

std::string VerbsRail::name() const {
  return state_->port.device + "/" + std::to_string(state_->port.port);
}

bool VerbsRail::active() const {
  ibv_port_attr attr{};
  return ibv_query_port(state_->context.get(), state_->port.port, &attr) == 0 &&
         attr.state == IBV_PORT_ACTIVE;
}

Result<VerbsKeys> VerbsRail::add_memory(MutableByteView bytes, int dmabuf, std::uint64_t dmabuf_offset) {
  DI_ASSERT(!bytes.empty() && bytes.size() <= verbs_region_bytes_max);
  const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  std::unique_ptr<ibv_mr, Deregister> region;
  if (dmabuf >= 0) {
    region.reset(::ibv_reg_dmabuf_mr(state_->domain.get(), dmabuf_offset, bytes.size(),
                                     reinterpret_cast<std::uint64_t>(bytes.data()), dmabuf, access));
    if (!region && errno == EOPNOTSUPP) {
      return Error{Code::unsupported, EOPNOTSUPP, "verbs: " + name() + " takes no dmabuf"};
    }
  } else {
    region.reset(ibv_reg_mr(state_->domain.get(), bytes.data(), bytes.size(), access));
  }
  if (!region)
    return verbs_error("verbs: register " + std::to_string(bytes.size()) + " bytes at " + name(), errno);
  const VerbsKeys keys{region->lkey, region->rkey};
  state_->regions.push_back(std::move(region));
  return keys;
}

int VerbsRail::fd() const {
  return state_->channel->fd;
}

std::optional<std::uint64_t> VerbsRail::next_ready() {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  if (::ibv_get_cq_event(state_->channel.get(), &queue, &context) != 0) return std::nullopt;
  ::ibv_ack_cq_events(queue, 1);
  // First armed, then polled by the caller: what comes in between raises another event.
  [[maybe_unused]] const int armed = ::ibv_req_notify_cq(queue, 0);
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(context));
}

int VerbsRail::event_fd() const {
  return state_->context->async_fd;
}

std::optional<VerbsEvent> VerbsRail::next_event() {
  ibv_async_event event{};
  if (::ibv_get_async_event(state_->context.get(), &event) != 0) return std::nullopt;
  VerbsEvent told;
  told.what = ::ibv_event_type_str(event.event_type);
  // The device tells of its other ports as well.
  const auto own_port = [&] { return event.element.port_num == state_->port.port; };
  const auto id_of = [](const void* context) {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(context));
  };
  switch (event.event_type) {
    case IBV_EVENT_PORT_ERR:
      if (own_port()) told.kind = VerbsEvent::Kind::port_down;
      break;
    case IBV_EVENT_PORT_ACTIVE:
      if (own_port()) told.kind = VerbsEvent::Kind::port_up;
      break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
      told.kind = VerbsEvent::Kind::queue_pair;
      told.id = id_of(event.element.qp->qp_context);
      break;
    case IBV_EVENT_CQ_ERR:
      told.kind = VerbsEvent::Kind::queue_pair;
      told.id = id_of(event.element.cq->cq_context);
      break;
    case IBV_EVENT_DEVICE_FATAL:
      told.kind = VerbsEvent::Kind::device;
      break;
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
    case IBV_EVENT_CLIENT_REREGISTER:
    case IBV_EVENT_GID_CHANGE:
    case IBV_EVENT_WQ_FATAL:
      break;
  }
  ::ibv_ack_async_event(&event);
  return told;
}

// ---- queue pair

struct VerbsQueuePair::State {
  VerbsRail* rail = nullptr;
  std::unique_ptr<ibv_cq, DestroyQueue> queue;
  std::unique_ptr<ibv_qp, DestroyQueuePair> qp;  // after the queue: destroyed before it
  VerbsAddress address;
  unsigned access = 0;
  int init_reads_max = 0;
};

VerbsQueuePair::VerbsQueuePair(std::unique_ptr<State> state) : state_(std::move(state)) {}
VerbsQueuePair::~VerbsQueuePair() = default;

Result<std::unique_ptr<VerbsQueuePair>> VerbsQueuePair::make(VerbsRail& rail, const Options& options) {
  auto state = std::make_unique<State>();
  state->rail = &rail;
  const VerbsRail::State& device = *rail.state_;
  const auto depth = static_cast<int>(options.sends_max + options.receives_max);
  state->queue.reset(::ibv_create_cq(device.context.get(), depth, reinterpret_cast<void*>(options.id),
                                     device.channel.get(), 0));
  if (!state->queue) return verbs_error("verbs: completion queue", errno);
  if (const int failed = ::ibv_req_notify_cq(state->queue.get(), 0); failed != 0) {
    return verbs_error("verbs: completion queue", failed);
  }
  ibv_port_attr port{};
  if (const int failed = ibv_query_port(device.context.get(), device.port.port, &port); failed != 0) {
    return verbs_error("verbs: " + rail.name(), failed);
  }
  ibv_gid gid{};
  if (::ibv_query_gid(device.context.get(), device.port.port, device.port.gid_index, &gid) != 0) {
    return Error{Code::not_found, errno,
                 "verbs: " + rail.name() + ": no GID with index " + std::to_string(device.port.gid_index)};
  }
  ibv_qp_init_attr init{};
  init.qp_context = reinterpret_cast<void*>(options.id);
  init.send_cq = state->queue.get();
  init.recv_cq = state->queue.get();
  init.cap.max_send_wr = options.sends_max;
  init.cap.max_recv_wr = options.receives_max;
  init.cap.max_send_sge = 2;
  init.cap.max_recv_sge = 1;
  init.cap.max_inline_data = verbs_inline_bytes;
  init.qp_type = IBV_QPT_RC;
  init.sq_sig_all = 1;
  state->qp.reset(::ibv_create_qp(device.domain.get(), &init));
  if (!state->qp) return verbs_error("verbs: queue pair", errno);
  state->access =
      options.open_to_peer ? IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE : 0;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.pkey_index = 0;
  attr.port_num = device.port.port;
  attr.qp_access_flags = state->access;
  if (const int failed = ::ibv_modify_qp(
          state->qp.get(), &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
      failed != 0) {
    return verbs_error("verbs: queue pair to INIT", failed);
  }
  std::array<std::byte, 4> random{};
  random_bytes(random);
  VerbsAddress& own = state->address;
  own.qpn = state->qp->qp_num;
  own.psn = get_le<std::uint32_t>(random.data()) & 0xffffff;
  own.lid = port.lid;
  own.mtu = static_cast<std::uint8_t>(port.active_mtu);
  own.reads_max = static_cast<std::uint8_t>(std::clamp(device.device.max_qp_rd_atom, 0, reads_max));
  own.global = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  std::memcpy(own.gid.data(), gid.raw, own.gid.size());
  state->init_reads_max = std::clamp(device.device.max_qp_init_rd_atom, 0, reads_max);
  return std::unique_ptr<VerbsQueuePair>(new VerbsQueuePair(std::move(state)));
}

const VerbsAddress& VerbsQueuePair::address() const {
  return state_->address;
}

Status VerbsQueuePair::connect(const VerbsAddress& other) {
  const VerbsRail::State& device = *state_->rail->state_;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = static_cast<ibv_mtu>(std::min(state_->address.mtu, other.mtu));
  attr.dest_qp_num = other.qpn;
  attr.rq_psn = other.psn;
  attr.max_dest_rd_atomic = state_->address.reads_max;
  attr.min_rnr_timer = not_ready_timer;
  attr.ah_attr.dlid = other.lid;
  attr.ah_attr.port_num = device.port.port;
  if (other.global) {
    attr.ah_attr.is_global = 1;
    std::memcpy(attr.ah_attr.grh.dgid.raw, other.gid.data(), other.gid.size());
    attr.ah_attr.grh.sgid_index = device.port.gid_index;
    attr.ah_attr.grh.hop_limit = hops_max;
  }
  if (const int failed =
          ::ibv_modify_qp(state_->qp.get(), &attr,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
      failed != 0) {
    return verbs_error("verbs: queue pair to RTR", failed);
  }
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = state_->address.psn;
  attr.timeout = timeout_exponent;
  attr.retry_cnt = retries;
  attr.rnr_retry = not_ready_retries;
  attr.max_rd_atomic = static_cast<std::uint8_t>(std::min<int>(state_->init_reads_max, other.reads_max));
  if (const int failed = ::ibv_modify_qp(state_->qp.get(), &attr,
                                         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                             IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
      failed != 0) {
    return verbs_error("verbs: queue pair to RTS", failed);
  }
  return {};
}

namespace {

constexpr std::size_t pieces_max = 2;

using Sges = std::array<ibv_sge, pieces_max>;

Sges sges_of(std::span<const VerbsPiece> pieces) {
  DI_ASSERT(pieces.size() <= pieces_max);
  Sges sges{};
  std::transform(pieces.begin(), pieces.end(), sges.begin(), [](const VerbsPiece& piece) {
    return ibv_sge{reinterpret_cast<std::uint64_t>(piece.at), piece.bytes, piece.local_key};
  });
  return sges;
}

Status post(ibv_qp* qp, ibv_send_wr& wr) {
  ibv_send_wr* bad = nullptr;
  const int failed = ::ibv_post_send(qp, &wr, &bad);
  if (failed != 0) return errno_error("verbs: post", failed);
  return {};
}

}  // namespace

Status VerbsQueuePair::receive(std::uint64_t id, const VerbsPiece& into) {
  Sges sges = sges_of({&into, 1});
  ibv_recv_wr wr{};
  wr.wr_id = id;
  wr.sg_list = sges.data();
  wr.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  const int failed = ::ibv_post_recv(state_->qp.get(), &wr, &bad);
  if (failed != 0) return errno_error("verbs: post", failed);
  return {};
}

Status VerbsQueuePair::send(std::uint64_t id, ByteView message) {
  DI_ASSERT(message.size() <= verbs_inline_bytes);
  ibv_sge sge{reinterpret_cast<std::uint64_t>(message.data()), static_cast<std::uint32_t>(message.size()), 0};
  ibv_send_wr wr{};
  wr.wr_id = id;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
  return post(state_->qp.get(), wr);
}

Status VerbsQueuePair::read(std::uint64_t id, std::span<const VerbsPiece> into, std::uint64_t address,
                            std::uint32_t remote_key) {
  Sges sges = sges_of(into);
  ibv_send_wr wr{};
  wr.wr_id = id;
  wr.sg_list = sges.data();
  wr.num_sge = static_cast<int>(into.size());
  wr.opcode = IBV_WR_RDMA_READ;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.wr.rdma.remote_addr = address;
  wr.wr.rdma.rkey = remote_key;
  return post(state_->qp.get(), wr);
}

Status VerbsQueuePair::write_imm(std::uint64_t id, std::span<const VerbsPiece> from, std::uint64_t address,
                                 std::uint32_t remote_key, std::uint32_t imm) {
  Sges sges = sges_of(from);
  ibv_send_wr wr{};
  wr.wr_id = id;
  wr.sg_list = sges.data();
  wr.num_sge = static_cast<int>(from.size());
  wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.imm_data = htonl(imm);
  wr.wr.rdma.remote_addr = address;
  wr.wr.rdma.rkey = remote_key;
  return post(state_->qp.get(), wr);
}

Result<std::size_t> VerbsQueuePair::poll(std::span<VerbsCompletion> completions) {
  constexpr std::size_t batch = 32;
  std::array<ibv_wc, batch> found;
  const int got =
      ::ibv_poll_cq(state_->queue.get(), static_cast<int>(std::min(batch, completions.size())), found.data());
  if (got < 0) return Error{Code::io, 0, "verbs: the completion queue is lost"};
  for (std::size_t i = 0; i < static_cast<std::size_t>(got); ++i) {
    const ibv_wc& wc = found[i];
    VerbsCompletion& told = completions[i];
    told = {};
    told.id = wc.wr_id;
    told.ok = wc.status == IBV_WC_SUCCESS;
    if (!told.ok) {
      // Of a failed one nothing else is defined.
      told.why = ::ibv_wc_status_str(wc.status);
      continue;
    }
    told.receive = (wc.opcode & IBV_WC_RECV) != 0;
    told.bytes = wc.byte_len;
    if ((wc.wc_flags & IBV_WC_WITH_IMM) != 0) told.imm = ntohl(wc.imm_data);
  }
  return static_cast<std::size_t>(got);
}

}  // namespace di::transfer
