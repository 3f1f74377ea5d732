// cmd/di-decode/decode.h: the decode daemon: rank/decode.h in the shell of worker/program.h.
#pragma once

#include <memory>

#include "worker/program.h"

namespace di::decode {

[[nodiscard]] std::unique_ptr<worker::RankProgram> make_program(const worker::Config& config);

}  // namespace di::decode
