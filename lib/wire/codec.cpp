#include "wire/codec.h"

#include "base/checksum.h"

namespace di::wire {

namespace {

constexpr U32 magic = 0x30574944;  // "DIW0"

}  // namespace

std::string_view fault_name(Fault fault) {
  switch (fault) {
    case Fault::header_short:
      return "header_short";
    case Fault::magic:
      return "magic";
    case Fault::header_checksum:
      return "header_checksum";
    case Fault::body_length:
      return "body_length";
    case Fault::body_checksum:
      return "body_checksum";
    case Fault::cluster:
      return "cluster";
    case Fault::version:
      return "version";
    case Fault::number:
      return "number";
    case Fault::reserved:
      return "reserved";
    case Fault::field_range:
      return "field_range";
    case Fault::trailing_bytes:
      return "trailing_bytes";
  }
  return "unknown";
}

std::array<std::byte, header_bytes> header_encode(Header header, ByteView body) {
  DI_ASSERT(body.size() <= body_bytes_max);
  std::array<std::byte, header_bytes> raw{};
  put_le<U32>(&raw[0], magic);
  put_le<U16>(&raw[4], header.version);
  put_le<U16>(&raw[6], header.number);
  put_le<U32>(&raw[12], static_cast<U32>(body.size()));
  put_le<U32>(&raw[16], crc32c(body));
  put_le<U32>(&raw[20], header.cluster);
  put_le<U32>(&raw[24], header.sender);
  put_le<U32>(&raw[28], header.sender_generation);
  put_le<U32>(&raw[32], header.destination_generation);
  std::copy(header.request.raw.begin(), header.request.raw.end(), raw.begin() + 36);
  put_le<U16>(&raw[52], header.attempt);
  put_le<U16>(&raw[54], header.rank);
  put_le<U32>(&raw[56], header.deadline_ms);
  put_le<U32>(&raw[8], crc32c(raw));
  return raw;
}

Decoded<Header> header_decode(ByteView frame, ByteView body) {
  if (frame.size() != header_bytes) return Fault::header_short;
  std::array<std::byte, header_bytes> raw;
  std::copy(frame.begin(), frame.end(), raw.begin());
  if (get_le<U32>(&raw[0]) != magic) return Fault::magic;
  const U32 crc = get_le<U32>(&raw[8]);
  put_le<U32>(&raw[8], 0);
  if (crc32c(raw) != crc) return Fault::header_checksum;
  Header header;
  header.version = get_le<U16>(&raw[4]);
  if (header.version != protocol_version) return Fault::version;
  header.number = get_le<U16>(&raw[6]);
  header.body_bytes = get_le<U32>(&raw[12]);
  header.body_crc = get_le<U32>(&raw[16]);
  header.cluster = get_le<U32>(&raw[20]);
  header.sender = get_le<U32>(&raw[24]);
  header.sender_generation = get_le<U32>(&raw[28]);
  header.destination_generation = get_le<U32>(&raw[32]);
  std::copy(raw.begin() + 36, raw.begin() + 52, header.request.raw.begin());
  header.attempt = get_le<U16>(&raw[52]);
  header.rank = get_le<U16>(&raw[54]);
  header.deadline_ms = get_le<U32>(&raw[56]);
  if (get_le<U32>(&raw[60]) != 0) return Fault::reserved;
  if (body.size() != header.body_bytes || body.size() > body_bytes_max) return Fault::body_length;
  if (crc32c(body) != header.body_crc) return Fault::body_checksum;
  return header;
}

namespace {

template <class M>
Decoded<Bytes> reencode_as(ByteView body) {
  Decoded<M> message = body_decode<M>(body);
  if (!message) return message.fault();
  return body_encode(*message);
}

}  // namespace

Decoded<Bytes> reencode(U16 number, ByteView body) {
  switch (number) {
#define DI_RECORD(name, sentence)
#define DI_MESSAGE(name, number_, since_, route, sentence) \
  case number_:                                            \
    return reencode_as<name>(body);
#define DI_FIELD(type, name, unit, sentence)
#define DI_END(name)
#include "wire/messages.def"
    default:
      return Fault::number;
  }
}

}  // namespace di::wire
