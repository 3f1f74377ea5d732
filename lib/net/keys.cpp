#include "net/keys.h"

#include <sys/stat.h>

#include <algorithm>
#include <cctype>

#include "base/file.h"

namespace di::net {

namespace {

constexpr std::string_view z85 =
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";

constexpr std::string_view blanks = " \t\r";

struct Word {
  std::string_view text;
  std::size_t column = 0;  // from 1
};

// The words of a line up to its comment.
std::vector<Word> words_of(std::string_view line) {
  std::vector<Word> words;
  std::size_t at = 0;
  while ((at = line.find_first_not_of(blanks, at)) != std::string_view::npos && line[at] != '#') {
    const std::size_t end = std::min(line.find_first_of(blanks, at), line.size());
    words.push_back({line.substr(at, end - at), at + 1});
    at = end;
  }
  return words;
}

}  // namespace

bool is_key(std::string_view text) {
  return text.size() == key_chars && text.front() != '#' &&
         text.find_first_not_of(z85) == std::string_view::npos;
}

bool is_instance(std::string_view text) {
  return text.size() <= key_name_chars_max && text.find('.', 1) != std::string_view::npos &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_';
         });
}

Result<KeyPair> key_pair_read(const std::string& path, std::string_view instance) {
  struct stat info {};
  std::string file = path;
  if (::stat(file.c_str(), &info) == 0 && S_ISDIR(info.st_mode))
    file += "/" + std::string(instance) + ".secret";
  const Result<std::string> text = file_read(file, 4096);
  if (!text) return text.error();
  if (::stat(file.c_str(), &info) != 0) return errno_error(file);
  if ((info.st_mode & 0077) != 0) {
    return Error{Code::denied, 0, file + ": others than its owner may use it: chmod 600"};
  }
  std::vector<Word> words;
  std::string_view rest = *text;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    const std::vector<Word> line = words_of(rest.substr(0, end));
    words.insert(words.end(), line.begin(), line.end());
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  if (words.size() != 1 || !is_key(words[0].text)) {
    return Error{Code::invalid, 0, file + ": want one secret key, as di-ctl keygen makes it"};
  }
  Result<KeyPair> pair = key_pair_of(std::string(words[0].text));
  if (!pair) return pair.error().in(file);
  return pair;
}

KeyRing KeyRing::parse(std::string_view text, const std::string& name, std::vector<std::string>& errors) {
  KeyRing ring;
  std::size_t number = 0;
  const auto wrong = [&](std::size_t column, const std::string& what) {
    errors.push_back(name + ":" + std::to_string(number) + ":" + std::to_string(column) + ": " + what);
  };
  while (!text.empty()) {
    ++number;
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::vector<Word> words = words_of(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (words.empty()) continue;
    if (!is_key(words[0].text)) {
      wrong(words[0].column, "want a public key of 40 characters");
      continue;
    }
    if (words.size() > 1 && !is_instance(words[1].text)) {
      wrong(words[1].column, "want the name of an instance, as in di-decode.0");
      continue;
    }
    if (words.size() > 2) {
      wrong(words[2].column, "want a key and a name only");
      continue;
    }
    if (ring.names_.size() == keys_max) {
      wrong(words[0].column, "more than " + std::to_string(keys_max) + " keys");
      break;
    }
    const std::string owner(words.size() > 1 ? words[1].text : "");
    if (!ring.names_.emplace(words[0].text, owner).second) {
      wrong(words[0].column, "this key stands in the file already");
      continue;
    }
    if (!owner.empty()) ring.taken_.insert(owner);
  }
  return ring;
}

KeyRing KeyRing::read(const std::string& path, std::vector<std::string>& errors) {
  const Result<std::string> text = file_read(path, keys_bytes_max);
  if (text) return parse(*text, path, errors);
  errors.push_back(text.error().message);
  return {};
}

bool KeyRing::may_be(std::string_view public_key, std::string_view instance) const {
  const auto found = names_.find(public_key);
  if (found == names_.end()) return false;
  if (instance.empty()) return true;
  return found->second.empty() ? !taken_.contains(instance) : found->second == instance;
}

}  // namespace di::net
