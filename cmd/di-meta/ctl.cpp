#include "ctl.h"

#include <charconv>
#include <filesystem>
#include <map>
#include <memory>

#include "kv/chain.h"

namespace di::meta {

namespace {

constexpr std::size_t page_rows_a_turn = 256;
constexpr Duration look_again_after = milliseconds(20);

std::string join(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out.append(out.empty() ? "" : ",").append(word);
  return out;
}

std::string_view state_name(std::uint8_t state) {
  return state == 0 ? "up" : "draining";
}

// Behind what no stripe could be found by.
constexpr std::string_view stripes_listed = ": that is a page of show kv pages, divided by 256";

std::int64_t whole_seconds(Duration duration) {
  return std::chrono::duration_cast<seconds>(duration).count();
}

std::string_view place_state(const directory::Index::Place& place) {
  if (!place.up) return "away";
  return place.leaves ? "leaves" : "up";
}

std::int64_t away_s(const Service& service, const directory::Index::Place& place) {
  return place.up ? 0 : whole_seconds(service.now() - place.away_since);
}

std::string_view volume_state_name(std::uint8_t state) {
  return state == 0 ? "up" : state == directory::volume_failed ? "failed" : "avoid";
}

// By instance, what stores serve without.  Why, they say themselves.
std::map<std::string, std::string> degraded_stores(const Service& service) {
  std::map<std::string, std::string> out;
  for (const directory::Index::Place& place : service.index().places()) {
    std::string text;
    for (const wire::VolumeState& volume : place.volumes) {
      if (volume.state == 0) continue;
      text.append(text.empty() ? "" : ", ").append("volume ").append(std::to_string(volume.volume));
      text.append(" ").append(volume_state_name(volume.state));
    }
    if (!text.empty()) out.emplace(place.instance, std::move(text));
  }
  return out;
}

void show_fleet(const Service& service, daemon::Reply& reply) {
  const std::map<std::string, std::string> degraded = degraded_stores(service);
  const auto show = [&](const net::Member& member, std::string_view state, bool connected, Duration away,
                        std::string_view without) {
    daemon::Row row;
    row.text("instance", member.instance)
        .number("id", member.id)
        .number("generation", member.generation)
        .text("state", state)
        .boolean("connected", connected)
        .number("away_s", whole_seconds(away))
        .text("role", member.role)
        .text("host", member.host)
        .text("rack", member.rack)
        .text("zone", member.zone)
        .number("ranks", member.ranks)
        .text("model", member.model)
        .text("revision", member.revision.is_zero() ? "" : member.revision.text().substr(0, 16))
        .text("control", member.control)
        .text("degraded", without);
    reply.row(row);
  };
  const std::string nothing;
  for (const net::Member& member : service.membership().members()) {
    const bool self = member.program == "di-meta";
    const auto store = degraded.find(member.instance);
    const std::string& without = store != degraded.end() ? store->second
                                 : self                  ? service.degraded()
                                                         : nothing;
    show(member, state_name(member.state), self || service.connected(member.id), Duration{0}, without);
  }
  for (const auto& [name, gone] : service.membership().away())
    show(gone.member, gone.stopped ? "stopped" : "away", false, service.now() - gone.since, "");
}

void show_kv(const Service& service, daemon::Reply& reply) {
  for (const directory::Index::Place& place : service.index().places()) {
    daemon::Row row;
    row.text("place", place.instance)
        .text("tier", place.store ? "store" : "arena")
        .text("state", place_state(place))
        .boolean("complete", place.complete)
        .number("pages", place.pages)
        .number("blocks", place.blocks)
        .number("bytes", place.bytes)
        .number("bytes_total", place.bytes_total)
        .number("free_pending_bytes", place.free_pending_bytes)
        .number("away_s", away_s(service, place));
    reply.row(row);
  }
}

// Those of stores that cannot be asked, as they told of them last.
void show_volumes(const Service& service, daemon::Reply& reply) {
  for (const directory::Index::Place& place : service.index().places()) {
    if (!place.store || place.up) continue;
    for (const wire::VolumeState& volume : place.volumes) {
      daemon::Row row;
      row.text("place", place.instance)
          .number("volume", volume.volume)
          .text("path", "")
          .text("state", "away")
          .text("reason", "the store is not there")
          .number("capacity_bytes", volume.bytes_total);
      reply.row(row);
    }
  }
}

void show_usage(const Service& service, daemon::Reply& reply) {
  for (const directory::Index::Usage& usage : service.index().usage()) {
    daemon::Row row;
    row.text("layout", usage.fingerprint.text().substr(0, 16))
        .text("geometry", usage.geometry)
        .number("stripes", usage.stripes)
        .number("blocks", usage.blocks)
        .number("page_bytes", usage.page_bytes)
        .number("column_bytes", usage.column_bytes);
    reply.row(row);
  }
}

void show_repairs(const Service& service, daemon::Reply& reply) {
  const directory::RepairQueue& queue = service.index().repair_queue();
  const directory::Index::Counters& c = service.index().counters();
  const directory::Index::Redundancy now = service.index().redundancy();
  daemon::Row row;
  row.number("degraded", now.degraded)
      .number("unreadable", now.unreadable)
      .number("waiting", queue.waiting())
      .number("waiting_without_redundancy", queue.waiting_at(0))
      .number("running", queue.running())
      .number("columns_repaired", c.columns_repaired)
      .number("started", c.repairs_started)
      .number("failed", c.repairs_failed)
      .number("unneeded", c.repairs_unneeded)
      .number("bytes_per_s", queue.options().bytes_per_s)
      .text("waits_for", service.index().repairs_wait_for(now, service.now()));
  reply.row(row);
}

void show_missratio(const Service& service, daemon::Reply& reply) {
  const directory::Index& index = service.index();
  const kv::MissRatio& ratio = index.miss_ratio();
  const std::uint64_t present = index.capacity_bytes();
  const auto show = [&](std::uint64_t capacity_bytes, double miss_ratio) {
    daemon::Row row;
    row.number("capacity_bytes", capacity_bytes)
        .number("miss_ratio", miss_ratio)
        .boolean("present", capacity_bytes == present);
    reply.row(row);
  };
  bool shown = present == 0;
  for (const kv::MissRatio::Point& point : ratio.curve()) {
    if (!shown && point.capacity_bytes >= present) {
      shown = true;
      if (point.capacity_bytes > present) show(present, ratio.at(present));
    }
    show(point.capacity_bytes, point.miss_ratio);
  }
  if (!shown) show(present, ratio.at(present));
}

void show_tenants(const Service& service, daemon::Reply& reply) {
  for (const kv::Evictor::TenantRow& tenant : service.index().evictor().tenants()) {
    const auto name = service.tenant_names().find(tenant.tenant);
    if (name == service.tenant_names().end() && tenant.items == 0) continue;
    daemon::Row row;
    row.text("tenant", name == service.tenant_names().end() ? kv::tenant_text(tenant.tenant) : name->second)
        .number("bytes", tenant.bytes)
        .number("stripes", tenant.items)
        .number("quota_bytes", tenant.quota_bytes)
        .number("refused", tenant.refused)
        .number("evicted", tenant.evicted);
    reply.row(row);
  }
}

// What a store that is being emptied still holds.
void show_drain(const Service& service, const std::string& store, daemon::Reply& reply) {
  const std::string waits_for = service.index().repairs_wait_for(service.index().redundancy(), service.now());
  for (const directory::Index::Place& place : service.index().places()) {
    if (!place.store || (store.empty() ? !place.leaves : place.instance != store)) continue;
    daemon::Row row;
    row.text("place", place.instance)
        .text("state", place_state(place))
        .number("away_s", away_s(service, place))
        .number("columns", place.pages)
        .number("bytes", place.bytes)
        .number("free_pending_bytes", place.free_pending_bytes)
        .text("waits_for", place.leaves && place.pages > 0 ? waits_for : "");
    reply.row(row);
  }
}

}  // namespace

Control::Control(loop::Loop& loop, Service& service) : loop_(loop), service_(service), commands_(table()) {}

Control::Listing::Listing(loop::Loop& loop, const Service& service, daemon::Reply reply)
    : service_(service),
      reply_(std::move(reply)),
      timer_(loop, loop::TimerKind::liveness, "show kv pages", [this] { go_on(); }) {
  timer_.start_after(Duration{0});
}

void Control::Listing::go_on() {
  if (!reply_.wanted()) {
    done_ = true;
    return;
  }
  if (!reply_.accepts_more()) return timer_.start_after(look_again_after);
  const auto rows = service_.index().pages_after(after_, page_rows_a_turn);
  for (const directory::Index::PageRow& page : rows) {
    daemon::Row row;
    row.number("page", page.page)
        .text("stores", join(page.stores))
        .boolean("readable", page.readable)
        .number("columns", page.columns)
        .number("columns_stored", page.columns_stored)
        .number("blocks", page.blocks)
        .number("bytes", page.bytes)
        .text("first_key", page.first.text())
        .text("parent_key", page.parent.text());
    reply_.row(row);
    after_ = page.page;
  }
  if (!rows.empty()) return timer_.start_after(Duration{0});
  reply_.end();
  done_ = true;
}

std::vector<daemon::Command> Control::table() {
  using daemon::Reply;
  using daemon::Words;
  const auto shown = [this](void (*show)(const Service&, Reply&)) {
    return [this, show](const Words&, Reply& reply) {
      show(service_, reply);
      reply.end();
    };
  };
  return {
      {"show fleet", shown(show_fleet)},
      {"show kv", shown(show_kv)},
      {"show kv pages",
       [this](const Words&, Reply& reply) {
         listings_.push_back(std::make_unique<Listing>(loop_, service_, reply));
       }},
      {"show volumes", shown(show_volumes)},
      {"show missratio", shown(show_missratio)},
      {"show tenants", shown(show_tenants)},
      {"kv du", shown(show_usage)},
      {"kv repair", shown(show_repairs)},
      {"kv repair now",
       [this](const Words&, Reply& reply) {
         service_.repair_now();
         show_repairs(service_, reply);
         reply.end();
       }},
      {"kv rebalance",
       [this](const Words&, Reply& reply) {
         service_.rebalance();
         reply.end();
       }},
      {"kv drain", [this](const Words& more, Reply& reply) { drain(more, reply); }, 0, 2},
      {"kv drop", [this](const Words& more, Reply& reply) { reply.end(drop(more[0])); }, 1, 1},
      {"kv drop store", [this](const Words& more, Reply& reply) { drop_store(more[0], reply); }, 1, 1},
      {"forget",
       [this](const Words& more, Reply& reply) {
         const auto forgotten = [reply](const Status& status) mutable { reply.end(status); };
         if (const Status asked = service_.forget(more[0], forgotten); !asked) reply.fail(asked.error());
       },
       1, 1},
      {"backup", [this](const Words& more, Reply& reply) { backup(more[0], reply); }, 1, 1},
  };
}

void Control::drain(const daemon::Words& more, daemon::Reply& reply) {
  const std::string store = more.empty() ? "" : more[0];
  if (more.size() == 2 && more[1] != "off")
    return reply.fail(Error{Code::invalid, 0, "'" + more[1] + "' after the store: want off, or nothing"});
  if (store.empty()) {
    show_drain(service_, store, reply);
    return reply.end();
  }
  const auto set = [&service = service_, store, reply](const Status& status) mutable {
    if (status) show_drain(service, store, reply);
    reply.end(status);
  };
  if (const Status asked = service_.store_leaves(store, more.size() == 1, set); !asked)
    reply.fail(asked.error());
}

Status Control::drop(const std::string& text) {
  std::uint64_t stripe = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), stripe);
  if (end.ec != std::errc{} || end.ptr != text.data() + text.size())
    return Error{Code::invalid, 0, "'" + text + "' is no stripe number" + std::string(stripes_listed)};
  if (const Status status = service_.drop_stripe(stripe); !status)
    return Error{status.error().code, 0, status.error().message + std::string(stripes_listed)};
  return {};
}

void Control::drop_store(const std::string& store, daemon::Reply& reply) {
  auto row = std::make_shared<daemon::Row>();
  const auto given = service_.store_gone(store, [reply, row](const Status& status) mutable {
    if (!status) return reply.fail(status.error());
    reply.end(*row);
  });
  if (!given) return reply.fail(given.error());
  row->text("place", store).number("columns", given->columns).number("stripes_lost", given->stripes);
}

void Control::backup(const std::string& file, daemon::Reply& reply) {
  // Relative to where this process is, which nobody knows.
  std::error_code error;
  const std::string path = std::filesystem::absolute(file, error).lexically_normal().string();
  const auto copied = [path, reply](const Result<std::uint64_t>& bytes) mutable {
    if (!bytes) return reply.fail(bytes.error());
    daemon::Row row;
    row.text("file", path).number("bytes", *bytes);
    reply.end(row);
  };
  if (const Status asked = service_.backup(path, copied); !asked) reply.fail(asked.error());
}

bool Control::answer(const daemon::Words& words, daemon::Reply reply) {
  std::erase_if(listings_, [](const auto& listing) { return listing->done(); });
  return daemon::answer_by(commands_, words, std::move(reply));
}

}  // namespace di::meta
