// store/io_write.h: columns and tables on their way onto a disk, in the order that a loss of power asks for.
//
// Metadata (the `before` of puts, and syncs) is one lane: first in, first out, one stage at a time.  A slot is
// written when the `before` of its put and of every put queued earlier is on the disk; otherwise slots overtake
// each other and syncs, which carry no meaning among themselves: a sync describes only puts that had ended when
// it began, and a segment with a put under way is not closed.  When a metadata write fails nothing is written
// any more.
//
// Owner: the disk thread.  Bounds: what is in flight by Accesses, the rest by whoever counts the jobs.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "store/io_access.h"
#include "store/io_ends.h"
#include "store/io_jobs.h"

namespace di::store {

class Writes {
 public:
  // Both outlive it.
  Writes(Accesses& accesses, JobEnds& ends) : accesses_(accesses), ends_(ends) {}

  // Puts and syncs, in their order.
  void take(ColumnPut&& put);
  void take(SyncJob&& sync);
  // Begins what may be begun.
  void begin();
  [[nodiscard]] bool idle() const { return puts_.empty() && metadata_.empty(); }

 private:
  struct Writing final : AccessOwner {
    Writing(Writes& owner, ColumnPut&& put)
        : writes(owner), job(std::make_shared<ColumnPut>(std::move(put))) {}
    void accessed(Access&, const Status& status) override { writes.slot_written(*this, status); }

    Writes& writes;
    std::shared_ptr<ColumnPut> job;
    std::list<Writing>::iterator self;
    std::uint64_t ticket = 0;  // of the last put with metadata, up to this one
    PutOutcome outcome;
  };
  // A flush, or writes that may be in flight together.
  struct Stage {
    bool flush = false;
    std::vector<const MetaWrite*> writes;
  };
  struct Metadata final : AccessOwner {
    void accessed(Access&, const Status& status) override {
      --outstanding;
      if (!status.ok() && !failed) failed = status.error();
    }

    std::vector<Stage> stages;
    std::size_t stage = 0;
    std::size_t next = 0;  // in the stage
    std::uint32_t outstanding = 0;
    std::optional<Error> failed;
    Writing* put = nullptr;  // whose `before` this is
    std::shared_ptr<SyncJob> sync;
  };

  static void stages_of(const std::vector<MetaWrite>& writes, bool together, std::vector<Stage>& stages);
  void begin_metadata();
  void end_metadata();
  void begin_puts();
  void begin_put(Writing& put);
  // Compared with the header's checksums.
  static Result<std::vector<ByteView>> payload_of(const ColumnPut& job);
  void slot_written(Writing& put, const Status& status);
  void end_put(Writing& put);

  Accesses& accesses_;
  JobEnds& ends_;
  std::list<Writing> puts_;
  std::deque<Writing*> puts_waiting_;
  std::uint32_t puts_in_flight_ = 0;
  std::deque<Metadata> metadata_;
  std::uint64_t tickets_ = 0;       // given
  std::uint64_t tickets_done_ = 0;  // whose metadata is on the disk
  bool broken_ = false;
};

}  // namespace di::store
