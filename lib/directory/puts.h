// directory/puts.h: stripes that are being written.
//
//   state   event                          next
//   (none)  open                           open, its new keys refused to other writers
//   open    opened again by its holder     open, the deadline moves
//   open    taken: commit, abort, deadline, loss of its holder     (none)
// What happens to the columns is the index's business.
//
// Pure.  Owner: the directory's thread.  Bound: puts_max.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "directory/lease.h"
#include "directory/placement.h"

namespace di::directory {

struct OpenPut {
  std::uint64_t id = 0;
  Holder holder;
  Key fingerprint;
  std::uint64_t tenant = 0;
  std::vector<wire::PutPage> pages;
  std::vector<Key> claims;  // those of its keys that nobody had when it opened
  StripeForm form;
  std::vector<Target> targets;  // of the stored columns, in their order
  std::vector<std::uint64_t> column_bytes;
  kv::Evictor::Item item = kv::Evictor::item_none;
  Instant deadline;
};

class OpenPuts {
 public:
  explicit OpenPuts(std::size_t puts_max) : puts_max_(puts_max) {}

  [[nodiscard]] bool full() const { return puts_.size() >= puts_max_; }
  void open(OpenPut put);
  void extend(std::uint64_t id, Instant deadline);
  [[nodiscard]] OpenPut take(std::uint64_t id);

  [[nodiscard]] const OpenPut* find(std::uint64_t id) const;
  // The put that has the key open.
  [[nodiscard]] const OpenPut* find(const Key& key) const;
  [[nodiscard]] std::vector<std::uint64_t> of(const Holder& holder) const;
  // The first that is due at `now`.
  [[nodiscard]] std::optional<std::uint64_t> due(Instant now) const;
  [[nodiscard]] Instant next_due() const { return due_.empty() ? instant_never : due_.begin()->first; }
  [[nodiscard]] std::size_t count() const { return puts_.size(); }
  [[nodiscard]] const std::map<std::uint64_t, OpenPut>& all() const { return puts_; }

  void test_check() const;

 private:
  std::size_t puts_max_;
  std::map<std::uint64_t, OpenPut> puts_;
  std::map<Key, std::uint64_t> keys_;
  std::set<std::pair<Instant, std::uint64_t>> due_;
};

}  // namespace di::directory
