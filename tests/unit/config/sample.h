// A configuration with one row of every kind, for the tests of this folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/param.h"

namespace di::config {

enum class Colour { red, green, blue };

struct SampleKey {
  std::string key;
  std::string tenant;
  std::int32_t limit = 0;
};

struct Sample {
  bool flag = false;
  std::uint16_t port = 0;
  double ratio = 0;
  std::uint64_t pool = 0;
  std::uint64_t segment_bytes = 0;
  Duration hold{0};
  Duration delay_ms{0};
  std::string name;
  std::string root;
  Colour colour{};
  std::vector<std::string> tags;
  std::vector<SampleKey> keys;
};

inline void bind_key(Params& p, SampleKey& k) {
  p.string("key", k.key, {.required = true, .help = "the key"});
  p.string("tenant", k.tenant, {.def = "default", .help = "whose it is"});
  p.integer("limit", k.limit, {.def = 4, .min = 1, .max = 100, .help = "requests at once"});
}

inline void bind_sample(Params& p, Sample& s) {
  using namespace literals;
  p.boolean("flag", s.flag, {.def = true, .reloadable = true, .help = "a switch"});
  p.integer("net.port", s.port, {.def = 80, .min = 1, .unit = "port", .help = "where"});
  p.real("kv.ratio", s.ratio, {.def = 0.5, .min = 0, .max = 1, .help = "a share"});
  p.size("kv.pool", s.pool,
         {.def = 64_MiB, .min = 1_MiB, .max = 1_TiB, .reloadable = true, .help = "memory"});
  p.size("kv.segment_bytes", s.segment_bytes,
         {.def = 4096, .min = 512, .max = 1 << 20, .help = "one segment"});
  p.duration("kv.hold", s.hold,
             {.def = seconds(60), .min = seconds(1), .max = seconds(3600), .help = "how long"});
  p.duration("kv.delay_ms", s.delay_ms, {.max = seconds(10), .help = "for tests"});
  p.string("name", s.name, {.def = "a \"quoted\" name", .bytes_max = 64, .help = "a name"});
  p.string("model.root", s.root, {.path = true, .help = "a path"});
  p.choice<Colour>("colour", s.colour,
                   {{Colour::red, "red"}, {Colour::green, "green"}, {Colour::blue, "blue"}},
                   {.def = Colour::green, .help = "a word"});
  p.list("tags", s.tags, {.def = {"a", "b"}, .help = "words"});
  p.tables("auth.keys", s.keys, bind_key, {.max = 3, .unique = "key", .help = "who may call"});
}

}  // namespace di::config
