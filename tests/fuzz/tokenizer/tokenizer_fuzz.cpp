// The tokenizer on any bytes.  An input that begins with '{' is a tokenizer.json: it is refused with an
// error that names it, or it encodes.  Any other is text for a good tokenizer: it comes back unchanged and
// holds no added token that nobody asked for.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "base/assert.h"
#include "model/tokenizer.h"

namespace {

using di::model::Tokenizer;

constexpr std::string_view sample = "The router's 12345 \u4f60\u597d \r\n\t <think> x_y(z) \xff\xc3";

void encode_back(const Tokenizer& tokenizer, std::string_view text) {
  for (const bool allow_special : {false, true}) {
    const auto ids = tokenizer.encode(text, {.allow_special = allow_special});
    DI_ASSERT(ids.ok() && tokenizer.decode(*ids) == text);
    DI_ASSERT(allow_special || std::none_of(ids->begin(), ids->end(), [&](di::model::TokenId id) {
                return tokenizer.id_special(id) || id >= 700;  // the last four are added, not special
              }));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  static const auto good = Tokenizer::load(DI_SOURCE_DIR "/tests/golden/tokenizer/v3.json");
  DI_ASSERT(good.ok());
  const std::string_view input(reinterpret_cast<const char*>(data), bytes);
  if (input.empty() || input.front() != '{') {
    encode_back(*good, input);
    return 0;
  }
  const auto tokenizer = Tokenizer::parse(input, "input");
  if (!tokenizer) {
    DI_ASSERT(tokenizer.error().message.starts_with("input: "));
    return 0;
  }
  const auto ids = tokenizer->encode(sample, {.allow_special = true});
  if (!ids) return 0;
  for (const di::model::TokenId id : *ids) DI_ASSERT(tokenizer->id_known(id) && id < tokenizer->vocab_size());
  return 0;
}
