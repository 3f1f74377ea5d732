// base/checksum.h: CRC32C (Castagnoli) as iSCSI and NVMe use it: initial and final inversion.
#pragma once

#include <cstdint>

#include "base/bytes.h"

namespace di {

[[nodiscard]] std::uint32_t crc32c(ByteView bytes);
// Continues a CRC: crc32c(a ‖ b) == crc32c_extend(crc32c(a), b).
[[nodiscard]] std::uint32_t crc32c_extend(std::uint32_t crc, ByteView bytes);

}  // namespace di
