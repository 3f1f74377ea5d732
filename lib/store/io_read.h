// store/io_read.h: columns and headers on their way off a disk.
//
// A read of a column is its header and its payload, in one access when the payload goes into one piece, and
// further ones that grow; otherwise the header first, which says what goes where.  The payload alone
// is read when the caller knows all that the header could say.
//   state     event                                       next
//   (none)    take                                        queued, by priority
//   queued    room to read                                reading; one access more, or all of them
//   reading   the header says that it goes elsewhere      queued again, when no access runs
//   reading   a part came, in order                       reading; its groups are told
//   reading   the last                                    (none); told
//   any       an access failed, something does not match, (none) when no access runs any more; told
//             it is cancelled
// Headers, for an inventory, are read behind all columns.
//
// Owner: the disk thread.  Bounds: what is in flight by Accesses, the rest by whoever counts the jobs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "kv/layout.h"
#include "store/io_access.h"
#include "store/io_ends.h"
#include "store/io_jobs.h"

namespace di::store {

class ColumnReads {
 public:
  static constexpr std::uint32_t priorities = 3;
  // A longer payload is read in several parts, so that its first groups are there early.  Each is as long as what
  // comes before it, within these bounds: shorter ones cost more CPU (64 KiB: four times as much for a byte as
  // 512), and so do more of them on the way to another machine (pages of 4.5 MB in parts of 512 KiB: 6 %).
  static constexpr std::uint64_t run_bytes_min = std::uint64_t{512} << 10;
  static constexpr std::uint64_t run_bytes_max = std::uint64_t{2} << 20;
  static constexpr std::uint64_t run_bytes(std::uint64_t before) {
    return std::clamp(before, run_bytes_min, run_bytes_max);
  }

  // Both outlive it.
  ColumnReads(Accesses& accesses, JobEnds& ends) : accesses_(accesses), ends_(ends) {}

  void take(ColumnRead&& read);
  // Those that were cancelled and have nothing under way end, whether there is room or not: a disk that does not
  // answer keeps nobody's place.
  void end_cancelled();
  // Begins what there is room for.
  void begin();
  [[nodiscard]] bool idle() const { return columns_.empty(); }

 private:
  // A part of a payload that is read at once.
  struct Part {
    std::uint64_t offset = 0;  // in the payload
    std::uint64_t bytes = 0;
    bool half = false;  // the fault point comes after it
    bool done = false;
  };
  struct Column final : AccessOwner {
    Column(ColumnReads& owner, ColumnRead&& read)
        : reads(owner), job(std::make_shared<ColumnRead>(std::move(read))) {}
    void accessed(Access& access, const Status& status) override { reads.accessed(*this, access, status); }

    ColumnReads& reads;
    std::shared_ptr<ColumnRead> job;
    std::list<Column>::iterator self;
    std::optional<SlotHeader> header;
    const std::vector<std::uint32_t>* segments = nullptr;        // once known: the header's, or the job's
    std::array<std::uint64_t, kv::groups_max + 1> segment_at{};  // in the payload
    MutableByteView whole;  // given: what is read before the header is known goes there
    std::vector<Part> parts;
    std::size_t next_part = 0;  // to submit
    std::size_t in_order = 0;   // parts [0, in_order) are done
    std::uint32_t next_group = 0;
    std::uint32_t outstanding = 0;
    bool begun = false;
    bool elsewhere = false;  // the header says that the payload goes elsewhere than into `whole`
    bool queued = false;
    std::optional<Error> failed;
    std::uint64_t bytes = 0;
  };

  [[nodiscard]] static bool cancelled(const Column& column);
  // Has something to submit.
  [[nodiscard]] static bool wants(const Column& column);
  void queue(Column& column, bool first);
  void step(Column& column);
  void step_head(Column& column);
  void step_part(Column& column);
  // The index of an access is that of its part.
  void accessed(Column& column, Access& access, const Status& status);
  void head_arrived(Column& column, ByteView bytes);
  static void segments_known(Column& column, const std::vector<std::uint32_t>& segments);
  static void make_parts(Column& column);
  static void part_arrived(Column& column, std::size_t index);
  void groups_arrived(Column& column);
  static Result<MutableByteView> segment_of(Column& column, std::uint32_t group);
  // `by_disk`: what does not match counts against it.
  void fail(Column& column, Error error, bool by_disk = true);
  // Ends the column when nothing of it runs any more, or sees to it that it goes on.
  void settle(Column& column);

  Accesses& accesses_;
  JobEnds& ends_;
  std::list<Column> columns_;
  std::array<std::deque<Column*>, priorities> ready_;  // have something to submit
};

class HeaderReads {
 public:
  // Both outlive it.
  HeaderReads(Accesses& accesses, JobEnds& ends) : accesses_(accesses), ends_(ends) {}

  void take(HeadersRead&& read);
  // Begins what there is room for, and ends what is over.
  void begin();
  [[nodiscard]] bool idle() const { return headers_.empty(); }

 private:
  struct Headers final : AccessOwner {
    Headers(HeaderReads& owner, HeadersRead&& read)
        : reads(owner), job(std::make_shared<HeadersRead>(std::move(read))), found(job->reads.size()) {}
    void accessed(Access& access, const Status& status) override { reads.accessed(*this, access, status); }

    HeaderReads& reads;
    std::shared_ptr<HeadersRead> job;
    std::vector<std::optional<Result<SlotHeader>>> found;
    std::size_t next = 0;
    std::size_t outstanding = 0;
  };
  // The index of an access is that of its header.
  void accessed(Headers& headers, Access& access, const Status& status);

  Accesses& accesses_;
  JobEnds& ends_;
  std::list<Headers> headers_;
};

}  // namespace di::store
