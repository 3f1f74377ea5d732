#include "meta.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "kv/chain.h"

namespace di::meta {

namespace {

// The directory's step is due again and again; a batch of stripes is written within SQLite's five seconds.
constexpr Duration loop_late_after = seconds(60);

// Each has rows in the metrics.
constexpr std::size_t tenants_max = 1024;

void tenant_params(config::Params& params, TenantConfig& tenant) {
  params.string("name", tenant.name,
                {.required = true,
                 .check = [](const std::string& name) -> Status {
                   if (name.empty()) return Error{Code::invalid, 0, "a tenant has a name"};
                   return {};
                 },
                 .help = "as in auth.keys of di-router"});
  params.size("quota", tenant.quota_bytes,
              {.help = "what the tenant's stripes may take on the stores, parity included; 0B: no quota"});
  using Over = kv::Evictor::OverQuota;
  params.choice<Over>("over", tenant.over, {{Over::refuse, "refuse"}, {Over::evict_own, "evict_own"}},
                      {.def = Over::refuse,
                       .help = "what is above the quota is not written, or the tenant's oldest goes for it"});
  params.duration("ttl", tenant.ttl,
                  {.help = "instead of kv.ttl; 0s together with ttl_cap 0s: kv.ttl and kv.ttl_cap"});
  params.duration("ttl_cap", tenant.ttl_cap, {.help = "instead of kv.ttl_cap; with ttl given, 0s: never"});
}

kv::Evictor::TenantRule rule_of(const TenantConfig& tenant) {
  kv::Evictor::TenantRule rule{.quota_bytes = tenant.quota_bytes, .over = tenant.over};
  if (tenant.ttl > Duration(0) || tenant.ttl_cap > Duration(0))
    rule.life = kv::Evictor::Life{tenant.ttl, tenant.ttl_cap};
  return rule;
}

}  // namespace

void params(config::Params& params, Config& config) {
  daemon::common_params(params, config.common, "di-meta");
  params.string(
      "meta.catalogue", config.catalogue,
      {.path = true,
       .help = "SQLite file with generations and the namespace secret; empty: RUNDIR/INSTANCE.catalogue"});
  params.integer(
      "meta.blocks_max", config.blocks_max,
      {.def = 4 << 20,
       .min = 1024,
       .max = 1 << 30,
       .unit = "blocks",
       .help = "places of blocks in the directory, about 64 bytes of memory each; a block in an arena"
               " and in the store is two"});
  params.duration(
      "kv.ttl", config.kv_ttl,
      {.help = "a stored page that no request used for so long is dropped; 0s: when room is needed"});
  params.duration(
      "kv.ttl_cap", config.kv_ttl_cap,
      {.help = "a stored page is dropped so long after it was written, whatever its use; 0s: never"});
  params.tables("kv.tenants", config.tenants, tenant_params,
                {.max = tenants_max,
                 .unique = "name",
                 .help = "tenants with a quota or a life of their own in the store"});
  params.duration(
      "kv.reconcile", config.reconcile,
      {.def = std::chrono::hours(1),
       .help = "each store is asked so often what it holds, one at a time, and differences are mended; "
               "0s: only when it comes"});
  params.string("store.geometry", config.geometry,
                {.def = "1+0",
                 .check = [](const std::string& text) -> Status {
                   const auto geometry = directory::Geometry::parse(text);
                   if (!geometry) return geometry.error();
                   return {};
                 },
                 .help = "data and parity columns of new stripes: 10+2, 2+1, 1+0, ..."});
  params.boolean(
      "store.lab", config.lab,
      {.help = "several columns of a stripe may share a node when there are fewer nodes than columns"});
  using directory::RepairPolicy;
  params.choice<RepairPolicy>(
      "store.repair", config.repair,
      {{RepairPolicy::off, "off"}, {RepairPolicy::hot, "hot"}, {RepairPolicy::all, "all"}},
      {.def = RepairPolicy::all,
       .help = "stripes with lost columns that are made whole; hot: used within the hour"});
  params.integer("store.repair_bytes_per_s", config.repair_bytes_per_s,
                 {.def = 125'000'000,
                  .max = 1'000'000'000'000,
                  .unit = "bytes/s",
                  .help = "what repairs may read and write; a tenth of a 10 Gbit/s link; 0: no repair"});
  params.duration("store.repair_after", config.repair_after,
                  {.def = seconds(300),
                   .help = "a store may be away for so long before its columns are made anew elsewhere"});
  params.duration(
      "store.cross_check", config.cross_check,
      {.def = seconds(60),
       .help = "so often one stripe, drawn by lot, is read to see whether it was encoded right, with "
               "what store.repair_bytes_per_s leaves; 0s: none"});
  params.duration(
      "store.slow_start", config.slow_start,
      {.def = seconds(600),
       .help = "a store or volume that is new takes a tenth of its columns at first, and all of them after "
               "so long; 0s: at once"});
}

Status Meta::on_prepare(daemon::Daemon& daemon) {
  const std::string path = config_.catalogue.empty() ? daemon.path("catalogue") : config_.catalogue;
  auto catalogue = directory::Catalogue::open(path);
  if (!catalogue) return catalogue.error();
  log_info("meta", "catalogue open",
           {{"path", path}, {"cluster", catalogue->cluster()}, {"run", catalogue->run()}});
  catalogue_ = std::make_unique<directory::Catalogue>(*std::move(catalogue));
  return {};
}

Status Meta::on_start(daemon::Daemon& daemon) {
  Service::Options options;
  options.index.blocks_max = config_.blocks_max;
  options.index.stripe_life = {config_.kv_ttl, config_.kv_ttl_cap};
  options.index.run_starts = catalogue_->run_starts();
  options.index.wall_ahead_s =
      wall_clock_ms() / 1000 - to_ms(Duration(daemon.loop().monotonic_now().ns)) / 1000;
  for (const TenantConfig& tenant : config_.tenants) {
    const std::uint64_t number = kv::tenant_number(tenant.name);
    options.tenant_names.emplace(number, tenant.name);
    options.index.tenants.emplace(number, rule_of(tenant));
  }
  if (options.tenant_names.size() != config_.tenants.size())
    return Error{Code::invalid, 0, "kv.tenants: two names have one number"};
  auto geometry = directory::Geometry::parse(config_.geometry);
  if (!geometry) return geometry.error();
  options.index.placement = {*geometry, config_.lab, config_.slow_start};
  options.index.reconcile = config_.reconcile;
  options.index.cross_check = config_.cross_check;
  options.index.repair = config_.repair;
  options.index.repair_after = config_.repair_after;
  options.index.repairs.bytes_per_s = config_.repair_bytes_per_s;
  options.directory_beat = [&beat = daemon.heartbeat("meta-directory", loop_late_after)] { beat(); };
  options.catalogue_beat = [&beat = daemon.heartbeat("meta-catalogue", loop_late_after)] { beat(); };
  options.degraded = [&daemon](const std::string& what) { daemon.degraded(what); };
  auto service = Service::create(daemon.loop(), daemon.endpoint(), *catalogue_, options);
  if (!service) return service.error();
  service_ = *std::move(service);
  const auto address = daemon.listen();
  if (!address) return address.error();
  net::Member self = daemon.self_member();
  self.control = *address;
  DI_TRY(service_->start(std::move(self)));
  control_ = std::make_unique<Control>(daemon.loop(), *service_);
  register_metrics(daemon.metrics());
  register_tenants(daemon.metrics());
  daemon.ready();
  return {};
}

// Nothing to drain: the fleet goes on with the last list, cold, until the directory is back.
void Meta::on_stop(daemon::Daemon& daemon) {
  if (control_ != nullptr) control_->stop();
  if (service_ != nullptr) service_->stop();
  daemon.stopped();
}

bool Meta::on_ctl(const std::vector<std::string>& words, daemon::Reply reply) {
  return control_ != nullptr && control_->answer(words, std::move(reply));
}

void Meta::on_dump() {
  if (service_ == nullptr) return;
  const directory::Index& index = service_->index();
  log_info("meta", "state",
           {{"members", service_->membership().count()},
            {"epoch", service_->membership().epoch()},
            {"blocks", index.blocks()},
            {"stripes", index.stripes()},
            {"leases", index.leases()},
            {"open_puts", index.open_puts()},
            {"pending_frees", index.pending_frees()},
            {"repairs_waiting", index.repair_queue().waiting()},
            {"repairs_running", index.repair_queue().running()}});
}

void Meta::register_metrics(daemon::Metrics& metrics) {
  const directory::Index& index = service_->index();
  const directory::Index::Counters& c = index.counters();
  const auto counter = [&](std::string_view name, std::string_view help, const std::uint64_t& cell,
                           daemon::Metrics::Labels labels = {}) {
    metrics.counter_from(
        name, help, [&cell] { return cell; }, std::move(labels));
  };
  counter("di_meta_matches_total", "Prefix matches answered", c.matches);
  counter("di_meta_match_blocks_total", "Blocks that matches asked for", c.match_blocks);
  counter("di_meta_match_hit_blocks_total", "Blocks that matches found", c.match_hit_blocks);
  counter("di_meta_plans_total", "Plans answered", c.plans);
  counter("di_meta_plan_blocks_total", "Blocks that plans asked for", c.plan_blocks);
  counter("di_meta_plan_found_blocks_total", "Blocks that plans found", c.plan_found_blocks);
  counter("di_meta_plans_refused_total", "Plans refused because no lease was left", c.plan_refused);
  counter("di_meta_leases_expired_total", "Leases that ended without a release", c.leases_expired);
  const std::string_view puts = "Outcomes of puts to the store";
  counter("di_meta_puts_total", puts, c.puts_opened, {{"outcome", "opened"}});
  counter("di_meta_puts_total", puts, c.puts_committed, {{"outcome", "committed"}});
  counter("di_meta_puts_total", puts, c.puts_degraded, {{"outcome", "degraded"}});
  counter("di_meta_puts_total", puts, c.puts_exist, {{"outcome", "exists"}});
  counter("di_meta_puts_total", puts, c.puts_busy, {{"outcome", "busy"}});
  counter("di_meta_puts_total", puts, c.puts_over_budget, {{"outcome", "over_budget"}});
  counter("di_meta_puts_total", puts, c.puts_invalid, {{"outcome", "invalid"}});
  counter("di_meta_puts_total", puts, c.puts_duplicate, {{"outcome", "duplicate"}});
  counter("di_meta_puts_total", puts, c.puts_refused, {{"outcome", "refused"}});
  counter("di_meta_puts_total", puts, c.puts_aborted, {{"outcome", "aborted"}});
  counter("di_meta_puts_total", puts, c.puts_lapsed, {{"outcome", "lapsed"}});
  counter("di_meta_puts_total", puts, c.puts_no_space, {{"outcome", "no_space"}});
  counter("di_meta_puts_total", puts, c.puts_over_quota, {{"outcome", "over_quota"}});
  const std::string_view stripes = "What happened to stripes of the store";
  counter("di_meta_stripes_total", stripes, c.stripes_adopted, {{"event", "adopted"}});
  counter("di_meta_stripes_total", stripes, c.stripes_missing, {{"event", "missing"}});
  counter("di_meta_stripes_total", stripes, c.stripes_incomplete, {{"event", "incomplete"}});
  counter("di_meta_stripes_total", stripes, c.stripes_lost, {{"event", "lost"}});
  counter("di_meta_stripes_total", stripes, c.stripes_evicted, {{"event", "evicted"}});
  counter("di_meta_stripes_total", stripes, c.stripes_expired, {{"event", "expired"}});
  counter("di_meta_stripes_total", stripes, c.stripes_freed, {{"event", "freed"}});
  const std::string_view failed = "Reads of store columns that failed";
  counter("di_meta_read_failed_total", failed, c.columns_corrupt, {{"code", "corrupt"}});
  counter("di_meta_read_failed_total", failed, c.columns_not_found, {{"code", "not_found"}});
  counter("di_meta_read_failed_total", failed, c.columns_io, {{"code", "io"}});
  counter("di_meta_read_failed_late_total", "Reports of columns that are not where they were read any more",
          c.reports_late);
  counter("di_meta_columns_passed_over_total", "Columns that went elsewhere because their store is new",
          index.placements().passed_over());
  const std::string_view checks = "Stripes that were cross-checked: their data columns against parity 0";
  counter("di_meta_cross_checks_total", checks, c.cross_checks_right, {{"outcome", "right"}});
  counter("di_meta_cross_checks_total", checks, c.cross_checks_wrong, {{"outcome", "wrong"}});
  counter("di_meta_cross_checks_total", checks, c.cross_checks_undecided, {{"outcome", "undecided"}});
  counter("di_meta_reconciles_total", "Stores that were asked again what they hold", c.reconciles);
  counter("di_meta_reconciles_failed_total", "Of them, that did not tell all of it", c.reconciles_failed);
  const std::string_view differences = "Columns about which a store and the directory disagreed";
  counter("di_meta_reconcile_differences_total", differences, c.reconciled_missing, {{"what", "missing"}});
  counter("di_meta_reconcile_differences_total", differences, c.reconciled_back, {{"what", "back"}});
  counter("di_meta_reconcile_differences_total", differences, c.reconciled_unknown, {{"what", "unknown"}});
  counter("di_meta_inventory_refused_total", "Inventory parts out of order or stale", c.inventory_refused);
  counter("di_meta_columns_duplicate_total", "Second copies of columns that inventories showed",
          c.columns_duplicate);
  const std::string_view repairs = "What became of repairs";
  counter("di_meta_repairs_total", repairs, c.repairs_started, {{"event", "started"}});
  counter("di_meta_repairs_total", repairs, c.repairs_failed, {{"event", "failed"}});
  counter("di_meta_repairs_total", repairs, c.repairs_unneeded, {{"event", "unneeded"}});
  counter("di_meta_columns_repaired_total", "Columns made anew", c.columns_repaired);
  const directory::Arenas::Counters& a = index.arena_counters();
  counter("di_meta_arena_deltas_total", "Arena reports taken", a.deltas);
  counter("di_meta_arena_gaps_total", "Gaps in arena reports", a.gaps);
  counter("di_meta_arena_refused_total", "Arena pages malformed or above the bound", a.refused);
  counter("di_meta_tenants_full_total", "Stripes that count as nobody's because too many tenants have some",
          c.tenants_full);
  counter("di_meta_blocks_refused_total", "Places of blocks above meta.blocks_max", c.blocks_refused);
  const Service::Counters& s = service_->counters();
  counter("di_meta_registrations_total", "Registrations taken", s.registrations);
  counter("di_meta_registrations_refused_total", "Registrations refused", s.refused);
  counter("di_meta_members_lost_total", "Members lost", s.lost);
  counter("di_meta_lists_published_total", "Lists of members that were sent to everybody", s.published);
  const Persister::Counters& w = service_->persister().counters();
  counter("di_meta_catalogue_batches_total", "Batches of stripes written to the catalogue", w.batches);
  counter("di_meta_catalogue_rows_total", "Rows of stripes written to the catalogue", w.rows);
  counter("di_meta_catalogue_failures_total", "Batches that could not be written and are tried again",
          w.failures);
  metrics.gauge_from("di_meta_members", "Registered members",
                     [this] { return static_cast<std::int64_t>(service_->membership().count()); });
  metrics.gauge_from("di_meta_members_away", "Members that were lost and are not back", [this] {
    const auto& away = service_->membership().away();
    return std::count_if(away.begin(), away.end(), [](const auto& entry) { return !entry.second.stopped; });
  });
  metrics.gauge_from("di_meta_blocks", "Blocks in the directory",
                     [&index] { return static_cast<std::int64_t>(index.blocks()); });
  metrics.gauge_from("di_meta_stripes", "Stripes in the directory",
                     [&index] { return static_cast<std::int64_t>(index.stripes()); });
  // Capacity as a multiple of the present one.
  for (const auto& [half_times, label] : {std::pair{1, "0.5"}, std::pair{2, "1"}, std::pair{4, "2"}}) {
    metrics.gauge_from("di_meta_miss_ratio_ppm",
                       "Blocks asked for that a store of this many times its capacity would not have",
                       [&index, half_times] {
                         const std::uint64_t capacity =
                             index.capacity_bytes() / 2 * static_cast<std::uint64_t>(half_times);
                         return static_cast<std::int64_t>(index.miss_ratio().at(capacity) * 1e6);
                       },
                       {{"capacity", label}});
  }
  metrics.gauge_from("di_meta_capacity_bytes", "Bytes of the volumes in service; 0 while one has not said",
                     [&index] { return static_cast<std::int64_t>(index.capacity_bytes()); });
  // Not among the held: a lapsed put keeps its slot for put_grace, and nobody waits for that.
  metrics.gauge_from("di_meta_pending_frees", "Stripes that are out of the directory and not yet freed",
                     [&index] { return static_cast<std::int64_t>(index.pending_frees()); });
  metrics.gauge_from("di_meta_repairs_waiting", "Stripes that wait for repair",
                     [&index] { return static_cast<std::int64_t>(index.repair_queue().waiting()); });
  metrics.held_from("repairs",
                    [&index] { return static_cast<std::int64_t>(index.repair_queue().running()); });
  metrics.held_from("leases", [&index] { return static_cast<std::int64_t>(index.leases()); });
  metrics.held_from("open_puts", [&index] { return static_cast<std::int64_t>(index.open_puts()); });
}

void Meta::register_tenants(daemon::Metrics& metrics) {
  const kv::Evictor& evictor = service_->index().evictor();
  for (const auto& [number, name] : service_->tenant_names()) {
    const auto row = [&evictor, number] { return evictor.tenant(number); };
    const daemon::Metrics::Labels labels{{"tenant", name}};
    metrics.gauge_from(
        "di_meta_tenant_bytes", "What the tenant's stripes take on the stores",
        [row] { return static_cast<std::int64_t>(row().bytes); }, labels);
    metrics.gauge_from(
        "di_meta_tenant_quota_bytes", "What they may take; 0: no quota",
        [row] { return static_cast<std::int64_t>(row().quota_bytes); }, labels);
    metrics.gauge_from(
        "di_meta_tenant_stripes", "Stripes of the tenant, with those that are being written",
        [row] { return static_cast<std::int64_t>(row().items); }, labels);
    metrics.counter_from(
        "di_meta_tenant_puts_refused_total", "Stripes not written because the tenant is over its quota",
        [row] { return row().refused; }, labels);
    metrics.counter_from(
        "di_meta_tenant_stripes_evicted_total", "Stripes of the tenant that went for newer ones of its own",
        [row] { return row().evicted; }, labels);
  }
}

}  // namespace di::meta
