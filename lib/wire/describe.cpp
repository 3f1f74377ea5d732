#include "wire/codec.h"

namespace di::wire {

namespace {

class Dump {
 public:
  void field(std::string_view name, const Text& v) { put(name, "<" + std::to_string(v.size()) + " bytes>"); }
  void field(std::string_view name, const Blob& v) { put(name, "<" + std::to_string(v.size()) + " bytes>"); }
  void field(std::string_view name, const Key& v) { put(name, v.text().substr(0, 16)); }
  void field(std::string_view name, const RequestId& v) { put(name, v.text()); }
  void field(std::string_view name, Flag v) { put(name, v ? "true" : "false"); }
  template <class T>
  requires(std::is_arithmetic_v<T> && !std::same_as<T, bool>) void field(std::string_view name, T v) {
    put(name, std::to_string(v));
  }
  template <class T>
  requires(!std::same_as<T, std::byte>) void field(std::string_view name, const List<T>& v) {
    put(name, "[" + std::to_string(v.size()) + "]");
  }
  template <class R>
  requires std::is_class_v<R>
  void field(std::string_view name, const R& record) {
    put(name, "{");
    visit_fields(*this, record);
    text += "}";
  }

  std::string text;

 private:
  void put(std::string_view name, const std::string& value) {
    if (!text.empty() && text.back() != '{') text += ' ';
    text.append(name).append("=").append(value);
  }
};

template <class M>
std::string describe_as(ByteView body) {
  Decoded<M> message = body_decode<M>(body);
  std::string out(M::message_name);
  if (!message) return out + "{" + std::string(fault_name(message.fault())) + "}";
  Dump dump;
  visit_fields(dump, std::as_const(*message));
  return out + "{" + dump.text + "}";
}

}  // namespace

std::string describe(U16 number, ByteView body) {
  switch (number) {
#define DI_RECORD(name, sentence)
#define DI_MESSAGE(name, number_, since_, route, sentence) \
  case number_:                                            \
    return describe_as<name>(body);
#define DI_FIELD(type, name, unit, sentence)
#define DI_END(name)
#include "wire/messages.def"
    default:
      return "unknown message " + std::to_string(number);
  }
}

const std::vector<MessageInfo>& message_table() {
  static const std::vector<MessageInfo> table = {
#define DI_RECORD(name, sentence) \
  {                               \
    true, 0, 0, #name, "", sentence, {
#define DI_MESSAGE(name, number_, since_, route, sentence) {false, number_, since_, #name, route, sentence, {
#define DI_FIELD(type, name, unit, sentence) {#type, #name, unit, sentence},
#define DI_END(name) \
  }                  \
  }                  \
  ,
#include "wire/messages.def"
  };
  return table;
}

std::string_view message_name(U16 number) {
  for (const MessageInfo& info : message_table()) {
    if (!info.is_record && info.number == number) return info.name;
  }
  return {};
}

}  // namespace di::wire
