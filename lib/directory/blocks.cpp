#include "directory/blocks.h"

namespace di::directory {

BlockMap::BlockMap(std::size_t entries_max, const Keys& keys)
    : keys_(keys),
      entries_max_(entries_max),
      count_(entries_max + entries_max / 3 + 16),
      cells_(static_cast<std::uint64_t*>(std::calloc(count_, sizeof(std::uint64_t)))) {
  if (cells_ == nullptr) DI_PANIC("no memory for the table of blocks");
}

bool BlockMap::insert(const Key& key, BlockRef ref) {
  DI_ASSERT(ref.slot <= slots_max);
  if (entries_ >= entries_max_) return false;
  if (!has(key)) ++distinct_;
  const std::uint64_t hash = hash_of(key);
  std::size_t at = home(hash);
  while (cells_[at] != 0) at = next(at);
  cells_[at] = pack(ref, hash);
  ++entries_;
  return true;
}

bool BlockMap::erase(const Key& key, BlockRef ref) {
  const std::uint64_t hash = hash_of(key);
  const std::uint64_t cell = pack(ref, hash);
  std::size_t hole = home(hash);
  while (cells_[hole] != cell) {
    if (cells_[hole] == 0) return false;
    hole = next(hole);
  }
  cells_[hole] = 0;
  --entries_;
  // Entries behind the hole move up unless that would put them before their home.
  for (std::size_t at = next(hole); cells_[at] != 0; at = next(at)) {
    const std::size_t wants = home(hash_of(keys_.key_of(unpack(cells_[at]))));
    const bool stays = hole < at ? wants > hole && wants <= at : wants > hole || wants <= at;
    if (stays) continue;
    cells_[hole] = cells_[at];
    cells_[at] = 0;
    hole = at;
  }
  if (!has(key)) --distinct_;
  return true;
}

}  // namespace di::directory
