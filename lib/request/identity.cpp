#include "request/identity.h"

namespace di::request {

Result<Identity::Joined> Identity::join(const wire::Member& rank) {
  up_.erase(rank.instance);
  const bool script = rank.role == "script";
  const bool same = layout_.has_value() && layout_->descriptor() == rank.layout && revision_ == rank.revision;
  if (same && (script == script_ || !up_.empty())) {
    up_.insert(rank.instance);
    return Joined::same;
  }
  if (!up_.empty()) {
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
  up_.insert(rank.instance);
  return joined;
}

}  // namespace di::request
