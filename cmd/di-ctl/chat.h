// cmd/di-ctl/chat.h: a conversation in a terminal, over the HTTP API like any other client.
//
// Owner: the one thread of di-ctl.  Bounds: `conversation_bytes_max` of the conversation, which the service
// bounds further by its context window, and those of http/client.h, http/sse.h and line_reader.h.
#pragma once

#include <cstddef>

#include "daemon/flags.h"

namespace di::ctl {

inline constexpr std::size_t conversation_bytes_max = 16 << 20;

// Answers go to standard output, everything else to standard error.  Returns an exit status: in a pipe the
// first failure ends it, on a terminal only what would fail for every question.
int chat(const daemon::ControlFlags& flags);

}  // namespace di::ctl
