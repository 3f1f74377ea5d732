// api/messages.h: the `messages` of a request, as OpenAI's clients send them.
//
// Pure; any thread.  Bounds: those of the JSON.
//
// Decisions where the sources differ:
//  - The role developer is another word for system.
//  - Text parts of one message are joined by a newline, as vLLM does.
//  - content may be null for every role and is then empty; it may be missing for none.
//  - Tool calls in the history and the role `tool` are refused until tools exist, warm or cold alike.
#pragma once

#include <vector>

#include "api/fields.h"
#include "model/chat.h"

namespace di::api {

// At least one message; roles system, user, assistant.  False once an error is set.
bool messages_read(FieldReader& fields, const Json& top, std::vector<model::ChatMessage>& out);

}  // namespace di::api
