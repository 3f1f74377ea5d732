// net/keys.h: CURVE keys: the secret one of an instance, and the public ones that may talk to it.
//
// Keys are Z85 text of 40 characters.  A file of public keys has one on a line, with an optional name:
//
//   # the machines of room 2
//   rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7  di-decode.0
//   Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID              # any instance whose name stands nowhere
//
// A key with a name belongs to the instance of that name.  A name may stand beside several keys, while
// one is replaced by another; a key stands once.  `#` begins a comment, so keys that begin with it are not
// used.  Owner: whoever holds it, one thread; immutable after parsing.  Bounds: keys_max,
// keys_bytes_max.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace di::net {

inline constexpr std::size_t key_chars = 40;
inline constexpr std::size_t keys_max = 8192;  // peers_max, each with an old and a new one
inline constexpr std::size_t keys_bytes_max = 1 << 20;
inline constexpr std::size_t key_name_chars_max = 64;

struct KeyPair {
  std::string public_key;
  std::string secret_key;
};

// 40 characters of Z85, the first no `#`.
[[nodiscard]] bool is_key(std::string_view text);
// PROGRAM.NAME.
[[nodiscard]] bool is_instance(std::string_view text);

// A new pair, from the operating system's generator.  (This and the next are in net/zmq.cpp.)
[[nodiscard]] KeyPair key_pair_make();
// The pair of a secret key.  Errors: invalid.
[[nodiscard]] Result<KeyPair> key_pair_of(const std::string& secret_key);

// The pair whose secret key is the only line of `path` that is no comment; in a folder, of
// `path`/INSTANCE.secret.  Errors: denied when others than the owner may read or write the file, and what
// file_read says.  Blocks.
[[nodiscard]] Result<KeyPair> key_pair_read(const std::string& path, std::string_view instance);

class KeyRing {
 public:
  // Appends to `errors` one line for each thing that is wrong, as `NAME:3:1: ...`.
  [[nodiscard]] static KeyRing parse(std::string_view text, const std::string& name,
                                     std::vector<std::string>& errors);
  [[nodiscard]] static KeyRing read(const std::string& path, std::vector<std::string>& errors);

  // Whether the holder of the key may be this instance: the key's name, or for a key without one any name
  // that stands beside no key.  With an empty name: whether the key is listed at all.
  [[nodiscard]] bool may_be(std::string_view public_key, std::string_view instance) const;
  [[nodiscard]] std::size_t count() const { return names_.size(); }

 private:
  std::map<std::string, std::string, std::less<>> names_;  // by key; empty: any
  std::set<std::string, std::less<>> taken_;               // names that stand beside a key
};

}  // namespace di::net
