#include "store/index.h"

namespace di::store {

void SlotIndex::reserve(std::size_t entries) {
  DI_ASSERT(count_ == 0);
  // Shards are not quite alike.
  const std::size_t each = entries / shards + entries / shards / 16 + 1;
  std::size_t cells = cells_min;
  while (room(cells) < each) cells *= 2;
  for (Shard& shard : shards_) shard.cells.assign(cells, none);
}

std::size_t SlotIndex::bytes() const {
  std::size_t sum = sizeof *this;
  for (const Shard& shard : shards_) sum += shard.cells.capacity() * sizeof(std::uint32_t);
  return sum;
}

}  // namespace di::store
