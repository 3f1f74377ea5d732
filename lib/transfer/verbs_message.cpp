#include "transfer/verbs_message.h"

#include <algorithm>

#include "base/assert.h"
#include "transfer/frame.h"

namespace di::transfer {

namespace {

Error corrupt(const char* why) {
  return Error{Code::corrupt, 0, why};
}

class Writer {
 public:
  template <class T>
  void put(T value) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof value);
    put_le<T>(&bytes_[at], value);
  }
  void put_bytes(ByteView bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  [[nodiscard]] Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

// Zeros from where the bytes end on, and says so.
class Reader {
 public:
  explicit Reader(ByteView bytes) : left_(bytes) {}
  template <class T>
  T get() {
    const ByteView at = get_bytes(sizeof(T));
    return at.empty() ? T{} : get_le<T>(at.data());
  }
  ByteView get_bytes(std::size_t count) {
    if (left_.size() < count) {
      short_ = true;
      left_ = {};
      return {};
    }
    const ByteView at = left_.first(count);
    left_ = left_.subspan(count);
    return at;
  }
  [[nodiscard]] bool short_of_bytes() const { return short_; }
  [[nodiscard]] bool all_read() const { return !short_ && left_.empty(); }

 private:
  ByteView left_;
  bool short_ = false;
};

bool fits(const VerbsAddress& lane) {
  return lane.qpn <= 0xffffff && lane.psn <= 0xffffff && lane.mtu >= 1 && lane.mtu <= 5;
}

}  // namespace

Bytes verbs_setup_encode(const VerbsSetup& setup) {
  DI_ASSERT(setup.lanes.size() <= verbs_lanes_max && setup.memories.size() <= verbs_memories_max);
  Writer out;
  const Bytes peer = peer_encode(setup.peer);
  out.put(static_cast<std::uint16_t>(peer.size()));
  out.put_bytes(peer);
  out.put(setup.rails);
  out.put(static_cast<std::uint8_t>(setup.lanes.size()));
  for (const auto& [rail, lane] : setup.lanes) {
    out.put(rail);
    out.put(lane.qpn);
    out.put(lane.psn);
    out.put(lane.lid);
    out.put(lane.mtu);
    out.put(lane.reads_max);
    out.put(static_cast<std::uint8_t>(lane.global ? 1 : 0));
    out.put_bytes(std::as_bytes(std::span(lane.gid)));
  }
  out.put(static_cast<std::uint32_t>(setup.memories.size()));
  for (const VerbsMemory& memory : setup.memories) {
    DI_ASSERT(memory.keys.size() == setup.lanes.size());
    out.put(memory.address);
    out.put(memory.bytes);
    for (const std::uint32_t key : memory.keys) out.put(key);
  }
  return out.take();
}

Result<VerbsSetup> verbs_setup_decode(ByteView bytes) {
  Reader in(bytes);
  VerbsSetup setup;
  const ByteView named = in.get_bytes(in.get<std::uint16_t>());
  Result<Peer> peer = peer_decode(named);
  if (!peer) return peer.error();
  setup.peer = *std::move(peer);
  setup.rails = in.get<std::uint8_t>();
  const auto lanes = in.get<std::uint8_t>();
  if (setup.rails > verbs_lanes_max || lanes == 0 || lanes > setup.rails)
    return corrupt("set-up: no lane, or too many");
  for (std::uint8_t i = 0; i < lanes && !in.short_of_bytes(); ++i) {
    const auto rail = in.get<std::uint8_t>();
    if (rail >= setup.rails || (i > 0 && rail <= setup.lanes.back().rail))
      return corrupt("set-up: no such rail");
    VerbsAddress lane;
    lane.qpn = in.get<std::uint32_t>();
    lane.psn = in.get<std::uint32_t>();
    lane.lid = in.get<std::uint16_t>();
    lane.mtu = in.get<std::uint8_t>();
    lane.reads_max = in.get<std::uint8_t>();
    const auto global = in.get<std::uint8_t>();
    const ByteView gid = in.get_bytes(lane.gid.size());
    std::transform(gid.begin(), gid.end(), lane.gid.begin(),
                   [](std::byte b) { return std::to_integer<std::uint8_t>(b); });
    if (in.short_of_bytes() || !fits(lane) || global > 1) return corrupt("set-up: no queue pair");
    lane.global = global == 1;
    setup.lanes.push_back({rail, lane});
  }
  const auto memories = in.get<std::uint32_t>();
  if (memories > verbs_memories_max) return corrupt("set-up: too much memory");
  for (std::uint32_t i = 0; i < memories && !in.short_of_bytes(); ++i) {
    VerbsMemory memory;
    memory.address = in.get<std::uint64_t>();
    memory.bytes = in.get<std::uint64_t>();
    for (std::uint8_t lane = 0; lane < lanes; ++lane) memory.keys.push_back(in.get<std::uint32_t>());
    if (memory.bytes == 0 || memory.bytes > verbs_region_bytes_max ||
        memory.address > UINT64_MAX - memory.bytes) {
      return corrupt("set-up: no memory");
    }
    setup.memories.push_back(std::move(memory));
  }
  if (!in.all_read()) return corrupt("set-up: of another length");
  return setup;
}

std::array<std::byte, verbs_message_bytes> verbs_message_encode(const VerbsMessage& message) {
  std::array<std::byte, verbs_message_bytes> at{};
  put_le<std::uint8_t>(&at[0], static_cast<std::uint8_t>(message.kind));
  put_le<std::uint16_t>(&at[2], static_cast<std::uint16_t>(message.code));
  put_le<std::uint32_t>(&at[4], message.tag);
  put_le<std::uint64_t>(&at[8], message.transfer);
  put_le<std::uint32_t>(&at[16], message.slot.slot);
  put_le<std::uint32_t>(&at[20], message.slot.generation);
  put_le<std::uint64_t>(&at[24], message.offset);
  put_le<std::uint64_t>(&at[32], message.memory_offset);
  put_le<std::uint32_t>(&at[40], message.memory);
  put_le<std::uint32_t>(&at[44], message.bytes);
  return at;
}

Result<VerbsMessage> verbs_message_decode(ByteView bytes) {
  if (bytes.size() != verbs_message_bytes) return corrupt("message of another length");
  const auto kind = get_le<std::uint8_t>(&bytes[0]);
  const auto code = get_le<std::uint16_t>(&bytes[2]);
  if (kind < static_cast<std::uint8_t>(VerbsKind::read) ||
      kind > static_cast<std::uint8_t>(VerbsKind::answer)) {
    return corrupt("message of no known kind");
  }
  if (code > static_cast<std::uint16_t>(Code::stale)) return corrupt("message with an unknown code");
  VerbsMessage message;
  message.kind = static_cast<VerbsKind>(kind);
  message.code = static_cast<Code>(code);
  message.tag = get_le<std::uint32_t>(&bytes[4]);
  message.transfer = get_le<std::uint64_t>(&bytes[8]);
  message.slot = {get_le<std::uint32_t>(&bytes[16]), get_le<std::uint32_t>(&bytes[20])};
  message.offset = get_le<std::uint64_t>(&bytes[24]);
  message.memory_offset = get_le<std::uint64_t>(&bytes[32]);
  message.memory = get_le<std::uint32_t>(&bytes[40]);
  message.bytes = get_le<std::uint32_t>(&bytes[44]);
  const bool answer = message.kind == VerbsKind::answer;
  if (get_le<std::uint8_t>(&bytes[1]) != 0 || (!answer && message.code != Code::ok)) {
    return corrupt("message: reserved bytes are not zero");
  }
  const auto zero = [](std::byte b) { return b == std::byte{0}; };
  if (answer && !std::all_of(bytes.begin() + 8, bytes.end(), zero))
    return corrupt("answer with a request in it");
  if (!answer && message.bytes == 0) return corrupt("message that asks for nothing");
  return message;
}

}  // namespace di::transfer
