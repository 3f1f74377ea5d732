#include "store/index.h"

namespace di::store {

std::size_t SlotIndex::bytes() const {
  std::size_t sum = sizeof *this;
  for (const Shard& shard : shards_) sum += shard.cells.capacity() * sizeof(std::uint32_t);
  return sum;
}

}  // namespace di::store
