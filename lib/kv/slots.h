// kv/slots.h: who has which bytes of an arena's payload, and which readiness entries are taken.
//
// Pure and deterministic: the lowest free place is taken first.  Owner: the core of a di-kvd host.
// Bounds: payload units, slots_max and entries_max, all fixed at creation.
//
// A buddy allocator hands out runs of 2^k units.  The unit is the padded page of one block, so a page
// of n blocks takes at most the next power of two of n units, and pages of another layout fit as well
// (they take as many units as their bytes need, rounded up).
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/result.h"

namespace di::kv {

// Runs of units; an order is the logarithm of a run's length.
class BuddyPool {
 public:
  static constexpr std::uint32_t orders_max = 20;

  explicit BuddyPool(std::uint32_t units);

  // First unit of a run of 2^order units, aligned to its length; nothing when no such run is free.
  [[nodiscard]] std::optional<std::uint32_t> take(std::uint32_t order);
  // The run at `first`; false when it is no run of this order, or not free.
  [[nodiscard]] bool take_at(std::uint32_t first, std::uint32_t order);
  // Gives back what take(order) returned.
  void give_back(std::uint32_t first, std::uint32_t order);

  [[nodiscard]] std::uint32_t units() const { return units_; }
  [[nodiscard]] std::uint32_t units_free() const { return free_units_; }
  // Longest run that take() would find; nothing when everything is taken.
  [[nodiscard]] std::optional<std::uint32_t> order_free_max() const;

 private:
  std::uint32_t units_;
  std::uint32_t free_units_ = 0;
  std::vector<std::set<std::uint32_t>> free_;  // by order
};

// A slot that is taken.  `generation` is never 0 and changes each time the slot number is taken.
struct SlotPlace {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint64_t offset = 0;  // in the payload
  std::uint64_t bytes = 0;   // at least what was asked for

  bool operator==(const SlotPlace&) const = default;
};

class SlotPool {
 public:
  struct Options {
    std::uint64_t payload_bytes = 0;
    std::uint64_t unit_bytes = 0;  // a multiple of 4 KiB: layout.page_bytes(1)
    std::uint32_t slots_max = 0;
  };
  // Errors: invalid, when not even one unit fits.
  static Result<SlotPool> create(const Options& options);

  // Errors: busy when no slot number or no run is free; invalid when it can never fit.
  Result<SlotPlace> take(std::uint64_t bytes);
  // All or nothing.
  Result<std::vector<SlotPlace>> take_all(std::span<const std::uint64_t> bytes);
  void give_back(std::uint32_t slot);

  // A slot as an earlier owner of the arena had taken it.  Errors: corrupt (not a run of units, taken).
  Status restore(const SlotPlace& place);
  // The last generation that a slot number had: the next one follows it.
  void restore_generation(std::uint32_t slot, std::uint32_t generation);
  [[nodiscard]] std::uint32_t last_generation(std::uint32_t slot) const {
    return slots_[slot].place.generation;
  }

  // True when `slot` is taken and has this generation: the check for what peers name.
  [[nodiscard]] bool current(std::uint32_t slot, std::uint32_t generation) const;
  [[nodiscard]] const SlotPlace& place(std::uint32_t slot) const;

  [[nodiscard]] std::uint32_t slots_used() const { return slots_used_; }
  [[nodiscard]] std::uint64_t bytes_total() const { return std::uint64_t{buddy_.units()} * unit_bytes_; }
  [[nodiscard]] std::uint64_t bytes_free() const { return std::uint64_t{buddy_.units_free()} * unit_bytes_; }

 private:
  struct Slot {
    SlotPlace place;
    std::uint32_t order = 0;
    bool taken = false;
  };
  SlotPool(const Options& options, std::uint32_t units);

  std::uint64_t unit_bytes_;
  BuddyPool buddy_;
  std::vector<Slot> slots_;
  std::set<std::uint32_t> free_numbers_;
  std::uint32_t slots_used_ = 0;
};

// Readiness entries, named by handles: index in the lower 16 bits, generation (never 0) in the upper.
// No handle is 0.
class EntryPool {
 public:
  static constexpr std::uint32_t entries_max = 65536;

  explicit EntryPool(std::uint32_t entries);

  // Errors: busy.
  Result<std::uint32_t> take();
  void give_back(std::uint32_t handle);
  // The last generation that an index had.
  void restore_generation(std::uint32_t index, std::uint16_t generation);
  [[nodiscard]] bool current(std::uint32_t handle) const;
  [[nodiscard]] std::uint32_t used() const { return used_; }

 private:
  std::vector<std::uint16_t> generations_;  // of each index: last handed out
  std::vector<bool> taken_;
  std::set<std::uint32_t> free_;
  std::uint32_t used_ = 0;
};

[[nodiscard]] constexpr std::uint32_t entry_index(std::uint32_t handle) {
  return handle & 0xffff;
}
[[nodiscard]] constexpr std::uint32_t entry_generation(std::uint32_t handle) {
  return handle >> 16;
}

}  // namespace di::kv
