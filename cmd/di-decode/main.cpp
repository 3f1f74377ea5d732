// di-decode: writes answers.
//
// Owns a group of decode ranks: their engines, KV pools and seats.  It is asked for a seat by di-router
// (decode_seat), expects the pages of the request at the host's di-kvd (kv_expect), starts when
// everything is sealed there (kv_seated), and streams one token_batch a step.  Pages that fill while
// it decodes go to the arena too, so that the next turn of a conversation hits.  It never reads long
// prompts and never talks to clients.
// See di-decode(8).
#include "decode.h"

int main(int argc, char** argv) {
  const di::daemon::Description about{"di-decode",
                                      "writes answers: continuous batching over handed-over requests"};
  const auto parsed = di::daemon::parse<di::worker::Config>(about, argc, argv, di::worker::decode_params,
                                                            di::worker::validate);
  const auto program = di::decode::make_program(parsed.config);
  return di::daemon::run(parsed, *program);
}
