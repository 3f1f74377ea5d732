// wire/messages.h: the structs of messages.def, their names and numbers.
//
// Plain values; equality is field by field.  No other file defines a struct that goes to or comes
// from the network.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/bytes.h"
#include "wire/ids.h"

namespace di::wire {

using U8 = std::uint8_t;
using U16 = std::uint16_t;
using U32 = std::uint32_t;
using U64 = std::uint64_t;
using F32 = float;
using F64 = double;
using Flag = bool;
using Text = std::string;
using Blob = Bytes;
using di::Key;
using di::RequestId;
template <class T>
using List = std::vector<T>;

inline constexpr U16 protocol_version = 4;
inline constexpr U32 block_none = 0xffffffff;  // failed_block: no block failed
inline constexpr U32 script_token_base = 0x40000000;

enum class Finish : U8 { none = 0, stop = 1, length = 2, cancelled = 3, error = 4 };
enum class SpanKind : U8 { wait = 0, swap_in = 1, compute = 2, cut = 3 };
enum class Leg : U8 { prefill = 0, decode = 1 };

// clang-format off
#define DI_RECORD(name, sentence) struct name {
#define DI_MESSAGE(name, number_, since_, route, sentence) \
  struct name {                                            \
    static constexpr U16 number = number_;                 \
    static constexpr U16 since = since_;                   \
    static constexpr std::string_view message_name = #name;
#define DI_FIELD(type, name, unit, sentence) type name{};
#define DI_END(name)                                  \
    bool operator==(const name&) const = default;     \
  };
#include "wire/messages.def"

// visit_fields(visitor, message) calls visitor.field("name", member) in encoding order.
#define DI_RECORD(name, sentence)                                \
  template <class V, class M>                                    \
    requires std::same_as<std::remove_const_t<M>, name>          \
  void visit_fields([[maybe_unused]] V& visitor, [[maybe_unused]] M& message) {
#define DI_MESSAGE(name, number_, since_, route, sentence) DI_RECORD(name, sentence)
#define DI_FIELD(type, name, unit, sentence) visitor.field(#name, message.name);
#define DI_END(name) }
#include "wire/messages.def"
// clang-format on

// What di-wire(7) prints and what a dump uses, in the order of messages.def.
struct FieldInfo {
  std::string_view type;
  std::string_view name;
  std::string_view unit;
  std::string_view sentence;
};
struct MessageInfo {
  bool is_record = false;
  U16 number = 0;
  U16 since = 0;
  std::string_view name;
  std::string_view route;
  std::string_view sentence;
  std::vector<FieldInfo> fields;
};
[[nodiscard]] const std::vector<MessageInfo>& message_table();
// Empty for a number that nobody knows.
[[nodiscard]] std::string_view message_name(U16 number);

}  // namespace di::wire
