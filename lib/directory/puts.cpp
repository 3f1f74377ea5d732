#include "directory/puts.h"

#include "base/assert.h"

namespace di::directory {

void OpenPuts::open(OpenPut put) {
  DI_ASSERT(!full());
  for (const Key& key : put.claims) keys_.emplace(key, put.id);
  due_.emplace(put.deadline, put.id);
  const std::uint64_t id = put.id;
  const bool added = puts_.emplace(id, std::move(put)).second;
  DI_ASSERT(added);
}

void OpenPuts::extend(std::uint64_t id, Instant deadline) {
  OpenPut& put = puts_.at(id);
  due_.erase({put.deadline, id});
  put.deadline = deadline;
  due_.emplace(deadline, id);
}

OpenPut OpenPuts::take(std::uint64_t id) {
  const auto at = puts_.find(id);
  DI_ASSERT(at != puts_.end());
  OpenPut put = std::move(at->second);
  puts_.erase(at);
  due_.erase({put.deadline, id});
  for (const Key& key : put.claims) {
    const auto open = keys_.find(key);
    if (open != keys_.end() && open->second == id) keys_.erase(open);
  }
  return put;
}

const OpenPut* OpenPuts::find(std::uint64_t id) const {
  const auto at = puts_.find(id);
  return at == puts_.end() ? nullptr : &at->second;
}

const OpenPut* OpenPuts::find(const Key& key) const {
  const auto at = keys_.find(key);
  return at == keys_.end() ? nullptr : &puts_.at(at->second);
}

std::vector<std::uint64_t> OpenPuts::of(const Holder& holder) const {
  std::vector<std::uint64_t> out;
  for (const auto& [id, put] : puts_) {
    if (put.holder == holder) out.push_back(id);
  }
  return out;
}

std::optional<std::uint64_t> OpenPuts::due(Instant now) const {
  if (due_.empty() || due_.begin()->first > now) return std::nullopt;
  return due_.begin()->second;
}

void OpenPuts::test_check() const {
  DI_ASSERT(due_.size() == puts_.size());
  for (const auto& [id, put] : puts_) DI_ASSERT(due_.contains({put.deadline, id}));
  for (const auto& [key, id] : keys_) DI_ASSERT(puts_.contains(id));
}

}  // namespace di::directory
