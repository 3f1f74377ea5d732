// rank/gauge.h: a count of something acquirable, by name, for `di-ctl show gauges`.
#pragma once

#include <cstdint>
#include <string>

namespace di::rank {

struct Gauge {
  std::string name;
  std::uint64_t count = 0;
};

}  // namespace di::rank
