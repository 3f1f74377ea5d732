// Queue pairs: requests, data and answers.
#include <algorithm>
#include <set>

#include "base/assert.h"
#include "base/log.h"
#include "transfer/verbs_state.h"

namespace di::transfer::verbs {

namespace {

// Completions of one queue pair in one turn.
constexpr std::size_t poll_batch = 32;
constexpr int poll_batches_max = 8;

}  // namespace

void Verbs::on_ready(Rail& rail) {
  for (int i = 0; i < poll_batches_max; ++i) {
    const std::optional<std::uint64_t> id = rail.verbs->next_ready();
    if (!id) break;
    drain_lane(*id);
  }
  // What was answered makes room.
  pump();
}

void Verbs::on_rail_event(Rail& rail) {
  while (const std::optional<VerbsEvent> event = rail.verbs->next_event()) {
    switch (event->kind) {
      case VerbsEvent::Kind::port_down:
        // What is under way there may outlast it: the queue pairs find out when their retries are exhausted.
        rail.up = false;
        log_warn("fabric", "port down", {{"rail", rail.verbs->name()}});
        break;
      case VerbsEvent::Kind::port_up:
        rail.up = true;
        log_info("fabric", "port up", {{"rail", rail.verbs->name()}});
        break;
      case VerbsEvent::Kind::queue_pair:
        if (const auto broken = lanes_.find(event->id); broken != lanes_.end())
          close(*broken->second->connection);
        break;
      case VerbsEvent::Kind::device: {
        rail.up = false;
        log_error("fabric", "device failed", {{"rail", rail.verbs->name()}, {"event", event->what}});
        std::set<Connection*> theirs;
        for (const auto& [id, lane] : lanes_) {
          if (rails_[lane->rail].get() == &rail) theirs.insert(lane->connection);
        }
        for (Connection* connection : theirs) close(*connection);
        break;
      }
      case VerbsEvent::Kind::other:
        break;
    }
  }
}

void Verbs::drain_lane(std::uint64_t id) {
  std::array<VerbsCompletion, poll_batch> found;
  for (int batch = 0; batch < poll_batches_max; ++batch) {
    const auto at = lanes_.find(id);
    if (at == lanes_.end()) return;
    Lane& lane = *at->second;
    const Result<std::size_t> got = lane.qp->poll(found);
    if (!got) {
      log_warn("fabric", "completions lost",
               {{"peer", lane.connection->peer.instance}, {"why", got.error()}});
      close(*lane.connection);
      return;
    }
    if (*got == 0) return;
    for (std::size_t i = 0; i < *got; ++i) {
      if (!on_completion(lane, found[i])) return;
    }
  }
  // Others have their turn; no event tells of what is left.
  later([this, id] {
    drain_lane(id);
    pump();
  });
}

bool Verbs::on_completion(Lane& lane, const VerbsCompletion& completion) {
  if (!completion.ok) {
    log_write(LogLevel::debug, "fabric", "queue pair failed",
              {{"peer", lane.connection->peer.instance}, {"why", completion.why}});
    if (Link* link = lane.connection->link) link->rests_until[lane.rail] = now() + options_.rail_rest;
    close(*lane.connection);
    return false;
  }
  const auto index = static_cast<std::uint32_t>(completion.id);
  switch (static_cast<Post>(completion.id >> 32)) {
    case Post::receive:
      return on_receive(lane, completion);
    case Post::send:
      --lane.sends_out;
      break;
    case Post::data:
      --lane.sends_out;
      if (!served(lane, index)) return false;
      break;
  }
  while (true) {
    const auto next = std::find_if(lane.deferred.begin(), lane.deferred.end(),
                                   [&](const VerbsMessage& each) { return may_serve(lane, each); });
    if (next == lane.deferred.end()) return true;
    const VerbsMessage message = *next;
    lane.deferred.erase(next);
    if (!serve(lane, message)) return false;
  }
}

// Room for data and answer, and the place that the tag names.  The other side may have the data of a read, and
// ask anew with that place, before this side's device says that it has sent them: the acknowledgement goes apart,
// and may get lost.
bool Verbs::may_serve(const Lane& lane, const VerbsMessage& message) {
  return lane.sends_out + 2 <= sends_max && !lane.asks[message.tag % verbs_units_max].used;
}

VerbsPiece Verbs::message_place(const Lane& lane, std::uint32_t index) const {
  const Rail& rail = *rails_[lane.rail];
  std::byte* block = rail.messages.bytes().data() + lane.block * message_block_bytes;
  return {block + index * verbs_message_bytes, verbs_message_bytes, rail.message_keys.local};
}

bool Verbs::post_receive(Lane& lane, std::uint32_t index) {
  return posted(lane, lane.qp->receive(post_id(Post::receive, index), message_place(lane, index)));
}

bool Verbs::posted(Lane& lane, const Status& status) {
  if (status.ok()) return true;
  log_warn("fabric", "queue pair refuses",
           {{"peer", lane.connection->peer.instance}, {"why", status.error()}});
  close(*lane.connection);
  return false;
}

bool Verbs::on_receive(Lane& lane, const VerbsCompletion& completion) {
  const auto index = static_cast<std::uint32_t>(completion.id);
  if (completion.imm) {
    return post_receive(lane, index) && answered(lane, *completion.imm, Code::ok, true, completion.bytes);
  }
  const VerbsPiece place = message_place(lane, index);
  const Result<VerbsMessage> message =
      verbs_message_decode({place.at, std::min<std::size_t>(completion.bytes, place.bytes)});
  const bool answers = lane.connection->dialled;
  if (!message || (message->kind == VerbsKind::answer) != answers) return malformed(*lane.connection);
  if (!post_receive(lane, index)) return false;
  return answers ? answered(lane, message->tag, message->code, false, 0) : asked(lane, *message);
}

bool Verbs::answered(Lane& lane, std::uint32_t tag, Code code, bool by_imm, std::uint32_t bytes) {
  const std::uint32_t index = tag % verbs_units_max;
  Unit& unit = lane.units[index];
  if (!lane.connection->dialled || !unit.used || unit.tag != tag) return malformed(*lane.connection);
  const OpId id = unit.op;
  Op& op = ops_.at(id);
  const bool fits = by_imm ? !op.write && bytes == unit.bytes : op.write || code != Code::ok;
  if (!fits) return malformed(*lane.connection);
  unit.used = false;
  lane.free_units.push_back(index);
  Link& link = *lane.connection->link;
  if (unit.bounce) {
    if (by_imm && !op.ending) {
      std::memcpy(op.local + unit.offset,
                  bounce_.bytes().data() + *unit.bounce * std::uint64_t{options_.max_unit_bytes}, unit.bytes);
    }
    free_bounce_.push_back(*unit.bounce);
    --link.bounces;
  }
  link.under_way_bytes -= unit.bytes;
  link.moved_at = now();
  --op.under_way;
  if (code == Code::ok) {
    (op.write ? counters_.written_bytes : counters_.read_bytes) += unit.bytes;
    op.acked += unit.bytes;
  }
  measure(link, code == Code::ok ? unit.bytes : 0);
  if (op.ending) {
    if (op.under_way == 0) finish_op(id, *op.ending);
  } else if (code != Code::ok) {
    fail_op(id, code);
  } else if (op.acked == op.place.bytes) {
    finish_op(id, Code::ok);
  }
  return true;
}

bool Verbs::asked(Lane& lane, const VerbsMessage& message) {
  const std::vector<VerbsMemory>& memories = lane.connection->memories;
  const Ask& before = lane.asks[message.tag % verbs_units_max];
  if ((before.used && before.tag == message.tag) || lane.deferred.size() >= verbs_units_max ||
      message.bytes > frame_payload_bytes_max || message.memory >= memories.size()) {
    return malformed(*lane.connection);
  }
  const VerbsMemory& memory = memories[message.memory];
  if (message.memory_offset > memory.bytes || message.bytes > memory.bytes - message.memory_offset) {
    return malformed(*lane.connection);
  }
  if (!may_serve(lane, message)) {
    lane.deferred.push_back(message);
    return true;
  }
  return serve(lane, message);
}

bool Verbs::serve(Lane& lane, const VerbsMessage& message) {
  const Connection& connection = *lane.connection;
  const std::uint32_t index = message.tag % verbs_units_max;
  DI_ASSERT(!lane.asks[index].used);
  if (options_.region == nullptr) {
    ++counters_.refused_transfer;
    return answer(lane, message.tag, Code::not_found);
  }
  const bool write = message.kind == VerbsKind::write;
  const Admission admission =
      exposures_.check(connection.peer, message.transfer, write ? Access::write : Access::read,
                       {message.slot, message.offset, message.bytes}, *options_.region, now());
  if (admission.refusal) {
    ++(counters_.*refusal_counter(admission.refusal->why));
    return answer(lane, message.tag, admission.refusal->code);
  }
  const std::vector<VerbsPiece> pieces = pieces_of(admission.bytes, lane.rail);
  if (pieces.empty()) {
    log_error("fabric", "slot is not registered", {{"slot", message.slot.slot}});
    return answer(lane, message.tag, Code::io);
  }
  const VerbsMemory& memory = connection.memories[message.memory];
  const std::uint64_t address = memory.address + message.memory_offset;
  lane.asks[index] = {true, message.tag, message.transfer, write, message.bytes};
  ++lane.sends_out;
  const std::uint64_t id = post_id(Post::data, index);
  return posted(lane, write ? lane.qp->read(id, pieces, address, memory.keys[lane.keys])
                            : lane.qp->write_imm(id, pieces, address, memory.keys[lane.keys], message.tag));
}

bool Verbs::served(Lane& lane, std::uint32_t index) {
  Ask& ask = lane.asks[index];
  DI_ASSERT(ask.used);
  ask.used = false;
  (ask.write ? counters_.received_bytes : counters_.served_bytes) += ask.bytes;
  if (!concealing_.empty()) look_at_concealing();
  return !ask.write || answer(lane, ask.tag, Code::ok);
}

bool Verbs::answer(Lane& lane, std::uint32_t tag, Code code) {
  VerbsMessage message;
  message.kind = VerbsKind::answer;
  message.tag = tag;
  message.code = code;
  ++lane.sends_out;
  return posted(lane,
                lane.qp->send(post_id(Post::send, tag % verbs_units_max), verbs_message_encode(message)));
}

}  // namespace di::transfer::verbs
