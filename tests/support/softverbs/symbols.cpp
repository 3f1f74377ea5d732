// What libibverbs exports, and what it reaches through ibv_context.ops.
#include <endian.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/assert.h"
#include "tests/support/softverbs/model.h"

#undef ibv_query_port
#undef ibv_reg_mr

using namespace di::softverbs;

namespace {

template <class T>
T* fail(int why) {
  errno = why;
  return nullptr;
}

Lock lock_nic() {
  return Lock(nic().mutex);
}

void count_object(ibv_context* context, int by) {
  nic().objects += static_cast<std::size_t>(by);
  context_of(context)->objects += static_cast<std::size_t>(by);
}

int semaphore() {
  return ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
}

// Takes one off; false, with errno, when there is none and the descriptor does not wait.
bool take_one(int fd) {
  std::uint64_t one = 0;
  ssize_t got = 0;
  do {
    got = ::read(fd, &one, sizeof one);
  } while (got < 0 && errno == EINTR);
  return got == sizeof one;
}

ibv_gid gid_of(const Device& device) {
  ibv_gid gid{};
  gid.raw[0] = 0xfe;
  gid.raw[1] = 0x80;
  gid.raw[15] = device.gid_last;
  return gid;
}

bool gid_known(const ibv_gid& gid) {
  return std::any_of(std::begin(nic().device), std::end(nic().device), [&](const Device& device) {
    const ibv_gid own = gid_of(device);
    return std::memcmp(own.raw, gid.raw, sizeof own.raw) == 0;
  });
}

// ---- through ibv_context.ops

std::uint64_t bytes_of(const ibv_sge* sges, int count) {
  std::uint64_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += sges[i].length;
  return bytes;
}

int send_one(Qp& qp, const ibv_send_wr& wr) {
  if (qp.base.state != IBV_QPS_RTS && qp.base.state != IBV_QPS_ERR && qp.base.state != IBV_QPS_SQD)
    return EINVAL;
  if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > qp.cap.max_send_sge) return EINVAL;
  if (qp.posted - qp.freed >= qp.cap.max_send_wr) return ENOMEM;
  const bool known = is_send(wr.opcode) || is_write(wr.opcode) || wr.opcode == IBV_WR_RDMA_READ;
  if (!known) return EINVAL;
  Send send;
  send.id = wr.wr_id;
  send.opcode = wr.opcode;
  send.signaled = (wr.send_flags & IBV_SEND_SIGNALED) != 0;
  send.solicited = (wr.send_flags & IBV_SEND_SOLICITED) != 0;
  send.bytes = bytes_of(wr.sg_list, wr.num_sge);
  if (send.bytes > message_bytes_max) return EINVAL;
  if ((wr.send_flags & IBV_SEND_INLINE) != 0) {
    if (wr.opcode == IBV_WR_RDMA_READ || send.bytes > qp.cap.max_inline_data) return EINVAL;
    send.inlined = true;
    for (int i = 0; i < wr.num_sge; ++i) {
      const auto* at = reinterpret_cast<const std::byte*>(wr.sg_list[i].addr);
      send.own.insert(send.own.end(), at, at + wr.sg_list[i].length);
    }
  } else {
    send.sges.assign(wr.sg_list, wr.sg_list + wr.num_sge);
  }
  if (!is_send(wr.opcode)) {
    send.address = wr.wr.rdma.remote_addr;
    send.rkey = wr.wr.rdma.rkey;
  }
  send.imm = wr.imm_data;
  send.sequence = ++qp.posted;
  qp.sends.push_back(std::move(send));
  if (qp.base.state == IBV_QPS_ERR) to_error(qp);
  return 0;
}

int post_send(ibv_qp* base, ibv_send_wr* wr, ibv_send_wr** bad) {
  const Lock lock = lock_nic();
  auto* qp = object<Qp>(base);
  int failed = 0;
  for (; wr != nullptr && failed == 0; wr = wr->next) {
    failed = send_one(*qp, *wr);
    if (failed != 0) {
      *bad = wr;
      break;
    }
  }
  ring(nic());
  return failed;
}

int receive_one(const ibv_recv_wr& wr, std::deque<Recv>& queue, std::size_t& used, std::size_t depth,
                int sges) {
  if (wr.num_sge < 0 || wr.num_sge > sges) return EINVAL;
  if (used >= depth) return ENOMEM;
  ++used;
  queue.push_back({wr.wr_id, std::vector<ibv_sge>(wr.sg_list, wr.sg_list + wr.num_sge)});
  return 0;
}

int post_recv(ibv_qp* base, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  const Lock lock = lock_nic();
  auto* qp = object<Qp>(base);
  for (; wr != nullptr; wr = wr->next) {
    int failed = qp->base.srq != nullptr || qp->base.state == IBV_QPS_RESET ? EINVAL : 0;
    if (failed == 0) {
      failed = receive_one(*wr, qp->recvs, qp->recvs_used, qp->cap.max_recv_wr,
                           static_cast<int>(qp->cap.max_recv_sge));
    }
    if (failed != 0) {
      *bad = wr;
      return failed;
    }
    if (qp->base.state == IBV_QPS_ERR) to_error(*qp);
  }
  ring(nic());
  return 0;
}

int post_srq_recv(ibv_srq* base, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  const Lock lock = lock_nic();
  auto* srq = object<Srq>(base);
  for (; wr != nullptr; wr = wr->next) {
    if (const int failed = receive_one(*wr, srq->queue, srq->used, srq->depth, srq->sges); failed != 0) {
      *bad = wr;
      return failed;
    }
  }
  ring(nic());
  return 0;
}

int poll_cq(ibv_cq* base, int room, ibv_wc* wc) {
  const Lock lock = lock_nic();
  auto* cq = object<Cq>(base);
  if (cq->overrun) return -1;
  int got = 0;
  while (got < room && !cq->entries.empty()) {
    const Completion& entry = cq->entries.front();
    wc[got++] = entry.wc;
    if (entry.send) {
      entry.qp->freed = entry.sequence;
    } else if (entry.srq != nullptr) {
      --entry.srq->used;
    } else {
      --entry.qp->recvs_used;
    }
    cq->entries.pop_front();
  }
  return got;
}

int req_notify_cq(ibv_cq* base, int solicited_only) {
  const Lock lock = lock_nic();
  auto* cq = object<Cq>(base);
  // What is there already raises no event: that is the caller's to poll for.
  cq->solicited_only = solicited_only != 0 && (!cq->armed || cq->solicited_only);
  cq->armed = true;
  return 0;
}

// ---- states of a queue pair

struct Change {
  ibv_qp_state from;
  ibv_qp_state to;
  int wanted;
  int allowed;
};
constexpr Change changes[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_ALT_PATH},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
};

bool may_change(ibv_qp_state from, ibv_qp_state to, int mask) {
  const int rest = mask & ~IBV_QP_STATE;
  if (to == IBV_QPS_ERR || to == IBV_QPS_RESET) return rest == 0;
  for (const Change& change : changes) {
    if (change.from != from || change.to != to) continue;
    return (rest & change.wanted) == change.wanted && (rest & ~(change.wanted | change.allowed)) == 0;
  }
  return false;
}

void take_attributes(Qp& qp, const ibv_qp_attr& from, int mask) {
  ibv_qp_attr& to = qp.attr;
  if ((mask & IBV_QP_PKEY_INDEX) != 0) to.pkey_index = from.pkey_index;
  if ((mask & IBV_QP_PORT) != 0) to.port_num = from.port_num;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0) to.qp_access_flags = from.qp_access_flags;
  if ((mask & IBV_QP_AV) != 0) to.ah_attr = from.ah_attr;
  if ((mask & IBV_QP_PATH_MTU) != 0) to.path_mtu = from.path_mtu;
  if ((mask & IBV_QP_DEST_QPN) != 0) to.dest_qp_num = from.dest_qp_num;
  if ((mask & IBV_QP_RQ_PSN) != 0) to.rq_psn = from.rq_psn;
  if ((mask & IBV_QP_SQ_PSN) != 0) to.sq_psn = from.sq_psn;
  if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0) to.max_dest_rd_atomic = from.max_dest_rd_atomic;
  if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0) to.max_rd_atomic = from.max_rd_atomic;
  if ((mask & IBV_QP_MIN_RNR_TIMER) != 0) to.min_rnr_timer = from.min_rnr_timer;
  if ((mask & IBV_QP_TIMEOUT) != 0) to.timeout = from.timeout;
  if ((mask & IBV_QP_RETRY_CNT) != 0) to.retry_cnt = from.retry_cnt;
  if ((mask & IBV_QP_RNR_RETRY) != 0) to.rnr_retry = from.rnr_retry;
}

bool attributes_fit(const ibv_qp_attr& attr, int mask) {
  if ((mask & IBV_QP_PORT) != 0 && attr.port_num != 1) return false;
  if ((mask & IBV_QP_PKEY_INDEX) != 0 && attr.pkey_index != 0) return false;
  if ((mask & IBV_QP_AV) != 0) {
    if (attr.ah_attr.port_num != 1) return false;
    if (attr.ah_attr.is_global != 0 && attr.ah_attr.grh.sgid_index != 0) return false;
  }
  if ((mask & IBV_QP_PATH_MTU) != 0 && (attr.path_mtu < IBV_MTU_256 || attr.path_mtu > IBV_MTU_4096))
    return false;
  if ((mask & IBV_QP_RQ_PSN) != 0 && attr.rq_psn > 0xffffff) return false;
  if ((mask & IBV_QP_SQ_PSN) != 0 && attr.sq_psn > 0xffffff) return false;
  if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0 && attr.max_rd_atomic > 16) return false;
  if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0 && attr.max_dest_rd_atomic > 16) return false;
  if ((mask & IBV_QP_RETRY_CNT) != 0 && attr.retry_cnt > 7) return false;
  if ((mask & IBV_QP_RNR_RETRY) != 0 && attr.rnr_retry > 7) return false;
  return (mask & IBV_QP_TIMEOUT) == 0 || attr.timeout < 32;
}

void wait_idle(Lock& lock, Qp& qp) {
  ++qp.wanted;
  nic().idle.wait(lock, [&] { return qp.busy == 0; });
  --qp.wanted;
}

// Where the events of an object are counted that were got and not acknowledged; null: an event of a port.
unsigned* unacked_of(const ibv_async_event& event) {
  if (event.event_type == IBV_EVENT_CQ_ERR) return &object<Cq>(event.element.cq)->async_unacked;
  if (event.event_type == IBV_EVENT_QP_ACCESS_ERR) return &object<Qp>(event.element.qp)->async_unacked;
  return nullptr;
}

// As the real one: what nobody got goes with the object, what was got is waited for.
void end_events(Lock& lock, ibv_context* base, const unsigned& unacked) {
  const auto gone = std::erase_if(
      context_of(base)->events, [&](const ibv_async_event& event) { return unacked_of(event) == &unacked; });
  for (std::size_t i = 0; i < gone; ++i) DI_ASSERT(take_one(base->async_fd));
  nic().idle.wait(lock, [&] { return unacked == 0; });
}

void reset(Qp& qp) {
  qp.sends.clear();
  qp.recvs.clear();
  qp.awaited = 0;
  qp.holding = false;
  qp.held.clear();
  qp.recvs_used = 0;
  qp.freed = qp.posted;
  forget_completions(*object<Cq>(qp.base.send_cq), qp);
  forget_completions(*object<Cq>(qp.base.recv_cq), qp);
}

}  // namespace

extern "C" {

// ---- devices

ibv_device** ibv_get_device_list(int* count) {
  auto** list = new ibv_device*[devices + 1];
  for (std::size_t i = 0; i < devices; ++i) list[i] = &nic().device[i].base;
  list[devices] = nullptr;
  if (count != nullptr) *count = static_cast<int>(devices);
  return list;
}
void ibv_free_device_list(ibv_device** list) {
  delete[] list;
}
const char* ibv_get_device_name(ibv_device* device) {
  return device->name;
}
__be64 ibv_get_device_guid(ibv_device* device) {
  return htobe64(static_cast<std::uint64_t>(ibv_get_device_index(device)) + 1);
}
int ibv_get_device_index(ibv_device* device) {
  return static_cast<int>(object<Device>(device) - nic().device);
}

ibv_context* ibv_open_device(ibv_device* device) {
  Lock lock = lock_nic();
  auto* context = new Context;
  context->device = object<Device>(device);
  context->verbs.sz = sizeof(verbs_context);
  ibv_context& base = context->verbs.context;
  base.device = device;
  base.cmd_fd = -1;
  base.async_fd = semaphore();
  base.num_comp_vectors = 1;
  base.abi_compat = __VERBS_ABI_IS_EXTENDED;
  base.ops.poll_cq = poll_cq;
  base.ops.req_notify_cq = req_notify_cq;
  base.ops.post_send = post_send;
  base.ops.post_recv = post_recv;
  base.ops.post_srq_recv = post_srq_recv;
  nic().contexts.push_back(context);
  ++nic().objects;
  start_thread(lock);
  return &base;
}

int ibv_close_device(ibv_context* base) {
  Lock lock = lock_nic();
  Context* context = context_of(base);
  if (context->objects != 0) return EBUSY;
  std::erase(nic().contexts, context);
  --nic().objects;
  ::close(base->async_fd);
  delete context;
  if (nic().contexts.empty()) stop_thread(lock);
  return 0;
}

int ibv_query_device(ibv_context* context, ibv_device_attr* attr) {
  *attr = {};
  std::strcpy(attr->fw_ver, "softverbs");
  attr->node_guid = ibv_get_device_guid(context->device);
  attr->sys_image_guid = attr->node_guid;
  attr->max_mr_size = region_bytes_max;
  attr->page_size_cap = 4096;
  attr->max_qp = 65536;
  attr->max_qp_wr = queue_depth_max;
  attr->max_sge = sge_max;
  attr->max_sge_rd = sge_max;
  attr->max_cq = 65536;
  attr->max_cqe = cq_depth_max;
  attr->max_mr = 65536;
  attr->max_pd = 65536;
  attr->max_qp_rd_atom = 16;
  attr->max_qp_init_rd_atom = 16;
  attr->max_res_rd_atom = 65536;
  attr->atomic_cap = IBV_ATOMIC_NONE;
  attr->max_srq = 65536;
  attr->max_srq_wr = queue_depth_max;
  attr->max_srq_sge = sge_max;
  attr->max_pkeys = 1;
  attr->phys_port_cnt = 1;
  return 0;
}

int ibv_query_port(ibv_context* context, std::uint8_t port, _compat_ibv_port_attr* out) {
  if (port != 1) return EINVAL;
  ibv_port_attr attr{};
  {
    const Lock lock = lock_nic();
    attr.state = context_of(context)->device->up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  }
  attr.max_mtu = IBV_MTU_4096;
  attr.active_mtu = IBV_MTU_4096;
  attr.gid_tbl_len = 1;
  attr.max_msg_sz = message_bytes_max;
  attr.pkey_tbl_len = 1;
  attr.active_width = 2;
  attr.active_speed = 16;
  attr.phys_state = 5;
  attr.link_layer = IBV_LINK_LAYER_ETHERNET;
  // The struct of old ends there.
  std::memcpy(static_cast<void*>(out), &attr, offsetof(ibv_port_attr, port_cap_flags2));
  return 0;
}

int ibv_query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) {
  if (port != 1 || index != 0) return EINVAL;
  const Lock lock = lock_nic();
  *gid = gid_of(*context_of(context)->device);
  return 0;
}
int ibv_query_pkey(ibv_context*, std::uint8_t port, int index, __be16* pkey) {
  if (port != 1 || index != 0) return EINVAL;
  *pkey = 0xffff;
  return 0;
}
int ibv_fork_init() {
  return 0;
}

// ---- domains and regions

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  const Lock lock = lock_nic();
  auto* pd = new Pd;
  pd->base.context = context;
  count_object(context, 1);
  return &pd->base;
}
int ibv_dealloc_pd(ibv_pd* base) {
  const Lock lock = lock_nic();
  auto* pd = object<Pd>(base);
  if (pd->users != 0) return EBUSY;
  count_object(base->context, -1);
  delete pd;
  return 0;
}

ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* at, std::size_t bytes, std::uint64_t iova, unsigned access) {
  const Lock lock = lock_nic();
  if (bytes == 0 || bytes > region_bytes_max || iova != reinterpret_cast<std::uint64_t>(at)) {
    return fail<ibv_mr>(EINVAL);
  }
  // A right to write from afar is none without the one to write from here.
  if ((access & IBV_ACCESS_REMOTE_WRITE) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0)
    return fail<ibv_mr>(EINVAL);
  auto* region = new Mr;
  region->access = access;
  region->base.context = pd->context;
  region->base.pd = pd;
  region->base.addr = at;
  region->base.length = bytes;
  do {
    nic().next_key += 0x101;
  } while (nic().regions.contains(nic().next_key));
  region->base.lkey = nic().next_key;
  region->base.rkey = nic().next_key;
  nic().regions[nic().next_key] = region;
  ++object<Pd>(pd)->users;
  count_object(pd->context, 1);
  return &region->base;
}
ibv_mr* ibv_reg_mr(ibv_pd* pd, void* at, std::size_t bytes, int access) {
  return ibv_reg_mr_iova2(pd, at, bytes, reinterpret_cast<std::uint64_t>(at), static_cast<unsigned>(access));
}
// Of a memfd that the caller has mapped at `iova`, as a GPU's driver maps its memory.
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t bytes, std::uint64_t iova, int fd,
                          int access) {
  struct stat file {};
  if (::fstat(fd, &file) != 0) return fail<ibv_mr>(EBADF);
  const auto length = static_cast<std::uint64_t>(file.st_size);
  if (offset > length || bytes > length - offset) return fail<ibv_mr>(EINVAL);
  return ibv_reg_mr_iova2(pd, reinterpret_cast<void*>(iova), bytes, iova, static_cast<unsigned>(access));
}
int ibv_dereg_mr(ibv_mr* base) {
  Lock lock = lock_nic();
  auto* region = object<Mr>(base);
  // From here on nothing new begins with it; what is under way ends first.
  nic().regions.erase(base->lkey);
  nic().idle.wait(lock, [&] { return region->users == 0; });
  --object<Pd>(base->pd)->users;
  count_object(base->context, -1);
  delete region;
  return 0;
}

// ---- completion queues

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  const Lock lock = lock_nic();
  auto* channel = new Channel;
  channel->base.context = context;
  channel->base.fd = semaphore();
  count_object(context, 1);
  return &channel->base;
}
int ibv_destroy_comp_channel(ibv_comp_channel* base) {
  const Lock lock = lock_nic();
  if (base->refcnt != 0) return EBUSY;
  ::close(base->fd);
  count_object(base->context, -1);
  delete object<Channel>(base);
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int depth, void* user, ibv_comp_channel* channel, int vector) {
  const Lock lock = lock_nic();
  if (depth < 1 || depth > cq_depth_max || vector != 0) return fail<ibv_cq>(EINVAL);
  auto* cq = new Cq;
  cq->base.context = context;
  cq->base.channel = channel;
  cq->base.cq_context = user;
  cq->base.cqe = depth;
  if (channel != nullptr) ++channel->refcnt;
  count_object(context, 1);
  return &cq->base;
}
int ibv_destroy_cq(ibv_cq* base) {
  Lock lock = lock_nic();
  auto* cq = object<Cq>(base);
  if (cq->users != 0) return EBUSY;
  if (base->channel != nullptr) {
    auto* channel = object<Channel>(base->channel);
    const auto gone = static_cast<unsigned>(std::erase(channel->events, cq));
    for (unsigned i = 0; i < gone; ++i) DI_ASSERT(take_one(base->channel->fd));
    cq->unacked -= gone;
    --base->channel->refcnt;
  }
  // As the real one: waits for the acknowledgement of every event that was got.
  nic().idle.wait(lock, [&] { return cq->unacked == 0; });
  end_events(lock, base->context, cq->async_unacked);
  count_object(base->context, -1);
  delete cq;
  return 0;
}
int ibv_get_cq_event(ibv_comp_channel* base, ibv_cq** cq, void** user) {
  while (true) {
    if (!take_one(base->fd)) return -1;
    const Lock lock = lock_nic();
    auto* channel = object<Channel>(base);
    if (channel->events.empty()) continue;
    *cq = &channel->events.front()->base;
    *user = (*cq)->cq_context;
    channel->events.pop_front();
    return 0;
  }
}
void ibv_ack_cq_events(ibv_cq* base, unsigned count) {
  const Lock lock = lock_nic();
  auto* cq = object<Cq>(base);
  DI_ASSERT(cq->unacked >= count);
  cq->unacked -= count;
  nic().idle.notify_all();
}

// ---- queue pairs

ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* init) {
  const Lock lock = lock_nic();
  if (init->attr.max_wr < 1 || init->attr.max_wr > queue_depth_max || init->attr.max_sge > sge_max) {
    return fail<ibv_srq>(EINVAL);
  }
  auto* srq = new Srq;
  srq->base.context = pd->context;
  srq->base.srq_context = init->srq_context;
  srq->base.pd = pd;
  srq->depth = init->attr.max_wr;
  srq->sges = static_cast<int>(init->attr.max_sge);
  ++object<Pd>(pd)->users;
  count_object(pd->context, 1);
  return &srq->base;
}
int ibv_destroy_srq(ibv_srq* base) {
  const Lock lock = lock_nic();
  if (object<Srq>(base)->users != 0) return EBUSY;
  --object<Pd>(base->pd)->users;
  count_object(base->context, -1);
  delete object<Srq>(base);
  return 0;
}

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
  const Lock lock = lock_nic();
  const ibv_qp_cap& cap = init->cap;
  if (init->qp_type != IBV_QPT_RC) return fail<ibv_qp>(EOPNOTSUPP);
  if (init->send_cq == nullptr || init->recv_cq == nullptr || cap.max_send_wr > queue_depth_max ||
      cap.max_recv_wr > queue_depth_max || cap.max_send_sge > sge_max || cap.max_recv_sge > sge_max ||
      cap.max_inline_data > inline_max) {
    return fail<ibv_qp>(EINVAL);
  }
  auto* qp = new Qp;
  qp->base.context = pd->context;
  qp->base.qp_context = init->qp_context;
  qp->base.pd = pd;
  qp->base.send_cq = init->send_cq;
  qp->base.recv_cq = init->recv_cq;
  qp->base.srq = init->srq;
  qp->base.state = IBV_QPS_RESET;
  qp->base.qp_type = IBV_QPT_RC;
  qp->cap = cap;
  qp->signal_all = init->sq_sig_all != 0;
  if (nic().deterministic) {
    do {
      nic().next_qpn = (nic().next_qpn + 1) & 0xffffff;
    } while (nic().qps.contains(nic().next_qpn));
    qp->base.qp_num = nic().next_qpn;
  } else {
    wire_open(*qp);  // also finds a number that nobody on the machine has
  }
  nic().qps[qp->base.qp_num] = qp;
  ++object<Pd>(pd)->users;
  ++object<Cq>(init->send_cq)->users;
  ++object<Cq>(init->recv_cq)->users;
  if (init->srq != nullptr) ++object<Srq>(init->srq)->users;
  count_object(pd->context, 1);
  return &qp->base;
}

int ibv_modify_qp(ibv_qp* base, ibv_qp_attr* attr, int mask) {
  Lock lock = lock_nic();
  auto* qp = object<Qp>(base);
  wait_idle(lock, *qp);
  const ibv_qp_state to = (mask & IBV_QP_STATE) != 0 ? attr->qp_state : base->state;
  if ((mask & IBV_QP_CUR_STATE) != 0 && attr->cur_qp_state != base->state) return EINVAL;
  if (!may_change(base->state, to, mask) || !attributes_fit(*attr, mask)) return EINVAL;
  take_attributes(*qp, *attr, mask);
  if (to == IBV_QPS_RTR && qp->attr.ah_attr.is_global != 0 && !gid_known(qp->attr.ah_attr.grh.dgid)) {
    return EINVAL;  // a real one finds no route
  }
  base->state = to;
  if (to == IBV_QPS_ERR) to_error(*qp);
  if (to == IBV_QPS_RESET) reset(*qp);
  ring(nic());
  return 0;
}

int ibv_query_qp(ibv_qp* base, ibv_qp_attr* attr, int, ibv_qp_init_attr* init) {
  const Lock lock = lock_nic();
  const auto* qp = object<Qp>(base);
  *attr = qp->attr;
  attr->qp_state = base->state;
  attr->cur_qp_state = base->state;
  attr->cap = qp->cap;
  *init = {};
  init->qp_context = base->qp_context;
  init->send_cq = base->send_cq;
  init->recv_cq = base->recv_cq;
  init->srq = base->srq;
  init->cap = qp->cap;
  init->qp_type = base->qp_type;
  init->sq_sig_all = qp->signal_all ? 1 : 0;
  return 0;
}

int ibv_destroy_qp(ibv_qp* base) {
  Lock lock = lock_nic();
  auto* qp = object<Qp>(base);
  nic().qps.erase(base->qp_num);
  wait_idle(lock, *qp);
  reset(*qp);
  end_events(lock, base->context, qp->async_unacked);
  wire_close(*qp);
  --object<Pd>(base->pd)->users;
  --object<Cq>(base->send_cq)->users;
  --object<Cq>(base->recv_cq)->users;
  if (base->srq != nullptr) --object<Srq>(base->srq)->users;
  count_object(base->context, -1);
  delete qp;
  return 0;
}

// ---- events and words

int ibv_get_async_event(ibv_context* base, ibv_async_event* event) {
  while (true) {
    if (!take_one(base->async_fd)) return -1;
    const Lock lock = lock_nic();
    Context* context = context_of(base);
    if (context->events.empty()) continue;
    *event = context->events.front();
    context->events.pop_front();
    if (unsigned* unacked = unacked_of(*event)) ++*unacked;
    return 0;
  }
}
void ibv_ack_async_event(ibv_async_event* event) {
  const Lock lock = lock_nic();
  unsigned* unacked = unacked_of(*event);
  if (unacked == nullptr) return;
  DI_ASSERT(*unacked > 0);
  --*unacked;
  nic().idle.notify_all();
}

const char* ibv_wc_status_str(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return "success";
    case IBV_WC_LOC_LEN_ERR:
      return "local length error";
    case IBV_WC_LOC_QP_OP_ERR:
      return "local QP operation error";
    case IBV_WC_LOC_PROT_ERR:
      return "local protection error";
    case IBV_WC_WR_FLUSH_ERR:
      return "flushed";
    case IBV_WC_REM_ACCESS_ERR:
      return "remote access error";
    case IBV_WC_REM_INV_REQ_ERR:
      return "remote invalid request error";
    case IBV_WC_RETRY_EXC_ERR:
      return "transport retry counter exceeded";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "RNR retry counter exceeded";
    case IBV_WC_LOC_EEC_OP_ERR:
    case IBV_WC_MW_BIND_ERR:
    case IBV_WC_BAD_RESP_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_LOC_RDD_VIOL_ERR:
    case IBV_WC_REM_INV_RD_REQ_ERR:
    case IBV_WC_REM_ABORT_ERR:
    case IBV_WC_INV_EECN_ERR:
    case IBV_WC_INV_EEC_STATE_ERR:
    case IBV_WC_FATAL_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
    case IBV_WC_GENERAL_ERR:
    case IBV_WC_TM_ERR:
    case IBV_WC_TM_RNDV_INCOMPLETE:
      break;
  }
  return "error";
}
const char* ibv_event_type_str(ibv_event_type) {
  return "event";
}
const char* ibv_port_state_str(ibv_port_state state) {
  return state == IBV_PORT_ACTIVE ? "active" : "down";
}
const char* ibv_node_type_str(ibv_node_type) {
  return "software";
}

}  // extern "C"
