#include "api/text.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace di::api {

namespace {

constexpr std::string_view replacement = "\xef\xbf\xbd";  // U+FFFD

}  // namespace

// Table 3-7 of the Unicode standard: what may follow each first byte.  The ranges of the second
// byte shut out overlong forms (E0, F0), surrogates (ED) and code points above 10FFFF (F4).
void Utf8Assembler::begin(unsigned char byte, std::string& out) {
  next_min_ = 0x80;
  next_max_ = 0xbf;
  if (byte < 0x80) {
    out.push_back(static_cast<char>(byte));
    return;
  }
  if (byte >= 0xc2 && byte <= 0xdf) {
    want_count_ = 2;
  } else if (byte >= 0xe0 && byte <= 0xef) {
    want_count_ = 3;
    if (byte == 0xe0) next_min_ = 0xa0;
    if (byte == 0xed) next_max_ = 0x9f;
  } else if (byte >= 0xf0 && byte <= 0xf4) {
    want_count_ = 4;
    if (byte == 0xf0) next_min_ = 0x90;
    if (byte == 0xf4) next_max_ = 0x8f;
  } else {
    out.append(replacement);
    return;
  }
  held_[0] = static_cast<char>(byte);
  held_count_ = 1;
}

void Utf8Assembler::push(std::string_view bytes, std::string& out) {
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (held_count_ == 0) {
      begin(byte, out);
      continue;
    }
    if (byte < next_min_ || byte > next_max_) {
      out.append(replacement);
      held_count_ = 0;
      begin(byte, out);
      continue;
    }
    next_min_ = 0x80;
    next_max_ = 0xbf;
    held_[held_count_++] = c;
    if (held_count_ == want_count_) {
      out.append(held_.data(), held_count_);
      held_count_ = 0;
    }
  }
}

void Utf8Assembler::finish(std::string& out) {
  if (held_count_ > 0) out.append(replacement);
  held_count_ = 0;
}

StopMatcher::StopMatcher(std::vector<std::string> stops) {
  DI_ASSERT(stops.size() <= stop_strings_max);
  stops_.reserve(stops.size());
  for (std::string& text : stops) {
    DI_ASSERT(!text.empty() && text.size() <= stop_bytes_max);
    first_[static_cast<unsigned char>(text[0])] = true;
    Stop stop;
    stop.fallback.assign(text.size() + 1, 0);
    std::uint16_t border = 0;
    for (std::size_t i = 1; i < text.size(); ++i) {
      while (border > 0 && text[i] != text[border]) border = stop.fallback[border];
      if (text[i] == text[border]) ++border;
      stop.fallback[i + 1] = border;
    }
    stop.text = std::move(text);
    stops_.push_back(std::move(stop));
  }
}

bool StopMatcher::push(std::string_view text, std::string& out) {
  if (matched_) return true;
  if (stops_.empty()) {
    out.append(text);
    return false;
  }
  for (const char c : text) {
    if (held_.empty() && !first_[static_cast<unsigned char>(c)]) {
      out.push_back(c);
      continue;
    }
    held_.push_back(c);
    std::size_t keep = 0;     // the longest end of the stream that begins a stop string
    std::size_t longest = 0;  // the longest stop string that ends here
    for (Stop& stop : stops_) {
      while (stop.matched > 0 && stop.text[stop.matched] != c) stop.matched = stop.fallback[stop.matched];
      if (stop.text[stop.matched] == c) ++stop.matched;
      keep = std::max<std::size_t>(keep, stop.matched);
      if (stop.matched == stop.text.size()) longest = std::max(longest, stop.text.size());
    }
    if (longest > 0) {
      out.append(held_, 0, held_.size() - longest);
      held_.clear();
      matched_ = true;
      return true;
    }
    if (keep < held_.size()) {
      out.append(held_, 0, held_.size() - keep);
      held_.erase(0, held_.size() - keep);
    }
  }
  return false;
}

void StopMatcher::pass(std::string_view text, std::string& out) {
  if (matched_) return;
  finish(out);
  out.append(text);
}

void StopMatcher::finish(std::string& out) {
  if (matched_) return;
  out.append(held_);
  held_.clear();
  for (Stop& stop : stops_) stop.matched = 0;
}

AnswerText::AnswerText(Options options) : stops_(std::move(options.stops)), min_tokens_(options.min_tokens) {}

bool AnswerText::token(std::string_view bytes, std::string& out) {
  if (stops_.matched()) return true;
  ++tokens_;
  std::string text;
  utf8_.push(bytes, text);
  if (tokens_ <= min_tokens_) {
    stops_.pass(text, out);
    return false;
  }
  return stops_.push(text, out);
}

void AnswerText::finish(std::string& out) {
  std::string text;
  utf8_.finish(text);
  if (!stops_.push(text, out)) stops_.finish(out);
}

}  // namespace di::api
