#include <liburing.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

#include "base/assert.h"
#include "base/fd.h"
#include "store/queue.h"

namespace di::store {

namespace {

// user_data of the read that waits for wake().
constexpr std::uint64_t wake_data = ~std::uint64_t{0};
// The kernel takes no longer range at once.
constexpr std::size_t range_bytes_max = std::size_t{1} << 30;

class UringQueue final : public DiskQueue {
 public:
  UringQueue(Disk& disk, std::uint32_t depth) : disk_(disk), slots_(depth) {
    for (std::uint32_t i = depth; i-- > 0;) free_.push_back(i);
  }
  ~UringQueue() override {
    DI_ASSERT(free_.size() == slots_.size());
    if (ring_made_) io_uring_queue_exit(&ring_);
  }

  Status open() {
    wake_fd_ = Fd(::eventfd(0, EFD_CLOEXEC));
    if (!wake_fd_.valid()) return errno_error("eventfd");
    // One access may be an entry for each of its pieces.
    const auto entries = static_cast<unsigned>(slots_.size() * 2 + 2);
    // Kernels before 6.1 do not know these flags.
    int made = io_uring_queue_init(entries, &ring_, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    if (made == -EINVAL) made = io_uring_queue_init(entries, &ring_, 0);
    if (made < 0) {
      Error error = errno_error("io_uring_setup", -made);
      if (made == -ENOSYS) error.code = Code::unsupported;
      return error;
    }
    ring_made_ = true;
    const int fd = disk_.descriptor();
    if (const int failed = io_uring_register_files(&ring_, &fd, 1); failed < 0) {
      return errno_error("io_uring_register_files", -failed);
    }
    // Not everywhere, and nothing depends on these.
    io_uring_register_ring_fd(&ring_);
    ranges_.resize(memory_ranges_max);
    if (io_uring_register_buffers_sparse(&ring_, static_cast<unsigned>(memory_ranges_max)) < 0)
      ranges_.clear();
    arm_wake();
    return {};
  }

  void submit(const DiskOp& op) override {
    DI_ASSERT(!free_.empty());
    const std::uint32_t slot = free_.back();
    free_.pop_back();
    Flight& flight = slots_[slot];
    flight = Flight{};
    flight.op = op;
    flight.bytes = op.bytes();
    switch (op.kind) {
      case DiskOp::Kind::flush: {
        io_uring_sqe* sqe = next_entry();
        io_uring_prep_fsync(sqe, 0, IORING_FSYNC_DATASYNC);
        return prepared(sqe, slot);
      }
      case DiskOp::Kind::read:
      case DiskOp::Kind::write:
        break;
    }
    const bool is_read = op.kind == DiskOp::Kind::read;
    std::array<int, disk_pieces_max> ranges;
    bool registered = op.count > 0;
    for (std::uint32_t i = 0; i < op.count; ++i) {
      ranges[i] = range_of(op.pieces[i]);
      registered = registered && ranges[i] >= 0;
    }
    // A write stays one write: its pieces must not reach the disk apart.
    if (registered && (op.count == 1 || (is_read && op.count <= 2))) {
      std::uint64_t offset = op.offset;
      for (std::uint32_t i = 0; i < op.count; ++i) {
        const MutableByteView piece = op.pieces[i];
        const auto length = static_cast<unsigned>(piece.size());
        io_uring_sqe* sqe = next_entry();
        if (is_read) {
          io_uring_prep_read_fixed(sqe, 0, piece.data(), length, offset, ranges[i]);
        } else {
          io_uring_prep_write_fixed(sqe, 0, piece.data(), length, offset, ranges[i]);
        }
        prepared(sqe, slot);
        offset += piece.size();
      }
      return;
    }
    for (std::uint32_t i = 0; i < op.count; ++i) {
      flight.vector[i] = {op.pieces[i].data(), op.pieces[i].size()};
    }
    io_uring_sqe* sqe = next_entry();
    if (is_read) {
      io_uring_prep_readv(sqe, 0, flight.vector.data(), op.count, op.offset);
    } else {
      io_uring_prep_writev(sqe, 0, flight.vector.data(), op.count, op.offset);
    }
    prepared(sqe, slot);
  }

  void collect(bool wait, std::vector<Done>& done) override {
    if (wait) {
      const int sent = io_uring_submit_and_wait(&ring_, 1);
      DI_ASSERT(sent >= 0 || sent == -EINTR || sent == -EAGAIN || sent == -EBUSY);
    } else {
      io_uring_submit_and_get_events(&ring_);
    }
    io_uring_cqe* cqe = nullptr;
    unsigned head = 0;
    unsigned seen = 0;
    bool woken = false;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++seen;
      const std::uint64_t data = io_uring_cqe_get_data64(cqe);
      if (data == wake_data) {
        woken = true;
        continue;
      }
      const auto slot = static_cast<std::uint32_t>(data);
      Flight& flight = slots_[slot];
      if (cqe->res < 0) {
        flight.failed = cqe->res;
      } else {
        flight.moved += static_cast<std::uint64_t>(cqe->res);
      }
      if (--flight.entries > 0) continue;
      done.push_back({flight.op.tag, end(flight)});
      free_.push_back(slot);
    }
    io_uring_cq_advance(&ring_, seen);
    if (woken) arm_wake();
  }

  void wake() override {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_fd_.get(), &one, sizeof one);
  }

  void memory_add(MutableByteView memory) override {
    while (!memory.empty()) {
      const MutableByteView part = memory.first(std::min(memory.size(), range_bytes_max));
      const auto free = std::find_if(ranges_.begin(), ranges_.end(), [](const auto& r) { return r.empty(); });
      // Without room, or with less locked memory than it takes, its accesses are only a little dearer.
      if (free == ranges_.end() || !set_range(static_cast<unsigned>(free - ranges_.begin()), part)) return;
      *free = part;
      memory = memory.subspan(part.size());
    }
  }

  void memory_remove(MutableByteView memory) override {
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
      if (ranges_[i].empty() || ranges_[i].data() < memory.data() ||
          ranges_[i].data() >= memory.data() + memory.size()) {
        continue;
      }
      set_range(static_cast<unsigned>(i), {});
      ranges_[i] = {};
    }
  }

  [[nodiscard]] std::string_view name() const override { return "uring"; }

 private:
  struct Flight {
    DiskOp op;
    std::array<iovec, disk_pieces_max> vector{};
    std::uint32_t entries = 0;  // without their completion
    int failed = 0;
    std::uint64_t bytes = 0;
    std::uint64_t moved = 0;
  };

  void prepared(io_uring_sqe* sqe, std::uint32_t slot) {
    ++slots_[slot].entries;
    sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(sqe, slot);
  }

  io_uring_sqe* next_entry() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {
      io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
    }
    DI_ASSERT(sqe != nullptr);
    return sqe;
  }

  void arm_wake() {
    io_uring_sqe* sqe = next_entry();
    io_uring_prep_read(sqe, wake_fd_.get(), &wake_count_, sizeof wake_count_, 0);
    io_uring_sqe_set_data64(sqe, wake_data);
  }

  // The rare ends: an error, which is named, and an access that was cut short or could not be queued, which
  // is done again by the function that blocks, and has its error.
  Status end(const Flight& flight) {
    const DiskOp& op = flight.op;
    const bool again = flight.failed == -EAGAIN || flight.failed == -EINTR;
    if (flight.failed < 0 && !again) {
      std::string what = op.kind == DiskOp::Kind::read    ? "read "
                         : op.kind == DiskOp::Kind::write ? "write "
                                                          : "fdatasync ";
      return errno_error(what.append(disk_.path()), -flight.failed);
    }
    if (!again && flight.moved == flight.bytes) return {};
    const std::span<const MutableByteView> pieces(op.pieces.data(), op.count);
    switch (op.kind) {
      case DiskOp::Kind::read:
        return disk_.read_pieces(op.offset, pieces);
      case DiskOp::Kind::write: {
        std::array<ByteView, disk_pieces_max> from;
        std::copy(pieces.begin(), pieces.end(), from.begin());
        return disk_.write_pieces(op.offset, {from.data(), op.count});
      }
      case DiskOp::Kind::flush:
        return disk_.flush();
    }
    DI_PANIC("no such operation");
  }

  [[nodiscard]] int range_of(MutableByteView piece) const {
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
      const MutableByteView range = ranges_[i];
      if (piece.data() >= range.data() && piece.data() + piece.size() <= range.data() + range.size()) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  bool set_range(unsigned index, MutableByteView memory) {
    const iovec range{memory.data(), memory.size()};
    const __u64 tag = 0;
    return io_uring_register_buffers_update_tag(&ring_, index, &range, &tag, 1) >= 0;
  }

  Disk& disk_;
  io_uring ring_{};
  bool ring_made_ = false;
  Fd wake_fd_;
  std::uint64_t wake_count_ = 0;
  std::vector<Flight> slots_;
  std::vector<std::uint32_t> free_;
  std::vector<MutableByteView> ranges_;  // empty: the kernel takes none
};

}  // namespace

Result<std::unique_ptr<DiskQueue>> disk_queue_uring(Disk& disk, std::uint32_t depth) {
  if (disk.descriptor() < 0) return Error{Code::unsupported, 0, "the disk has no descriptor"};
  auto queue = std::make_unique<UringQueue>(disk, depth);
  DI_TRY(queue->open());
  return std::unique_ptr<DiskQueue>(std::move(queue));
}

}  // namespace di::store
