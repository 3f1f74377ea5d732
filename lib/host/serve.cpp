#include "host/serve.h"

namespace di::host {

Serves::Serves(const Limits& limits, Pages& pages, Pushes& pushes, Outbox& out)
    : limits_(limits), pages_(pages), pushes_(pushes), out_(out) {}

void Serves::read(const Peer& host, const wire::arena_read& message) {
  const Name name{host, message.transfer};
  if (serves_.contains(name)) return;  // said twice
  const auto refuse = [&](Code code, std::uint64_t& counter) {
    ++counter;
    send(host, wire::kv_read_done{message.transfer, static_cast<std::uint16_t>(code), 0});
  };
  if (serves_.size() >= limits_.serves_max) return refuse(Code::busy, counters_.refused);
  if (!pages_.has_layout()) return refuse(Code::not_found, counters_.not_found);
  const std::optional<std::uint32_t> page = pages_.ending(message.key, message.page_blocks);
  if (!page || message.slot.page_blocks != message.page_blocks)
    return refuse(Code::not_found, counters_.not_found);
  Serve serve;
  serve.push =
      pushes_.start(Pushes::For::serve, host, message.transfer, message.slot, *page, transfer::Class::fetch);
  by_push_.emplace(serve.push, name);
  serves_.emplace(name, serve);
}

void Serves::cancel(const Peer& host, const wire::kv_read_cancel& message) {
  const auto found = serves_.find({host, message.transfer});
  if (found == serves_.end()) return send(host, wire::kv_read_cancelled{message.transfer});
  found->second.cancelled = true;
  pushes_.cancel(found->second.push);
}

void Serves::progressed(const Pushes::Progress& progress) {
  const auto named = by_push_.find(progress.id);
  if (named == by_push_.end()) return;  // of a host that is gone
  const Name name = named->second;
  const bool cancelled = serves_.at(name).cancelled;
  if (!cancelled && progress.code == Code::ok) {
    send(name.first, wire::kv_read_done{name.second, 0, progress.groups - 1});
  }
  if (!progress.over) return;
  by_push_.erase(named);
  serves_.erase(name);
  if (cancelled) {
    ++counters_.cancelled;
    send(name.first, wire::kv_read_cancelled{name.second});
  } else if (progress.code != Code::ok) {
    ++counters_.failed;
    send(name.first, wire::kv_read_done{name.second, static_cast<std::uint16_t>(progress.code), 0});
  } else {
    ++counters_.served;
  }
}

void Serves::host_lost(const Peer& host) {
  for (auto serve = serves_.lower_bound({host, 0}); serve != serves_.end() && serve->first.first == host;) {
    by_push_.erase(serve->second.push);
    pushes_.cancel(serve->second.push);
    serve = serves_.erase(serve);
  }
}

}  // namespace di::host
