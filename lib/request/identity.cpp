#include "request/identity.h"

namespace di::request {

Result<Identity::Joined> Identity::join(const wire::Member& rank) {
  up_.erase(rank.id);
  waiting_.erase(rank.id);
  const bool script = rank.role == "script";
  const bool same = layout_.has_value() && layout_->descriptor() == rank.layout && revision_ == rank.revision;
  if (same && (script == script_ || !up_.empty())) {
    up_.insert(rank.id);
    return Joined::same;
  }
  if (!up_.empty()) {
    waiting_.insert(rank.id);
    const bool layout = layout_->descriptor() != rank.layout;
    return Error{Code::exists, 0,
                 std::string("ranks with another ") + (layout ? "layout" : "weight revision") + " are up"};
  }
  auto layout = kv::Layout::decode(rank.layout);
  if (!layout) return layout.error();
  const Joined joined = layout_.has_value() ? Joined::other : Joined::first;
  layout_ = *std::move(layout);
  revision_ = rank.revision;
  script_ = script;
  up_.insert(rank.id);
  return joined;
}

std::vector<std::uint32_t> Identity::leave(std::uint32_t id) {
  waiting_.erase(id);
  if (up_.erase(id) == 0 || !up_.empty()) return {};
  return {waiting_.begin(), waiting_.end()};
}

}  // namespace di::request
