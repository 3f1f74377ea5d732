#include "model/weights.h"

#include <algorithm>
#include <optional>
#include <set>

#include "base/file.h"
#include "base/json.h"
#include "model/shape.h"

namespace di::model {

namespace {

constexpr std::size_t length_bytes = 8;  // of the header, in front of it
constexpr std::string_view single_name = "model.safetensors";
constexpr std::string_view index_name = "model.safetensors.index.json";

Error corrupt(std::string what) {
  return Error{Code::corrupt, 0, std::move(what)};
}

// 0: not a dtype of the format.
std::uint64_t element_bytes(std::string_view dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64" || dtype == "C64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
  if (dtype == "I8" || dtype == "U8" || dtype == "BOOL") return 1;
  if (dtype == "F8_E4M3" || dtype == "F8_E5M2" || dtype == "F8_E8M0") return 1;
  return 0;
}

std::string dims_text(const std::vector<std::uint64_t>& dims) {
  std::string out = "[";
  for (std::size_t i = 0; i < dims.size(); ++i) out += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  return out + "]";
}

// A count that may not exceed the file it describes, so that no later sum can overflow.
std::optional<std::uint64_t> bounded(const Json& value, std::uint64_t high) {
  if (!value.is_integer()) return std::nullopt;
  const std::int64_t number = value.as_i64();
  if (number < 0 || static_cast<std::uint64_t>(number) > high) return std::nullopt;
  return static_cast<std::uint64_t>(number);
}

Result<SafetensorsEntry> parse_entry(const std::string& name, const Json& value, std::uint64_t data_bytes) {
  const Json* dtype = value.find("dtype");
  const Json* shape = value.find("shape");
  const Json* offsets = value.find("data_offsets");
  if (dtype == nullptr || !dtype->is_string()) return corrupt("dtype is missing or not a string");
  if (shape == nullptr || !shape->is_array()) return corrupt("shape is missing or not an array");
  if (offsets == nullptr || !offsets->is_array() || offsets->as_array().size() != 2) {
    return corrupt("data_offsets is missing or not a pair");
  }

  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = dtype->as_string();
  std::uint64_t tensor_bytes = element_bytes(entry.dtype);
  if (tensor_bytes == 0) return corrupt("unknown dtype \"" + entry.dtype.substr(0, 16) + "\"");

  const auto begin = bounded(offsets->as_array()[0], INT64_MAX);
  const auto end = bounded(offsets->as_array()[1], INT64_MAX);
  if (!begin || !end || *begin > *end) return corrupt("data_offsets are no range");
  if (*end > data_bytes) {
    return corrupt("needs " + std::to_string(*end) + " bytes of data, the file has " +
                   std::to_string(data_bytes) + ": truncated?");
  }
  entry.begin = *begin;
  entry.end = *end;

  if (shape->as_array().size() > tensor_rank_max) return corrupt("has too many dimensions");
  for (const Json& item : shape->as_array()) {
    // A file is below 2^63 bytes; the product is checked before it is made.
    const auto dim = bounded(item, INT64_MAX);
    if (!dim || (*dim != 0 && tensor_bytes > static_cast<std::uint64_t>(INT64_MAX) / *dim)) {
      return corrupt("shape is out of range");
    }
    entry.dims.push_back(*dim);
    tensor_bytes *= *dim;
  }
  if (tensor_bytes != entry.end - entry.begin) {
    return corrupt("shape " + dims_text(entry.dims) + " of " + entry.dtype + " is " +
                   std::to_string(tensor_bytes) + " bytes, data_offsets give " +
                   std::to_string(entry.end - entry.begin));
  }
  return entry;
}

// What a shard contributes to the revision.
void hash_part(Sha256& hash, ByteView part) {
  std::byte length[8];
  put_le(length, std::uint64_t{part.size()});
  hash.update(length);
  hash.update(part);
}

void hash_shard(Sha256& hash, ByteView file, std::uint64_t header_bytes) {
  constexpr std::size_t edge_bytes_max = std::size_t{1} << 20;
  const std::size_t edge_bytes = std::min(edge_bytes_max, file.size());
  std::byte file_bytes[8];
  put_le(file_bytes, std::uint64_t{file.size()});
  hash_part(hash, file.first(header_bytes));
  hash_part(hash, file_bytes);
  hash_part(hash, file.first(edge_bytes));
  hash_part(hash, file.last(edge_bytes));
}

// Name of tensor → name of shard, from the text of an index.
Result<std::map<std::string, std::string>> parse_index(std::string_view text) {
  const Result<Json> root = Json::parse(text);
  if (!root) return root.error();
  const Json* map = root->find("weight_map");
  if (map == nullptr || !map->is_object()) return corrupt("weight_map is missing or not an object");
  if (map->as_object().size() > weights_tensors_max) return corrupt("weight_map has too many tensors");
  std::map<std::string, std::string> out;
  for (const auto& [tensor, shard] : map->as_object()) {
    if (!shard.is_string()) return corrupt("weight_map: " + tensor + ": not a string");
    const std::string& file = shard.as_string();
    // A shard lies in the folder itself: no path leads out of it.
    if (file.empty() || file[0] == '.' || file.find('/') != std::string::npos ||
        file.find('\0') != std::string::npos) {
      return corrupt("weight_map: " + tensor + ": not a plain file name");
    }
    if (!out.emplace(tensor, file).second) return corrupt("weight_map: " + tensor + ": named twice");
  }
  return out;
}

}  // namespace

Result<SafetensorsHeader> safetensors_parse(ByteView file) {
  if (file.size() < length_bytes) return corrupt("shorter than a safetensors header: truncated?");
  const auto json_bytes = get_le<std::uint64_t>(file.data());
  if (json_bytes > safetensors_header_bytes_max) {
    return corrupt("header length " + std::to_string(json_bytes) +
                   " is over the limit: not a safetensors file?");
  }
  if (json_bytes > file.size() - length_bytes) {
    return corrupt("header length " + std::to_string(json_bytes) +
                   " is past the end of the file: truncated?");
  }
  SafetensorsHeader out;
  out.header_bytes = length_bytes + json_bytes;
  const std::uint64_t data_bytes = file.size() - out.header_bytes;

  const Result<Json> root = Json::parse(as_text(file.subspan(length_bytes, json_bytes)));
  if (!root) return corrupt("header: " + root.error().message);
  if (!root->is_object()) return corrupt("header: not a JSON object");
  if (root->as_object().size() > weights_tensors_max + 1) return corrupt("header: too many tensors");

  std::set<std::string_view> names;
  for (const auto& [name, value] : root->as_object()) {
    if (name == "__metadata__") continue;
    if (!names.insert(name).second) return corrupt(name + ": named twice");
    Result<SafetensorsEntry> entry = parse_entry(name, value, data_bytes);
    if (!entry) return entry.error().in(name);
    out.entries.push_back(std::move(*entry));
  }

  // The format allows no hole and no overlap, so the data are exactly the tensors one after another.
  std::vector<const SafetensorsEntry*> order;
  for (const SafetensorsEntry& entry : out.entries) order.push_back(&entry);
  std::ranges::sort(order, [](const auto* a, const auto* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  std::uint64_t next = 0;
  for (const SafetensorsEntry* entry : order) {
    if (entry->begin != next)
      return corrupt(entry->name + ": its data overlap another tensor's or leave a hole");
    next = entry->end;
  }
  if (next != data_bytes) {
    return corrupt("holds " + std::to_string(data_bytes) + " bytes of data, the header describes " +
                   std::to_string(next));
  }
  return out;
}

Result<Weights> Weights::open(const std::string& folder) {
  Weights out;
  out.folder_ = folder;
  const Result<std::string> config = file_read(folder + "/config.json", config_json_bytes_max);
  if (!config) return config.error();

  const std::string index_path = folder + "/" + std::string(index_name);
  const Result<std::string> index = file_read(index_path, weights_index_bytes_max);
  std::map<std::string, std::string> shard_of;
  if (index) {
    auto parsed = parse_index(*index);
    if (!parsed) return parsed.error().in(index_path);
    shard_of = std::move(*parsed);
    std::set<std::string> names;
    for (const auto& [tensor, shard] : shard_of) names.insert(shard);
    if (names.size() > weights_shards_max) return corrupt("names too many files").in(index_path);
    out.shard_names_.assign(names.begin(), names.end());
  } else if (index.error().code == Code::not_found) {
    out.shard_names_.emplace_back(single_name);
  } else {
    return index.error();
  }

  Sha256 hash;
  hash_part(hash, as_bytes(*config));
  hash_part(hash, index ? as_bytes(*index) : ByteView{});
  for (std::size_t shard = 0; shard < out.shard_names_.size(); ++shard) {
    const std::string path = folder + "/" + out.shard_names_[shard];
    Result<MappedFile> file = MappedFile::open(path);
    if (!file) return file.error();
    Result<SafetensorsHeader> header = safetensors_parse(file->bytes());
    if (!header) return header.error().in(path);
    hash_shard(hash, file->bytes(), header->header_bytes);
    out.data_bytes_ += file->bytes().size() - header->header_bytes;
    for (SafetensorsEntry& entry : header->entries) {
      // With an index, a tensor is taken from the shard the index gives; a copy elsewhere is not looked at.
      if (index) {
        const auto at = shard_of.find(entry.name);
        if (at == shard_of.end() || at->second != out.shard_names_[shard]) continue;
      }
      std::string name = entry.name;
      out.places_.emplace(std::move(name), Place{shard, std::move(entry)});
    }
    out.header_bytes_.push_back(header->header_bytes);
    out.shards_.push_back(std::move(*file));
  }
  for (const auto& [tensor, shard] : shard_of) {
    if (!out.places_.contains(tensor)) {
      return Error{Code::not_found, 0,
                   folder + "/" + shard + ": no tensor " + tensor + ", which the index puts there"};
    }
  }
  out.revision_ = hash.finish();
  return out;
}

Result<Tensor> Weights::tensor(const std::string& name, std::initializer_list<std::uint64_t> dims) const {
  const auto at = places_.find(name);
  if (at == places_.end()) return Error{Code::not_found, 0, folder_ + ": no tensor " + name};
  const auto& [shard, entry] = at->second;
  const std::string where = folder_ + "/" + shard_names_[shard] + ": " + name;
  Tensor out;
  if (entry.dtype == "F32") {
    out.dtype = Dtype::f32;
  } else if (entry.dtype == "BF16") {
    out.dtype = Dtype::bf16;
  } else {
    return Error{Code::unsupported, 0, where + ": dtype " + entry.dtype + " (only F32 and BF16)"};
  }
  out.dims = entry.dims;
  if (!std::ranges::equal(entry.dims, dims)) {
    return Error{Code::invalid, 0,
                 where + ": shape " + dims_text(entry.dims) + ", config.json asks for " + dims_text(dims)};
  }
  out.data = shards_[shard].bytes().subspan(header_bytes_[shard] + entry.begin, entry.end - entry.begin);
  // The mapping starts on a page, so this is the alignment in the file.
  if (reinterpret_cast<std::uintptr_t>(out.data.data()) % dtype_bytes(out.dtype) != 0) {
    return corrupt(where + ": not aligned to its element");
  }
  return out;
}

}  // namespace di::model
