// What softverbs promises, by the calls of libibverbs alone.
#include "tests/support/softverbs/softverbs.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace di::softverbs {
namespace {

constexpr int every_right = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

struct Limits {
  std::uint32_t sends = 16;
  std::uint32_t receives = 16;
  int completions = 64;
  unsigned rights = every_right;
  std::uint8_t rnr_retry = 7;
  std::uint8_t reads = 4;
};

// A device with one queue pair and some memory.
struct Side {
  explicit Side(const Limits& with = {}, const char* device = "softverbs0") : limits(with), bytes(65536) {
    int count = 0;
    ibv_device** list = ibv_get_device_list(&count);
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(ibv_get_device_name(list[i]), device) == 0) context = ibv_open_device(list[i]);
    }
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(context);
    channel = ibv_create_comp_channel(context);
    fcntl(channel->fd, F_SETFL, O_NONBLOCK);
    fcntl(context->async_fd, F_SETFL, O_NONBLOCK);
    cq = ibv_create_cq(context, limits.completions, nullptr, channel, 0);
    mr = ibv_reg_mr(pd, bytes.data(), bytes.size(), every_right);
    qp = make_qp();
  }
  ~Side() {
    if (qp != nullptr) ibv_destroy_qp(qp);
    if (mr != nullptr) ibv_dereg_mr(mr);
    ibv_destroy_cq(cq);
    ibv_destroy_comp_channel(channel);
    EXPECT_EQ(ibv_dealloc_pd(pd), 0);
    EXPECT_EQ(ibv_close_device(context), 0);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  ibv_qp* make_qp() {
    ibv_qp_init_attr init{};
    init.send_cq = cq;
    init.recv_cq = cq;
    init.qp_type = IBV_QPT_RC;
    init.cap = {limits.sends, limits.receives, 2, 2, 64};
    return ibv_create_qp(pd, &init);
  }
  int to_init() {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = limits.rights;
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  }
  int to_rtr(std::uint32_t other_qpn, const ibv_gid& other_gid) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = other_qpn;
    attr.rq_psn = 7;
    attr.max_dest_rd_atomic = 4;
    attr.min_rnr_timer = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = other_gid;
    return ibv_modify_qp(qp, &attr,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  }
  int to_rts() {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTS;
    attr.sq_psn = 7;
    attr.timeout = 8;
    attr.retry_cnt = 3;
    attr.rnr_retry = limits.rnr_retry;
    attr.max_rd_atomic = limits.reads;
    return ibv_modify_qp(qp, &attr,
                         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_MAX_QP_RD_ATOMIC);
  }
  void connect(std::uint32_t other_qpn, const ibv_gid& other_gid) {
    ASSERT_EQ(to_init(), 0);
    ASSERT_EQ(to_rtr(other_qpn, other_gid), 0);
    ASSERT_EQ(to_rts(), 0);
  }
  ibv_gid gid() const {
    ibv_gid own{};
    EXPECT_EQ(ibv_query_gid(context, 1, 0, &own), 0);
    return own;
  }
  ibv_qp_state state() const {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    EXPECT_EQ(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), 0);
    return attr.qp_state;
  }

  ibv_sge sge(std::size_t offset, std::uint32_t length) const {
    return {reinterpret_cast<std::uint64_t>(bytes.data()) + offset, length, mr->lkey};
  }
  int post(ibv_wr_opcode opcode, std::uint64_t id, std::size_t offset, std::uint32_t length,
           std::uint64_t remote = 0, std::uint32_t rkey = 0, unsigned flags = IBV_SEND_SIGNALED,
           std::uint32_t imm = 0) {
    ibv_sge piece = sge(offset, length);
    ibv_send_wr wr{};
    wr.wr_id = id;
    wr.sg_list = &piece;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = flags;
    wr.imm_data = imm;
    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = rkey;
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp, &wr, &bad);
  }
  int post_receive(std::uint64_t id, std::size_t offset, std::uint32_t length) {
    ibv_sge piece = sge(offset, length);
    ibv_recv_wr wr{};
    wr.wr_id = id;
    wr.sg_list = &piece;
    wr.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    return ibv_post_recv(qp, &wr, &bad);
  }
  std::uint64_t address(std::size_t offset) const {
    return reinterpret_cast<std::uint64_t>(bytes.data()) + offset;
  }
  std::optional<ibv_wc> poll_one() {
    ibv_wc wc{};
    return ibv_poll_cq(cq, 1, &wc) == 1 ? std::optional(wc) : std::nullopt;
  }
  // Threaded: waits for it.
  std::optional<ibv_wc> await() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < end) {
      EXPECT_EQ(ibv_req_notify_cq(cq, 0), 0);
      if (auto wc = poll_one()) return wc;
      pollfd entry{channel->fd, POLLIN, 0};
      ::poll(&entry, 1, 100);
      drain_events();
    }
    return std::nullopt;
  }
  int drain_events() {
    int events = 0;
    ibv_cq* which = nullptr;
    void* user = nullptr;
    while (ibv_get_cq_event(channel, &which, &user) == 0) {
      ibv_ack_cq_events(which, 1);
      ++events;
    }
    return events;
  }
  std::optional<ibv_event_type> async_event() {
    ibv_async_event event{};
    if (ibv_get_async_event(context, &event) != 0) return std::nullopt;
    ibv_ack_async_event(&event);
    return event.event_type;
  }

  const Limits limits;
  std::vector<unsigned char> bytes;
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_comp_channel* channel = nullptr;
  ibv_cq* cq = nullptr;
  ibv_mr* mr = nullptr;
  ibv_qp* qp = nullptr;
};

// Two sides, connected, step by step.
struct SoftverbsTest : testing::Test {
  SoftverbsTest() { run_deterministic(1); }
  ~SoftverbsTest() override {
    a.reset();
    b.reset();
    no_faults();
    EXPECT_EQ(counts().objects, 0u);
    run_threaded();
  }
  void make(const Limits& of_a = {}, const Limits& of_b = {}) {
    a = std::make_unique<Side>(of_a);
    b = std::make_unique<Side>(of_b, "softverbs1");
    a->connect(b->qp->qp_num, b->gid());
    b->connect(a->qp->qp_num, a->gid());
  }
  ibv_wc_status run_and_poll(Side& side) {
    run_all();
    const auto wc = side.poll_one();
    EXPECT_TRUE(wc.has_value());
    return wc ? wc->status : IBV_WC_GENERAL_ERR;
  }

  std::unique_ptr<Side> a;
  std::unique_ptr<Side> b;
};

TEST_F(SoftverbsTest, two_devices_with_an_active_port_each) {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  ASSERT_EQ(count, 2);
  EXPECT_EQ(list[2], nullptr);
  EXPECT_NE(ibv_get_device_guid(list[0]), ibv_get_device_guid(list[1]));
  ibv_free_device_list(list);
  const Side side;
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(side.context, 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(port.link_layer, IBV_LINK_LAYER_ETHERNET);
  EXPECT_NE(ibv_query_port(side.context, 2, &port), 0);
  ibv_device_attr attr{};
  ASSERT_EQ(ibv_query_device(side.context, &attr), 0);
  EXPECT_EQ(attr.max_mr_size, 2ull << 30);
}

TEST_F(SoftverbsTest, states_need_their_attributes) {
  Side side;
  EXPECT_EQ(side.post(IBV_WR_SEND, 1, 0, 8), EINVAL) << "in RESET";
  EXPECT_EQ(side.post_receive(1, 0, 8), EINVAL) << "in RESET";
  EXPECT_EQ(side.to_rts(), EINVAL) << "RESET to RTS";
  EXPECT_EQ(side.to_rtr(1, side.gid()), EINVAL) << "RESET to RTR";
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  EXPECT_EQ(ibv_modify_qp(side.qp, &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX), EINVAL)
      << "no rights";
  attr.port_num = 2;
  EXPECT_EQ(
      ibv_modify_qp(side.qp, &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS),
      EINVAL);
  ASSERT_EQ(side.to_init(), 0);
  EXPECT_EQ(side.post_receive(1, 0, 8), 0);
  EXPECT_EQ(side.post(IBV_WR_SEND, 1, 0, 8), EINVAL) << "in INIT";
  ibv_gid unknown{};
  EXPECT_EQ(side.to_rtr(1, unknown), EINVAL);
  ASSERT_EQ(side.to_rtr(side.qp->qp_num, side.gid()), 0);
  attr.qp_state = IBV_QPS_RTS;
  EXPECT_EQ(ibv_modify_qp(side.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), EINVAL) << "half of what it takes";
  ASSERT_EQ(side.to_rts(), 0);
  attr.qp_state = IBV_QPS_ERR;
  EXPECT_EQ(ibv_modify_qp(side.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), EINVAL);
  EXPECT_EQ(ibv_modify_qp(side.qp, &attr, IBV_QP_STATE), 0);
  EXPECT_EQ(side.poll_one()->status, IBV_WC_WR_FLUSH_ERR) << "the receive";
  EXPECT_EQ(side.post(IBV_WR_SEND, 2, 0, 8), 0);
  EXPECT_EQ(side.poll_one()->status, IBV_WC_WR_FLUSH_ERR);
  attr.qp_state = IBV_QPS_RESET;
  EXPECT_EQ(ibv_modify_qp(side.qp, &attr, IBV_QP_STATE), 0);
  EXPECT_EQ(side.to_init(), 0);
}

TEST_F(SoftverbsTest, write_read_and_send_move_bytes) {
  make();
  for (std::size_t i = 0; i < 1000; ++i) a->bytes[i] = static_cast<unsigned char>(i);
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 1000, b->address(5000), b->mr->rkey), 0);
  EXPECT_FALSE(a->poll_one().has_value()) << "before a step";
  ASSERT_EQ(run_and_poll(*a), IBV_WC_SUCCESS);
  EXPECT_EQ(std::memcmp(a->bytes.data(), &b->bytes[5000], 1000), 0);
  ASSERT_EQ(a->post(IBV_WR_RDMA_READ, 2, 2000, 1000, b->address(5000), b->mr->rkey), 0);
  ASSERT_EQ(run_and_poll(*a), IBV_WC_SUCCESS);
  EXPECT_EQ(std::memcmp(a->bytes.data(), &a->bytes[2000], 1000), 0);
  EXPECT_FALSE(b->poll_one().has_value()) << "neither is told to the other side";
  ASSERT_EQ(b->post_receive(9, 7000, 200), 0);
  ASSERT_EQ(a->post(IBV_WR_SEND, 3, 100, 150), 0);
  ASSERT_EQ(run_and_poll(*a), IBV_WC_SUCCESS);
  const auto wc = b->poll_one();
  ASSERT_TRUE(wc.has_value());
  EXPECT_EQ(wc->wr_id, 9u);
  EXPECT_EQ(wc->opcode, IBV_WC_RECV);
  EXPECT_EQ(wc->byte_len, 150u);
  EXPECT_EQ(std::memcmp(&a->bytes[100], &b->bytes[7000], 150), 0);
}

TEST_F(SoftverbsTest, write_with_immediate_consumes_a_receive) {
  make();
  a->bytes[0] = 42;
  ASSERT_EQ(b->post_receive(9, 0, 0), 0);
  ASSERT_EQ(
      a->post(IBV_WR_RDMA_WRITE_WITH_IMM, 1, 0, 1, b->address(80), b->mr->rkey, IBV_SEND_SIGNALED, 0xabcd),
      0);
  ASSERT_EQ(run_and_poll(*a), IBV_WC_SUCCESS);
  const auto wc = b->poll_one();
  ASSERT_TRUE(wc.has_value());
  EXPECT_EQ(wc->opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(wc->imm_data, 0xabcdu);
  EXPECT_EQ(wc->byte_len, 1u);
  EXPECT_EQ(b->bytes[80], 42);
  // The next finds none: it waits, and goes on when there is one.
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE_WITH_IMM, 2, 0, 1, b->address(81), b->mr->rkey), 0);
  run_all();
  EXPECT_FALSE(a->poll_one().has_value());
  ASSERT_EQ(b->post_receive(10, 0, 0), 0);
  EXPECT_EQ(run_and_poll(*a), IBV_WC_SUCCESS);
}

TEST_F(SoftverbsTest, no_receive_for_too_long_is_an_error) {
  make({.rnr_retry = 2});
  ASSERT_EQ(a->post(IBV_WR_SEND, 1, 0, 8), 0);
  EXPECT_EQ(run_and_poll(*a), IBV_WC_RNR_RETRY_EXC_ERR);
  EXPECT_EQ(a->state(), IBV_QPS_ERR);
  EXPECT_EQ(b->state(), IBV_QPS_RTS);
}

TEST_F(SoftverbsTest, message_longer_than_its_receive_ends_both) {
  make();
  ASSERT_EQ(b->post_receive(9, 0, 10), 0);
  ASSERT_EQ(a->post(IBV_WR_SEND, 1, 0, 11), 0);
  EXPECT_EQ(run_and_poll(*a), IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(b->poll_one()->status, IBV_WC_LOC_LEN_ERR);
  EXPECT_EQ(b->state(), IBV_QPS_ERR);
}

TEST_F(SoftverbsTest, access_beyond_its_region_ends_both_and_flushes_what_waits) {
  make();
  ASSERT_EQ(b->post_receive(9, 0, 10), 0);
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(65536 - 7), b->mr->rkey), 0);
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 2, 0, 8, b->address(0), b->mr->rkey, 0), 0);
  run_all();
  EXPECT_EQ(a->poll_one()->status, IBV_WC_REM_ACCESS_ERR);
  const auto flushed = a->poll_one();
  ASSERT_TRUE(flushed.has_value()) << "an unsignaled one is told as well";
  EXPECT_EQ(flushed->wr_id, 2u);
  EXPECT_EQ(flushed->status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(b->poll_one()->status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(a->state(), IBV_QPS_ERR);
  EXPECT_EQ(b->state(), IBV_QPS_ERR);
  EXPECT_EQ(b->async_event(), IBV_EVENT_QP_ACCESS_ERR);
}

TEST_F(SoftverbsTest, keys_and_rights_are_checked) {
  {
    make();
    ASSERT_EQ(a->post(IBV_WR_RDMA_READ, 1, 0, 8, b->address(0), b->mr->rkey + 1), 0);
    EXPECT_EQ(run_and_poll(*a), IBV_WC_REM_ACCESS_ERR) << "a key that is none";
  }
  a.reset();
  b.reset();
  {
    make();
    ibv_mr* read_only = ibv_reg_mr(b->pd, b->bytes.data(), 100, IBV_ACCESS_REMOTE_READ);
    ASSERT_EQ(a->post(IBV_WR_RDMA_READ, 1, 0, 8, b->address(0), read_only->rkey), 0);
    EXPECT_EQ(run_and_poll(*a), IBV_WC_SUCCESS);
    ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), read_only->rkey), 0);
    EXPECT_EQ(run_and_poll(*a), IBV_WC_REM_ACCESS_ERR);
    ibv_dereg_mr(read_only);
  }
  a.reset();
  b.reset();
  {
    make();
    ibv_pd* other = ibv_alloc_pd(b->context);
    ibv_mr* foreign = ibv_reg_mr(other, b->bytes.data(), 100, every_right);
    EXPECT_EQ(ibv_dealloc_pd(other), EBUSY);
    ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), foreign->rkey), 0);
    EXPECT_EQ(run_and_poll(*a), IBV_WC_REM_ACCESS_ERR) << "of another domain";
    ibv_dereg_mr(foreign);
    EXPECT_EQ(ibv_dealloc_pd(other), 0);
  }
  a.reset();
  b.reset();
  {
    make();
    // A READ writes here.
    ibv_mr* not_written = ibv_reg_mr(a->pd, a->bytes.data(), 100, 0);
    std::swap(a->mr, not_written);
    ASSERT_EQ(a->post(IBV_WR_RDMA_READ, 1, 0, 8, b->address(0), b->mr->rkey), 0);
    EXPECT_EQ(run_and_poll(*a), IBV_WC_LOC_PROT_ERR);
    ibv_dereg_mr(not_written);
  }
}

TEST_F(SoftverbsTest, queue_pair_without_remote_rights_refuses) {
  make({}, {.rights = 0});
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), b->mr->rkey), 0);
  EXPECT_EQ(run_and_poll(*a), IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(b->state(), IBV_QPS_ERR);
}

TEST_F(SoftverbsTest, reads_need_room_at_both_sides) {
  make({.reads = 0});
  ASSERT_EQ(a->post(IBV_WR_RDMA_READ, 1, 0, 8, b->address(0), b->mr->rkey), 0);
  EXPECT_EQ(run_and_poll(*a), IBV_WC_LOC_QP_OP_ERR);
  a.reset();
  b.reset();
  make({.reads = 5});
  ASSERT_EQ(a->post(IBV_WR_RDMA_READ, 1, 0, 8, b->address(0), b->mr->rkey), 0);
  EXPECT_EQ(run_and_poll(*a), IBV_WC_REM_INV_REQ_ERR) << "more at a time than the other side answers";
}

TEST_F(SoftverbsTest, depths_and_counts_are_bounds) {
  make({.sends = 2, .receives = 1});
  EXPECT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), b->mr->rkey, 0), 0);
  EXPECT_EQ(a->post(IBV_WR_RDMA_WRITE, 2, 0, 8, b->address(0), b->mr->rkey), 0);
  EXPECT_EQ(a->post(IBV_WR_RDMA_WRITE, 3, 0, 8, b->address(0), b->mr->rkey), ENOMEM);
  run_all();
  EXPECT_EQ(a->post(IBV_WR_RDMA_WRITE, 3, 0, 8, b->address(0), b->mr->rkey), ENOMEM)
      << "room comes with the completion, not before it is polled";
  EXPECT_EQ(a->poll_one()->wr_id, 2u);
  EXPECT_EQ(a->post(IBV_WR_RDMA_WRITE, 3, 0, 8, b->address(0), b->mr->rkey), 0)
      << "and the unsignaled one's, too";
  EXPECT_EQ(a->post_receive(1, 0, 8), 0);
  EXPECT_EQ(a->post_receive(2, 0, 8), ENOMEM);
  std::array<ibv_sge, 3> pieces = {a->sge(0, 1), a->sge(1, 1), a->sge(2, 1)};
  ibv_send_wr wr{};
  wr.sg_list = pieces.data();
  wr.num_sge = 3;
  wr.opcode = IBV_WR_SEND;
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_send(a->qp, &wr, &bad), EINVAL);
  EXPECT_EQ(bad, &wr);
  EXPECT_EQ(a->post(IBV_WR_SEND, 1, 0, 65, 0, 0, IBV_SEND_INLINE), EINVAL) << "longer than inline";
}

TEST_F(SoftverbsTest, inline_bytes_are_taken_at_once) {
  make();
  a->bytes[0] = 1;
  ASSERT_EQ(b->post_receive(1, 0, 8), 0);
  ASSERT_EQ(a->post(IBV_WR_SEND, 1, 0, 1, 0, 0, IBV_SEND_INLINE | IBV_SEND_SIGNALED), 0);
  a->bytes[0] = 2;
  ASSERT_EQ(run_and_poll(*a), IBV_WC_SUCCESS);
  EXPECT_EQ(b->bytes[0], 1);
}

TEST_F(SoftverbsTest, completions_that_nobody_polls_overrun_the_queue) {
  make({.completions = 2});
  for (std::uint64_t id = 0; id < 3; ++id) {
    ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, id, 0, 8, b->address(0), b->mr->rkey), 0);
  }
  run_all();
  EXPECT_EQ(a->async_event(), IBV_EVENT_CQ_ERR);
  ibv_wc wc{};
  EXPECT_LT(ibv_poll_cq(a->cq, 1, &wc), 0);
}

TEST_F(SoftverbsTest, what_is_there_when_the_queue_is_armed_raises_no_event) {
  make();
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), b->mr->rkey), 0);
  run_all();
  EXPECT_EQ(a->drain_events(), 0) << "not armed";
  ASSERT_EQ(ibv_req_notify_cq(a->cq, 0), 0);
  EXPECT_EQ(a->drain_events(), 0) << "who arms and does not poll waits for ever";
  EXPECT_TRUE(a->poll_one().has_value());
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 2, 0, 8, b->address(0), b->mr->rkey), 0);
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 3, 0, 8, b->address(0), b->mr->rkey), 0);
  run_all();
  EXPECT_EQ(a->drain_events(), 1) << "once for each time it was armed";
  // Solicited only: a plain message is none, an error is one.
  ASSERT_EQ(ibv_req_notify_cq(b->cq, 1), 0);
  ASSERT_EQ(b->post_receive(1, 0, 8), 0);
  ASSERT_EQ(b->post_receive(2, 0, 8), 0);
  ASSERT_EQ(a->post(IBV_WR_SEND, 4, 0, 8), 0);
  run_all();
  EXPECT_EQ(b->drain_events(), 0);
  ASSERT_EQ(a->post(IBV_WR_SEND, 5, 0, 8, 0, 0, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED), 0);
  run_all();
  EXPECT_EQ(b->drain_events(), 1);
}

TEST_F(SoftverbsTest, queue_pair_that_does_not_listen_exhausts_the_retries) {
  a = std::make_unique<Side>();
  b = std::make_unique<Side>();
  a->connect(b->qp->qp_num, b->gid());
  ASSERT_EQ(b->to_init(), 0);
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), b->mr->rkey), 0);
  EXPECT_EQ(run_and_poll(*a), IBV_WC_RETRY_EXC_ERR);
}

TEST_F(SoftverbsTest, queue_pair_of_somebody_else_exhausts_the_retries) {
  make();
  Side c;
  c.connect(b->qp->qp_num, b->gid());  // b is connected to a
  ASSERT_EQ(c.post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), b->mr->rkey), 0);
  EXPECT_EQ(run_and_poll(c), IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(b->state(), IBV_QPS_RTS);
}

TEST_F(SoftverbsTest, busy_objects_stay) {
  make();
  EXPECT_EQ(ibv_dealloc_pd(a->pd), EBUSY);
  EXPECT_EQ(ibv_destroy_cq(a->cq), EBUSY);
  EXPECT_EQ(ibv_destroy_comp_channel(a->channel), EBUSY);
  EXPECT_EQ(ibv_close_device(a->context), EBUSY);
  EXPECT_EQ(ibv_reg_mr(a->pd, a->bytes.data(), 8, IBV_ACCESS_REMOTE_WRITE), nullptr)
      << "remote without local write";
}

TEST_F(SoftverbsTest, destroyed_queue_pair_takes_its_completions_along) {
  make();
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), b->mr->rkey), 0);
  run_all();
  ibv_destroy_qp(a->qp);
  a->qp = nullptr;
  EXPECT_FALSE(a->poll_one().has_value());
}

TEST_F(SoftverbsTest, shared_receive_queue_serves_several) {
  a = std::make_unique<Side>();
  b = std::make_unique<Side>();
  ibv_srq_init_attr init{};
  init.attr = {4, 1, 0};
  ibv_srq* srq = ibv_create_srq(b->pd, &init);
  ASSERT_NE(srq, nullptr);
  ibv_destroy_qp(b->qp);
  ibv_qp_init_attr qp{};
  qp.send_cq = b->cq;
  qp.recv_cq = b->cq;
  qp.srq = srq;
  qp.qp_type = IBV_QPT_RC;
  qp.cap = {16, 0, 1, 0, 0};
  b->qp = ibv_create_qp(b->pd, &qp);
  ASSERT_NE(b->qp, nullptr);
  EXPECT_EQ(ibv_destroy_srq(srq), EBUSY);
  a->connect(b->qp->qp_num, b->gid());
  b->connect(a->qp->qp_num, a->gid());
  EXPECT_EQ(b->post_receive(1, 0, 8), EINVAL) << "its receives are elsewhere";
  ibv_sge piece = b->sge(0, 8);
  ibv_recv_wr wr{};
  wr.wr_id = 77;
  wr.sg_list = &piece;
  wr.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_srq_recv(srq, &wr, &bad), 0);
  ASSERT_EQ(a->post(IBV_WR_SEND, 1, 0, 8), 0);
  EXPECT_EQ(run_and_poll(*a), IBV_WC_SUCCESS);
  EXPECT_EQ(b->poll_one()->wr_id, 77u);
  ibv_destroy_qp(b->qp);
  b->qp = nullptr;
  EXPECT_EQ(ibv_destroy_srq(srq), 0);
}

TEST_F(SoftverbsTest, port_goes_down_and_says_so) {
  make();
  set_port(0, false);
  EXPECT_EQ(a->async_event(), IBV_EVENT_PORT_ERR);
  EXPECT_FALSE(b->async_event().has_value()) << "the other device";
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(a->context, 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_DOWN);
  set_port(0, true);
  EXPECT_EQ(a->async_event(), IBV_EVENT_PORT_ACTIVE);
}

TEST_F(SoftverbsTest, nothing_gets_out_of_a_port_that_is_down_or_into_it) {
  for (const std::size_t down : {0u, 1u}) {
    make();
    set_port(down, false);
    ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), b->mr->rkey), 0);
    EXPECT_EQ(run_and_poll(*a), IBV_WC_RETRY_EXC_ERR);
    set_port(down, true);
    a.reset();
    b.reset();
  }
  make();
  set_path(1, false);
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), b->mr->rkey), 0);
  EXPECT_EQ(run_and_poll(*a), IBV_WC_RETRY_EXC_ERR);
  EXPECT_FALSE(b->async_event().has_value()) << "nobody is told";
  set_path(1, true);
}

TEST_F(SoftverbsTest, gid_is_what_it_is_now) {
  make();
  const ibv_gid before = b->gid();
  set_gid(1, 9);
  EXPECT_EQ(b->gid().raw[15], 9);
  Side c;
  EXPECT_EQ(c.to_init(), 0);
  EXPECT_EQ(c.to_rtr(b->qp->qp_num, before), EINVAL) << "no route";
  EXPECT_EQ(c.to_rtr(b->qp->qp_num, b->gid()), 0);
  set_gid(1, before.raw[15]);
}

TEST_F(SoftverbsTest, events_of_an_object_go_with_it) {
  make();
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 8, b->address(0), b->mr->rkey + 1), 0);
  run_all();
  ibv_destroy_qp(b->qp);
  b->qp = nullptr;
  EXPECT_FALSE(b->async_event().has_value());
  set_port(1, false);
  EXPECT_EQ(b->async_event(), IBV_EVENT_PORT_ERR) << "others stay";
  set_port(1, true);
}

TEST_F(SoftverbsTest, held_completions_come_in_their_order) {
  make();
  hold_nth(1);
  for (std::uint64_t id = 1; id <= 2; ++id) {
    a->bytes[0] = static_cast<unsigned char>(id);
    ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, id, 0, 1, b->address(id), b->mr->rkey), 0);
  }
  run_all();
  EXPECT_FALSE(a->poll_one().has_value());
  EXPECT_EQ(b->bytes[2], 2) << "the bytes are there";
  let_go();
  EXPECT_EQ(a->poll_one()->wr_id, 1u);
  EXPECT_EQ(a->poll_one()->wr_id, 2u);
}

TEST_F(SoftverbsTest, torn_write_is_half_there_before_its_completion) {
  make();
  set_tear(true);
  a->bytes.assign(a->bytes.size(), 9);
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 1000, b->address(0), b->mr->rkey), 0);
  ASSERT_TRUE(step());
  EXPECT_FALSE(a->poll_one().has_value());
  EXPECT_EQ(b->bytes[499], 9);
  EXPECT_EQ(b->bytes[500], 0);
  ASSERT_TRUE(step());
  EXPECT_TRUE(a->poll_one().has_value());
  EXPECT_EQ(b->bytes[999], 9);
}

TEST_F(SoftverbsTest, faults_hit_the_nth) {
  make();
  fail_nth(2, IBV_WC_FATAL_ERR);
  for (std::uint64_t id = 1; id <= 3; ++id) {
    a->bytes[0] = static_cast<unsigned char>(id);
    ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, id, 0, 1, b->address(id), b->mr->rkey), 0);
  }
  run_all();
  EXPECT_EQ(a->poll_one()->status, IBV_WC_SUCCESS);
  EXPECT_EQ(a->poll_one()->status, IBV_WC_FATAL_ERR);
  EXPECT_EQ(a->poll_one()->status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(b->bytes[2], 0);
  a.reset();
  b.reset();
  make();
  lose_completion_nth(1);
  a->bytes[0] = 5;
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 1, 0, 1, b->address(0), b->mr->rkey), 0);
  run_all();
  EXPECT_FALSE(a->poll_one().has_value());
  EXPECT_EQ(b->bytes[0], 5);
  flip_next(100);
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 2, 0, 99, b->address(0), b->mr->rkey), 0);
  ASSERT_EQ(a->post(IBV_WR_RDMA_WRITE, 3, 0, 100, b->address(200), b->mr->rkey), 0);
  run_all();
  EXPECT_EQ(std::memcmp(a->bytes.data(), b->bytes.data(), 99), 0);
  EXPECT_NE(std::memcmp(a->bytes.data(), &b->bytes[200], 100), 0);
}

// The order in which two queue pairs move is the seed's.
TEST(SoftverbsSeed, decides_the_order_across_queue_pairs) {
  const auto order = [](std::uint64_t seed) {
    run_deterministic(seed);
    set_delay(0.3);
    std::vector<unsigned char> seen;
    {
      Side a;
      Side b;
      Side c;
      Side d;
      a.connect(b.qp->qp_num, b.gid());
      b.connect(a.qp->qp_num, a.gid());
      c.connect(d.qp->qp_num, d.gid());
      d.connect(c.qp->qp_num, c.gid());
      for (std::uint64_t id = 1; id <= 8; ++id) {
        a.post(IBV_WR_RDMA_WRITE, id, 0, 1, b.address(0), b.mr->rkey);
        c.post(IBV_WR_RDMA_WRITE, id, 0, 1, d.address(0), d.mr->rkey);
      }
      while (step()) {
        if (a.poll_one()) seen.push_back('a');
        if (c.poll_one()) seen.push_back('c');
      }
    }
    no_faults();
    run_threaded();
    return seen;
  };
  const auto first = order(1);
  EXPECT_EQ(first.size(), 16u);
  EXPECT_EQ(first, order(1));
  bool another = false;
  for (std::uint64_t seed = 2; seed < 6; ++seed) another = another || order(seed) != first;
  EXPECT_TRUE(another);
}

// ---- threaded

struct SoftverbsThread : testing::Test {
  SoftverbsThread() { run_threaded(); }
};

TEST_F(SoftverbsThread, moves_by_itself_and_wakes_the_channel) {
  Side a;
  Side b;
  a.connect(b.qp->qp_num, b.gid());
  b.connect(a.qp->qp_num, a.gid());
  for (int round = 0; round < 200; ++round) {
    a.bytes[0] = static_cast<unsigned char>(round);
    ASSERT_EQ(a.post(IBV_WR_RDMA_WRITE, 1, 0, 4096, b.address(0), b.mr->rkey), 0);
    const auto wc = a.await();
    ASSERT_TRUE(wc.has_value());
    ASSERT_EQ(wc->status, IBV_WC_SUCCESS);
    ASSERT_EQ(b.bytes[0], static_cast<unsigned char>(round));
  }
}

// What dereg_mr and destroy_qp promise: no byte is touched afterwards.
TEST_F(SoftverbsThread, memory_is_left_alone_after_its_region_went_under_traffic) {
  for (int round = 0; round < 20; ++round) {
    Side a({.sends = 64, .completions = 256});
    Side b;
    a.connect(b.qp->qp_num, b.gid());
    b.connect(a.qp->qp_num, a.gid());
    for (std::uint64_t id = 0; id < 64; ++id) {
      ASSERT_EQ(a.post(IBV_WR_RDMA_WRITE, id, 0, 65536, b.address(0), b.mr->rkey), 0);
    }
    ASSERT_TRUE(a.await().has_value());
    const std::uint32_t rkey = b.mr->rkey;
    if (round % 2 == 0) {
      ibv_dereg_mr(b.mr);
      b.mr = nullptr;
    } else {
      ibv_destroy_qp(b.qp);
      b.qp = nullptr;
    }
    std::memset(b.bytes.data(), 7, b.bytes.size());
    // One at least comes after it went.
    std::optional<ibv_wc> wc;
    const auto well = [&wc] { return !wc || wc->status == IBV_WC_SUCCESS; };
    while (well() && a.post(IBV_WR_RDMA_WRITE, 64, 0, 65536, b.address(0), rkey) == ENOMEM) {
      wc = a.await();
      ASSERT_TRUE(wc.has_value());
    }
    while (well()) {
      wc = a.await();
      ASSERT_TRUE(wc.has_value());
    }
    EXPECT_EQ(wc->status, round % 2 == 0 ? IBV_WC_REM_ACCESS_ERR : IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(std::count(b.bytes.begin(), b.bytes.end(), 7), static_cast<std::ptrdiff_t>(b.bytes.size()));
  }
}

// ---- between processes

struct Told {
  std::uint32_t qpn = 0;
  ibv_gid gid{};
  std::uint64_t address = 0;
  std::uint32_t rkey = 0;
};

// The other process: connects, posts receives, answers every message by one of its own, until it is killed.
[[noreturn]] void be_the_other(int in, int out) {
  Side side;
  Told theirs;
  const Told ours{side.qp->qp_num, side.gid(), side.address(0), side.mr->rkey};
  if (::write(out, &ours, sizeof ours) != sizeof ours || ::read(in, &theirs, sizeof theirs) != sizeof theirs)
    _exit(1);
  for (std::size_t i = 0; i < side.bytes.size(); ++i) side.bytes[i] = static_cast<unsigned char>(i * 7);
  side.to_init();
  for (std::uint64_t id = 0; id < 8; ++id) side.post_receive(id, 60000, 16);
  side.to_rtr(theirs.qpn, theirs.gid);
  side.to_rts();
  const char ready = 1;
  if (::write(out, &ready, 1) != 1) _exit(1);
  while (true) {
    const auto wc = side.await();
    if (!wc || wc->status != IBV_WC_SUCCESS) continue;
    if (wc->opcode != IBV_WC_RECV && wc->opcode != IBV_WC_RECV_RDMA_WITH_IMM) continue;
    side.post_receive(wc->wr_id, 60000, 16);
    // What it sees of the memory at the time.
    side.post(IBV_WR_SEND, 1, 0, 8);
  }
}

TEST_F(SoftverbsThread, other_process_is_reached_and_missed_when_it_is_killed) {
  std::array<int, 2> there{};
  std::array<int, 2> back{};
  ASSERT_EQ(::pipe(there.data()), 0);
  ASSERT_EQ(::pipe(back.data()), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) be_the_other(there[0], back[1]);
  {
    Side side;
    Told theirs;
    ASSERT_EQ(::read(back[0], &theirs, sizeof theirs), static_cast<ssize_t>(sizeof theirs));
    const Told ours{side.qp->qp_num, side.gid(), side.address(0), side.mr->rkey};
    ASSERT_EQ(::write(there[1], &ours, sizeof ours), static_cast<ssize_t>(sizeof ours));
    side.connect(theirs.qpn, theirs.gid);
    for (std::uint64_t id = 100; id < 104; ++id) ASSERT_EQ(side.post_receive(id, 50000, 16), 0);
    char ready = 0;
    ASSERT_EQ(::read(back[0], &ready, 1), 1);

    ASSERT_EQ(side.post(IBV_WR_RDMA_READ, 1, 0, 40000, theirs.address, theirs.rkey), 0);
    ASSERT_EQ(side.await()->status, IBV_WC_SUCCESS);
    for (std::size_t i = 0; i < 40000; ++i) ASSERT_EQ(side.bytes[i], static_cast<unsigned char>(i * 7)) << i;
    // Both ways of a WRITE: in the request, and fetched by the other side.
    for (const std::uint32_t length : {8u, 40000u}) {
      std::memset(side.bytes.data(), static_cast<int>(length % 251), 40000);
      ASSERT_EQ(side.post(IBV_WR_RDMA_WRITE_WITH_IMM, 2, 0, length, theirs.address, theirs.rkey), 0);
      bool done = false;
      bool told = false;
      while (!done || !told) {
        const auto wc = side.await();
        ASSERT_TRUE(wc.has_value());
        ASSERT_EQ(wc->status, IBV_WC_SUCCESS);
        (wc->wr_id == 2 ? done : told) = true;
        if (wc->wr_id >= 100) {
          EXPECT_EQ(side.bytes[50000], length % 251) << "what the other side saw when it was told";
          ASSERT_EQ(side.post_receive(wc->wr_id, 50000, 16), 0);
        }
      }
      ASSERT_EQ(side.post(IBV_WR_RDMA_READ, 3, 0, length, theirs.address, theirs.rkey), 0);
      ASSERT_EQ(side.await()->status, IBV_WC_SUCCESS);
      EXPECT_EQ(side.bytes[length - 1], length % 251);
    }

    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(side.post(IBV_WR_RDMA_WRITE, 4, 0, 40000, theirs.address, theirs.rkey), 0);
    EXPECT_EQ(side.await()->status, IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(side.state(), IBV_QPS_ERR);
  }
  for (const int fd : {there[0], there[1], back[0], back[1]}) ::close(fd);
}

TEST_F(SoftverbsThread, other_process_refuses_what_it_did_not_open) {
  std::array<int, 2> there{};
  std::array<int, 2> back{};
  ASSERT_EQ(::pipe(there.data()), 0);
  ASSERT_EQ(::pipe(back.data()), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) be_the_other(there[0], back[1]);
  {
    Side side;
    Told theirs;
    ASSERT_EQ(::read(back[0], &theirs, sizeof theirs), static_cast<ssize_t>(sizeof theirs));
    const Told ours{side.qp->qp_num, side.gid(), side.address(0), side.mr->rkey};
    ASSERT_EQ(::write(there[1], &ours, sizeof ours), static_cast<ssize_t>(sizeof ours));
    side.connect(theirs.qpn, theirs.gid);
    char ready = 0;
    ASSERT_EQ(::read(back[0], &ready, 1), 1);
    ASSERT_EQ(side.post(IBV_WR_RDMA_READ, 1, 0, 8, theirs.address + 65536 - 4, theirs.rkey), 0);
    EXPECT_EQ(side.await()->status, IBV_WC_REM_ACCESS_ERR);
  }
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  for (const int fd : {there[0], there[1], back[0], back[1]}) ::close(fd);
}

}  // namespace
}  // namespace di::softverbs
