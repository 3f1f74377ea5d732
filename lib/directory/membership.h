// directory/membership.h: which instances there are, and which start of each is the present one.
//
// What it owns: one row per instance name ever seen (number, last generation, the process that has
// it), and the members: the registered instances that are not lost.  Registration is two steps, so
// that a generation is durable before anybody hears of it:
//   judge(message) -> Admission{row, ...} or an Error      nothing changes
//   hold(admission), when the row is another; the shell writes it to the catalogue; keep(row); judge(message) again
//   admit(admission, now)                                  the member is in, the epoch moves
//
// Rules for generations, per instance name:
//   the boot number is the row's           the same process: it keeps its generation
//   another boot, generation 0 said        a new start: above the row's generation; `busy` while the process
//                                          that has the name is a member
//   another boot, a generation said        `stale` when the row is newer or equal (that process was
//                                          replaced); otherwise di-meta lost the row: kept, and so is the
//                                          number, when it can have been issued and is nobody else's
//
// A row goes when the name is forgotten, or for a new name when there are too many: that of the name that came
// first, of those that are neither here nor remembered.  Issued keeps its numbers from being given out again.
//
// Pure: time is the monotonic clock's.  A member is lost when nothing was heard for `lost_after`, or
// when the shell knows better (a broken connection).  Who is gone is remembered for whoever looks at the
// fleet.  Owner: the directory's thread.  Bounds: members_max, instance_rows_max, away_max, and the lengths that
// judge() checks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/time.h"
#include "directory/lease.h"
#include "wire/messages.h"

namespace di::directory {

inline constexpr std::size_t members_max = 4096;         // messages.def, meta_members
inline constexpr std::size_t instance_rows_max = 65536;  // names that came and went
inline constexpr std::size_t endpoint_bytes_max = 512;
inline constexpr std::size_t model_bytes_max = 256;
inline constexpr std::uint16_t ranks_max = 1024;
inline constexpr Duration member_lost_after = seconds(3);
// Nobody was issued one above; a new start finds room above what was said.
inline constexpr std::uint32_t said_generation_max = 1U << 31;
inline constexpr std::size_t away_max = 1024;  // members that are gone and remembered
inline constexpr Duration away_forgotten_after = std::chrono::hours(24);

enum class MemberState : std::uint8_t { up = 0, draining = 1, leaves = 2 };

// What outlives a restart of di-meta.
struct InstanceRow {
  std::string instance;
  std::uint32_t id = 0;          // number in headers, never another name's
  std::uint32_t generation = 0;  // the last one issued
  std::uint64_t boot = 0;        // the process it was issued to

  bool operator==(const InstanceRow&) const = default;
};

// No number below next_id is given to another name, and every new start has a generation above `generation`.
struct Issued {
  std::uint32_t next_id = 1;
  std::uint32_t generation = 0;

  bool operator==(const Issued&) const = default;
};

class Membership {
 public:
  // `rows` and `issued` as the catalogue has them; `run` makes epochs grow across restarts.
  Membership(std::vector<InstanceRow> rows, std::uint64_t run, Issued issued = {});

  struct Admission {
    wire::Member member;  // with id and generation
    InstanceRow row;
    bool row_changed = false;            // write it before admit()
    std::optional<InstanceRow> dropped;  // and drop this one with it
  };
  // Errors, with the reason to send: invalid (what is wrong with which field), stale (this process was
  // replaced), busy (another process has the name), exists (another layout, fingerprint or revision of a model
  // that is being served), no_space (too many members or names).
  [[nodiscard]] Result<Admission> judge(const wire::meta_register& message) const;

  // The row is being written: its number is nobody else's, and the dropped one is gone.
  void hold(const Admission& admission);
  // It is in the catalogue.
  void keep(const InstanceRow& row);
  // To be written with every row that goes.
  [[nodiscard]] const Issued& issued() const { return issued_; }

  struct Change {
    bool changed = false;      // the list is another: the epoch moved
    std::vector<Holder> lost;  // generations that ended with this
  };
  Change admit(const Admission& admission, Instant now);
  // A member whose connection broke and is up again without a registration in between.  Nothing for
  // one whose generation is not the last one issued.
  Change rejoin(const wire::Member& member, Instant now);
  // The instance that runs the directory: never lost by silence.
  Change admit_self(const Admission& admission);
  Change set_state(std::uint32_t id, std::uint32_t generation, MemberState state);
  // The connection of the member is up and not silent.
  void heard(std::uint32_t id, std::uint32_t generation, Instant now);
  Change lost(std::uint32_t id, std::uint32_t generation);
  // Members that were silent for member_lost_after.
  Change step(Instant now);
  [[nodiscard]] Instant next_due() const;

  // A member that is gone, as it was last.  It is remembered until it is back, until forget(), or for
  // away_forgotten_after; of more than away_max those are forgotten that are gone longest.
  struct Away {
    wire::Member member;
    Instant since;         // it was heard of last
    bool stopped = false;  // it drained, or said that it leaves
  };
  // By instance name.
  [[nodiscard]] const std::map<std::string, Away>& away() const { return away_; }
  // One that the catalogue has something of, and that has not come yet.
  void expect(const std::string& instance, const std::string& role, Instant now);
  struct Forgotten {
    InstanceRow row;
    std::optional<Away> away;
  };
  // Forgets also its row, which is for the shell to drop.  Nothing when it is here, or not known.
  std::optional<Forgotten> forget(const std::string& instance);
  // The row could not be dropped: as it was, unless another of the name came meanwhile.
  void restore(const Forgotten& forgotten);

  // Null when there is no such member (of this generation).
  [[nodiscard]] const wire::Member* find(std::uint32_t id) const;
  [[nodiscard]] const wire::Member* find(std::uint32_t id, std::uint32_t generation) const;
  // In the order of instance names.
  [[nodiscard]] std::vector<wire::Member> members() const;
  [[nodiscard]] wire::meta_members snapshot() const;
  [[nodiscard]] std::size_t count() const { return members_.size(); }
  [[nodiscard]] std::uint64_t epoch() const { return epoch_; }

 private:
  struct Present {
    wire::Member member;
    Instant heard;
    bool self = false;
  };
  Change admit_as(const Admission& admission, Instant now, bool self);
  Change remove(std::map<std::string, Present>::iterator at, bool stopped);
  void remember(Away away);
  [[nodiscard]] bool may_keep(std::uint32_t id) const;
  [[nodiscard]] const InstanceRow* oldest_unused() const;
  void drop(const std::string& instance);

  std::map<std::string, InstanceRow> rows_;
  std::map<std::string, std::uint32_t> held_;  // names and numbers whose rows are being written
  std::map<std::string, Present> members_;     // by instance name
  std::map<std::string, Away> away_;
  std::map<std::uint32_t, std::string> instances_;  // number -> name of a present member
  Issued issued_;
  std::uint64_t epoch_;
};

}  // namespace di::directory
