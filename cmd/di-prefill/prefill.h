// cmd/di-prefill/prefill.h: the prefill daemon: rank/prefill.h in the shell of worker/program.h.
#pragma once

#include <memory>

#include "worker/program.h"

namespace di::prefill {

[[nodiscard]] std::unique_ptr<worker::RankProgram> make_program(const worker::Config& config);

}  // namespace di::prefill
