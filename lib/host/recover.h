// host/recover.h: what a restarted di-kvd makes of the arena that it was handed.
//
// Every slot that the last owner had given out is quarantined at first.  A page whose record is right is
// offered again when its bytes have been compared with its checksums: by a thread of the shell, before
// anybody is told of it.  (A page was verified when it was sealed, and nobody writes it afterwards; but what
// guarded that until now was a process that has just died, perhaps of a bug, and reading 10 GB/s in the
// background costs less than one wrong byte.)
//
// Processes that mapped the arena on behalf of the last owner may still write into what they were granted
// and read what they had pinned.  Until the last of them has let go, offered pages are pinned here and the
// other slots stay quarantined; then the pages become evictable, in an order like that of their use.
// Hosts and stores on other machines need no such care: what they wrote came in through the process that died.
//
// Pure.  Owner: the core of a di-kvd host.  Bounds: the slots of the arena.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "host/pages.h"

namespace di::host {

class Recovery {
 public:
  explicit Recovery(Pages& pages) : pages_(pages) {}

  // Before anything else happens.  Errors: as Pages::restore.
  Status begin(const kv::Layout& layout, kv::Former former);

  // Bytes to be compared.
  struct Segment {
    std::uint64_t offset = 0;  // of the payload
    std::uint64_t bytes = 0;
    std::uint32_t crc = 0;
  };
  struct Check {
    std::uint32_t slot = 0;
    std::vector<Segment> segments;
  };
  // Everything that is to be checked, the pages of last use first.  Once.
  [[nodiscard]] std::vector<Check> take_checks();
  // The page is offered, or not.
  void checked(std::uint32_t slot, bool good);
  // No process of an earlier owner uses the arena any more.
  void former_gone();

  // Something is still kept for processes of before, or not yet checked.
  [[nodiscard]] bool active() const { return former_ || !records_.empty(); }
  [[nodiscard]] std::size_t pins() const { return pins_.slots.size(); }
  // Pages whose bytes were not what their record says, or whose record does not fit the layout.
  [[nodiscard]] std::uint64_t bad() const { return bad_; }
  [[nodiscard]] Status check(std::map<std::uint32_t, std::uint32_t>& pins) const;

 private:
  void settle();

  Pages& pages_;
  bool former_ = false;
  std::map<std::uint32_t, kv::PageRecord> records_;  // not yet checked, by slot
  PinSet pins_;                                      // offered, until settle()
  std::uint64_t bad_ = 0;
};

}  // namespace di::host
