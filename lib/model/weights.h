// model/weights.h: the tensors of a model folder: model.safetensors, or the shards that
// model.safetensors.index.json names.
//
// Owns the mappings; immutable after open(), so any thread may look.  Nothing is copied: a tensor is
// used where it lies.  Files are hostile until proven otherwise: every length, offset and shape of a
// header is checked against the file before a byte of data is looked at.  Bounds: header
// `safetensors_header_bytes_max`, `weights_tensors_max` tensors in all, `weights_shards_max` files.
#pragma once

#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/crypto.h"
#include "base/result.h"
#include "model/mapped_file.h"
#include "model/tensor.h"

namespace di::model {

inline constexpr std::uint64_t safetensors_header_bytes_max = 100'000'000;  // the format's own limit
inline constexpr std::size_t weights_tensors_max = std::size_t{1} << 20;
inline constexpr std::size_t weights_shards_max = 4096;
inline constexpr std::size_t weights_index_bytes_max = std::size_t{64} << 20;

// One entry of a safetensors header.  `dtype` is the format's name; `begin` and `end` count from the
// end of the header.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> dims;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::uint64_t header_bytes = 0;  // with the 8 bytes of its length: where data starts
  std::vector<SafetensorsEntry> entries;
};

// Reads the header of a whole file's bytes.  Guarantees for each entry: a known dtype, at most
// tensor_rank_max dimensions whose product times the element is end - begin, and end within the file;
// and for all together: unique names, no byte described twice, no byte left over.
// Errors: corrupt, without the file's name.
[[nodiscard]] Result<SafetensorsHeader> safetensors_parse(ByteView file);

class Weights {
 public:
  // Maps the files of `folder` and checks their headers.  Blocks; does not read the data.
  // Errors name the file, and the tensor where there is one.
  [[nodiscard]] static Result<Weights> open(const std::string& folder);

  // The tensor of this name and exactly these dimensions.
  // Errors: not_found, invalid (another shape), unsupported (a dtype that is neither F32 nor BF16).
  [[nodiscard]] Result<Tensor> tensor(const std::string& name,
                                      std::initializer_list<std::uint64_t> dims) const;
  [[nodiscard]] bool has(const std::string& name) const { return places_.contains(name); }

  // SHA-256 over config.json, the index (empty when there is none) and for each shard in order of
  // name its header, its size and its first and last MiB; each part with its length in front.  Two
  // folders with the same revision hold the same model for all practical purposes, at a cost that
  // does not grow with the model.
  [[nodiscard]] const Digest& revision() const { return revision_; }
  [[nodiscard]] std::uint64_t data_bytes() const { return data_bytes_; }

 private:
  struct Place {
    std::size_t shard = 0;
    SafetensorsEntry entry;
  };

  std::string folder_;
  std::vector<std::string> shard_names_;
  std::vector<MappedFile> shards_;
  std::vector<std::uint64_t> header_bytes_;
  std::map<std::string, Place> places_;
  Digest revision_{};
  std::uint64_t data_bytes_ = 0;
};

}  // namespace di::model
