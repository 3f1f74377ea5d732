#include "store_role.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>

#include "base/clock.h"
#include "base/crypto.h"
#include "daemon/ready.h"
#include "fault_disk.h"
#include "net/envelope.h"
#include "store/disk_folder.h"

namespace di::kvd {

using namespace config::literals;
using daemon::FaultAction;
using daemon::FaultPoint;

namespace {

// Longer than any answer is waited for, shorter than a test's patience.
constexpr Duration fault_delay = milliseconds(1500);
constexpr std::size_t delayed_max = 64;
// A volume that is written once from end to end says so often how far it is.
constexpr Duration progress_every = seconds(10);
// And so often, from the first byte on, asks systemd for more time to start.
constexpr Duration extend_every = seconds(1);
// Who puts a volume back into service waits so long for its disk.
constexpr Duration return_wait = seconds(10);
// The disk is looked at every second; without a look, or with one that found it failed, the store is not ready.
constexpr Duration disk_late_after = seconds(10);

// In front of a path of store.volumes that is a folder of files.
constexpr std::string_view folder_mark = "path:";

bool is_folder(std::string_view volume) {
  return volume.starts_with(folder_mark);
}
std::string folder_of(const std::string& volume) {
  return volume.substr(folder_mark.size());
}

Status volumes_check(const StoreConfig& config, const std::vector<std::string>& given) {
  if (given.empty()) return {};
  const auto wrong = [](const std::string& what) { return Error{Code::invalid, 0, what}; };
  if (!config.path.empty()) return wrong("has no meaning with store.path");
  if (given.size() > store::Server::volumes_max) {
    return wrong("more than " + std::to_string(store::Server::volumes_max) + " volumes");
  }
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::string& path = given[i];
    if (path.empty()) return wrong("a path is empty");
    if (is_folder(path)) {
      const std::string folder = folder_of(path);
      if (folder.size() < 2 || folder.front() != '/' || folder.back() == '/') {
        return wrong("'" + path + "' has no absolute path of a folder");
      }
    }
    if (!is_folder(path) && path.front() != '/' && path.find('/') != std::string::npos) {
      return wrong("'" + path + "' is neither an absolute path nor a name");
    }
    if (std::find(given.begin(), given.begin() + static_cast<std::ptrdiff_t>(i), path) !=
        given.begin() + static_cast<std::ptrdiff_t>(i)) {
      return wrong("'" + path + "' is there twice");
    }
  }
  return {};
}

}  // namespace

void store_params(config::Params& params, StoreConfig& config) {
  params.string("store.path", config.path,
                {.path = true,
                 .check = [&config](const std::string& given) -> Status {
                   if (given.empty() || config.volumes.empty()) return {};
                   return Error{Code::invalid, 0, "has no meaning with store.volumes"};
                 },
                 .help = "the volume's file; empty: RUNDIR/INSTANCE.volume"});
  params.list(
      "store.volumes", config.volumes,
      {.check = [&config](const std::vector<std::string>& given) { return volumes_check(config, given); },
       .help = "the files of several volumes, in place of store.path; a name without / is that of "
               "RUNDIR/INSTANCE.NAME; path:FOLDER is a folder on a mounted file system"});
  params.size("store.capacity", config.capacity_bytes,
              {.def = 256_MiB,
               .min = 1_MiB,
               .help = "length of each volume that is made; taken from the file system at once"});
  params.size("store.segment_bytes", config.segment_bytes,
              {.def = 4_MiB, .min = 16_KiB, .max = 2_GiB, .help = "segment of a volume that is made"});
  params.boolean(
      "store.prewrite", config.prewrite,
      {.help = "write every byte of a volume that is made once, so that later writes never allocate"});
  params.choice<Durability>(
      "store.durability", config.durability,
      {{Durability::standard, "standard"}, {Durability::strict, "strict"}},
      {.def = Durability::standard,
       .help = "a put is acknowledged after its write (flushed within 100 ms), or after the flush"});
  params.duration("store.scrub_interval", config.scrub_interval,
                  {.def = std::chrono::hours(24 * 7),
                   .help = "every column is read and compared once in this time; 0: only on request"});
  params.size("store.scrub_bytes_per_s", config.scrub_bytes_per_s,
              {.def = 32_MiB, .min = 64_KiB, .help = "a scrub reads no faster"});
  params.size(
      "store.endurance", config.endurance_bytes,
      {.max = std::uint64_t{1} << 60,
       .help =
           "bytes that the disk of a volume endures in its life; above the part of a day puts are refused; "
           "0: no budget"});
  params.duration("store.service_life", config.service_life,
                  {.def = std::chrono::hours(24 * 365 * 5),
                   .min = std::chrono::hours(24),
                   .max = std::chrono::hours(24 * 365 * 100),
                   .help = "how long a disk shall serve: store.endurance is spread over it"});
  params.integer("store.io_threads", config.io_threads,
                 {.def = 4, .min = 1, .max = 256, .help = "threads that wait for the disk without io_uring"});
  params.choice<store::IoMode>(
      "store.io", config.io,
      {{store::IoMode::automatic, "auto"},
       {store::IoMode::uring, "uring"},
       {store::IoMode::threads, "threads"}},
      {.def = store::IoMode::automatic, .help = "auto: io_uring where the kernel lets us, else threads"});
}

Status store_validate(const StoreConfig& config, const config::Params& rows) {
  if (const auto geometry = store::Geometry::of(config.capacity_bytes, config.segment_bytes); !geometry) {
    return config::wrong(rows, {"store.capacity", "store.segment_bytes"},
                         "with store.capacity = " + config::size_print(config.capacity_bytes) +
                             " and store.segment_bytes = " + std::to_string(config.segment_bytes) + ": " +
                             geometry.error().message);
  }
  return {};
}

std::function<void(std::uint64_t)> StoreRole::progress_of(const std::string& path) const {
  return [this, path, told = MonotonicClock().now(),
          extended = std::optional<Instant>()](std::uint64_t bytes) mutable {
    const Instant now = MonotonicClock().now();
    if (!extended || now - *extended >= extend_every) {
      extended = now;
      daemon::notify_supervisor("EXTEND_TIMEOUT_USEC=60000000");
    }
    if (now - told < progress_every) return;
    told = now;
    log_info("store", "volume is being written once",
             {{"path", path}, {"bytes", bytes}, {"of_bytes", config_.capacity_bytes}});
  };
}

// Under another name until it is whole: a kill in between leaves nothing that looks like a volume.
Result<store::DiskFile> StoreRole::make_volume(const std::string& path) const {
  const std::string fresh = path + ".new";
  DI_TRY(store::disk_remove(fresh));
  Result<store::DiskFile> made =
      store::disk_create(fresh, config_.capacity_bytes, config_.prewrite, progress_of(path));
  if (!made) return made.error();
  if (Status formatted = format(*made->disk); !formatted.ok()) return formatted.error();
  if (Status named = store::disk_rename(fresh, path); !named.ok()) {
    made->disk.reset();
    static_cast<void>(store::disk_remove(fresh));
    return named.error();
  }
  log_info("store", "volume made", {{"path", path}, {"bytes", config_.capacity_bytes}});
  made->disk.reset();
  return store::disk_open(path);  // under its name, which errors tell
}

// The same.
Result<store::DiskFile> StoreRole::make_folder(const std::string& path) const {
  const std::string folder = folder_of(path);
  const std::string fresh = folder + ".new";
  DI_TRY(store::folder_remove(fresh));
  Result<store::DiskFile> made =
      store::folder_create(fresh, config_.capacity_bytes, config_.prewrite, progress_of(path));
  if (!made) return made.error();
  if (Status formatted = format(*made->disk); !formatted.ok()) return formatted.error();
  if (Status named = store::folder_rename(fresh, folder); !named.ok()) {
    made->disk.reset();
    static_cast<void>(store::folder_remove(fresh));
    return named.error();
  }
  log_info("store", "volume made", {{"path", path}, {"bytes", config_.capacity_bytes}});
  made->disk.reset();
  return store::folder_open(folder);
}

Status StoreRole::format(store::Disk& disk) const {
  store::Volume::FormatOptions options;
  options.segment_bytes = config_.segment_bytes;
  random_bytes(options.uuid);
  return store::Volume::format(disk, options);
}

// A block device becomes a volume when nobody has written to its beginning: never in place of something else.
Status StoreRole::make_on_device(const std::string& path, store::Disk& disk) const {
  const Result<bool> blank = store::disk_is_blank(disk);
  if (!blank) return blank.error();
  if (!*blank) return {};
  if (Status formatted = format(disk); !formatted.ok()) return formatted.error().in(path);
  log_info("store", "volume made", {{"path", path}, {"bytes", disk.bytes()}});
  return {};
}

Result<StoreRole::Opened> StoreRole::open_volume(const std::string& path) const {
  const bool folder = is_folder(path);
  Result<store::DiskFile> file = folder ? store::folder_open(folder_of(path)) : store::disk_open(path);
  if (!file && file.error().code == Code::not_found) file = folder ? make_folder(path) : make_volume(path);
  if (!file) return file.error();
  if (file->device) {
    if (Status made = make_on_device(path, *file->disk); !made.ok()) return made.error();
  }
  Result<std::unique_ptr<store::Volume>> volume = store::Volume::open(*file->disk);
  if (!volume) return volume.error().in(path);
  const store::Geometry& geometry = (*volume)->geometry();
  // A device is as long as it is.
  const bool length_fits = file->device || geometry.volume_bytes == config_.capacity_bytes;
  if (!length_fits || geometry.segment_bytes != config_.segment_bytes) {
    return Error{Code::invalid, 0,
                 path + ": was made with store.capacity of " + std::to_string(geometry.volume_bytes) +
                     " bytes and store.segment_bytes = " + std::to_string(geometry.segment_bytes) +
                     ": configure these, or remove the file to make a new volume"};
  }
  if (!file->direct && !folder)
    log_warn("store", "no O_DIRECT here: the page cache is in between", {{"path", path}});
  const store::Volume::Stats stats = (*volume)->stats();
  log_info("store", "volume open",
           {{"path", path},
            {"slots", stats.slots_live},
            {"bytes", stats.payload_bytes_live},
            {"recovered", stats.recovered_by_header},
            {"torn", stats.dropped_torn},
            {"unreadable", stats.unreadable},
            {"epoch", stats.epoch}});
  Opened opened;
  opened.direct = file->direct;
  opened.backing.disk = std::move(file->disk);
  opened.backing.volume = *std::move(volume);
  return opened;
}

Status StoreRole::add_pool(Opened& opened, std::uint16_t volume,
                           std::shared_ptr<store::DiskFigures> figures) const {
  store::Mount::Backing& backing = opened.backing;
  backing.disk = with_faults(std::move(backing.disk));
  auto pool = store::IoPool::create(daemon_->loop(), *backing.disk,
                                    {.mode = config_.io,
                                     .threads = config_.io_threads,
                                     .queue_max = store::Server::io_queue_max({}),
                                     .name = "store-" + std::to_string(volume),
                                     .figures = std::move(figures)});
  if (!pool) return pool.error().in("store.io");
  if ((*pool)->refused() && config_.io == store::IoMode::automatic) {
    log_info("store", "no io_uring here: threads wait for the disk",
             {{"path", backing.path}, {"error", *(*pool)->refused()}});
  }
  backing.pool = *std::move(pool);
  return {};
}

// What the disk has done to a volume is that volume's misfortune; what the configuration asks for and cannot be
// is told before anything is served.
Status StoreRole::on_prepare(daemon::Daemon& daemon) {
  std::vector<std::string> paths = config_.volumes;
  for (std::string& path : paths) {
    if (path.front() != '/' && !is_folder(path)) path = daemon.path(path);
  }
  if (paths.empty()) paths = {config_.path.empty() ? daemon.path("volume") : config_.path};
  for (const std::string& path : paths) {
    Result<Opened> opened = open_volume(path);
    if (!opened) {
      const Code code = opened.error().code;
      if (code != Code::corrupt && code != Code::io && code != Code::not_found) return opened.error();
      log_error("store", "volume out of service: it cannot be opened",
                {{"path", path}, {"error", opened.error()}});
      if (opened.error().os_errno == EROFS)
        log_error("store", "volume on a read-only file system: it failed, or the service may not write there",
                  {{"path", path}, {"hint", "ReadWritePaths= of the unit"}});
      Opened without;
      without.backing.refused = opened.error();
      opened = std::move(without);
    }
    opened->backing.path = path;
    opened_.push_back(*std::move(opened));
  }
  return {};
}

Status StoreRole::on_start(daemon::Daemon& daemon) {
  daemon_ = &daemon;
  store::Server::Options options;
  options.self.instance = daemon.instance();
  options.run_dir = daemon.config().run_dir;
  options.strict = config_.durability == Durability::strict;
  options.scrub = {config_.scrub_interval, config_.scrub_bytes_per_s};
  options.budget.endurance_bytes = config_.endurance_bytes;
  options.budget.days = to_s(config_.service_life) / 86400;
  store::Server::Hooks hooks;
  hooks.volumes_changed = [this] { tell_degraded(); };
  hooks.scrub_beat = [&beat = daemon.heartbeat("store-scrub", store::Scrub::late_after)] { beat(); };
  hooks.disk_beat = [&beat = daemon.heartbeat("store-disk", disk_late_after)] { beat(); };
  // A peer that is not up any more was reported lost, or will be.
  hooks.send = [this](const wire::Envelope& message) {
    static_cast<void>(net::envelope_send(daemon_->endpoint(), message));
  };
  hooks.put_written = [this](std::function<void()> answer) { put_written(std::move(answer)); };
  if (daemon::fault_armed(FaultPoint::kvd_mid_segment)) {
    hooks.mid_segment = [] { daemon::fault(FaultPoint::kvd_mid_segment); };
  }
  auto plane = DataPlane::start(
      daemon, data_config_, {},
      {.done = [this](transfer::OpId op, Code code) { server_->moved(op, code); }, .concealed = {}});
  if (!plane) return plane.error();
  plane_ = *std::move(plane);
  std::vector<store::Mount::Backing> volumes;
  for (Opened& opened : opened_) {
    if (opened.backing.disk) DI_TRY(add_pool(opened, static_cast<std::uint16_t>(volumes.size()), nullptr));
    direct_.push_back(opened.direct);
    volumes.push_back(std::move(opened.backing));
  }
  opened_.clear();
  server_ = std::make_unique<store::Server>(daemon.loop(), std::move(volumes), plane_->fabric(),
                                            std::move(options), std::move(hooks));
  tell_degraded();
  register_metrics(daemon.metrics());
  watch_timer_ = std::make_unique<loop::Timer>(daemon.loop(), loop::TimerKind::liveness, "scrub-watch",
                                               [this] { scrub_tell(); });

  net::Endpoint& endpoint = daemon.endpoint();
  net::take_messages<wire::kv_read, wire::kv_read_cancel, wire::kv_put, wire::kv_free,
                     wire::meta_inventory_ack, wire::meta_inventory_want>(
      endpoint, [this](const net::Incoming& in) { deliver(in); });
  endpoint.on_peer_up([this](const net::Member& member) { peer_up(member); });
  endpoint.on_peer_lost([this](net::PeerId id, std::uint32_t) { peer_lost(id); });
  if (const auto bound = daemon.listen(); !bound) return bound.error();

  net::Member self = daemon.self_member();
  self.role = "store";
  self.data = plane_->endpoint();
  net::MetaClient::Events events;
  events.registered = [this](const wire::meta_registered& answer) {
    plane_->registered({std::string(daemon_->instance()), answer.generation});
    server_->set_self({std::string(daemon_->instance()), answer.generation});
    daemon_->ready();
  };
  events.members = [this](const std::vector<net::Member>& members) {
    for (const net::Member& member : members) {
      if (member.layout.empty()) continue;
      if (const auto layout = kv::Layout::decode(member.layout)) server_->learn_layout(*layout);
    }
  };
  daemon.enroll(std::move(self), std::move(events));
  return {};
}

StoreRole::~StoreRole() {
  *alive_ = false;
  for (auto& [volume, returning] : returning_) {
    if (returning.opener.joinable()) returning.opener.join();
  }
}

void StoreRole::on_stop(daemon::Daemon& daemon) {
  if (!server_) return daemon.stopped();
  server_->stop([this] {
    if (net::MetaClient* meta = daemon_->meta()) meta->set_state(2);
    daemon_->stopped();
  });
}

// ---- peers and messages

void StoreRole::peer_up(const net::Member& member) {
  peers_[member.id] = member;
  plane_->peer_up(member);
  const store::Peer peer{member.instance, member.generation};
  if (member.program == "di-meta") {
    server_->meta_up(peer);
  } else if (member.program == "di-kvd" && member.role == "host") {
    server_->host_up(peer, member.host == daemon_->endpoint().self().host);
  }
}

void StoreRole::peer_lost(net::PeerId id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  const store::Peer peer{found->second.instance, found->second.generation};
  if (found->second.program == "di-meta") {
    server_->meta_lost(peer);
  } else {
    server_->host_lost(peer);
    plane_->peer_lost(peer);
  }
  peers_.erase(found);
}

void StoreRole::deliver(const net::Incoming& in) {
  const auto found = peers_.find(in.from.id);
  if (found == peers_.end()) return;
  // Only di-meta frees and answers inventories, only hosts read and put.
  const std::uint16_t number = in.header.number;
  const bool for_meta = number == wire::kv_free::number || number == wire::meta_inventory_ack::number ||
                        number == wire::meta_inventory_want::number;
  if (for_meta != (found->second.program == "di-meta")) return;
  server_->on_message(net::envelope_of(in, found->second.instance));
}

void StoreRole::put_written(std::function<void()> answer) {
  switch (daemon::fault(FaultPoint::store_after_slot_write)) {
    case FaultAction::none:
      return answer();
    case FaultAction::drop:
      return;
    case FaultAction::delay:
      if (delayed_.size() >= delayed_max) return answer();
      delayed_.push_back(std::make_unique<loop::Timer>(daemon_->loop(), loop::TimerKind::liveness,
                                                       "delayed answer", std::move(answer)));
      delayed_.back()->start_after(fault_delay);
  }
}

// ---- what can be seen

void StoreRole::register_metrics(daemon::Metrics& metrics) {
  const store::ServerCounters& c = server_->counters();
  const auto counter = [&](std::string_view name, std::string_view help, const std::uint64_t& cell,
                           daemon::Metrics::Labels labels = {}) {
    metrics.counter_from(
        name, help, [&cell] { return cell; }, std::move(labels));
  };
  const std::string_view reads = "Reads of columns into arenas";
  counter("di_store_reads_total", reads, c.reads, {{"outcome", "done"}});
  counter("di_store_reads_total", reads, c.reads_not_found, {{"outcome", "not_found"}});
  counter("di_store_reads_total", reads, c.reads_corrupt, {{"outcome", "corrupt"}});
  counter("di_store_reads_total", reads, c.reads_io, {{"outcome", "io"}});
  counter("di_store_reads_total", reads, c.reads_refused, {{"outcome", "refused"}});
  counter("di_store_reads_total", reads, c.reads_cancelled, {{"outcome", "cancelled"}});
  counter("di_store_read_bytes_total", "Payload bytes read into arenas", c.read_bytes);
  const std::string_view puts = "Writes of columns to the volume";
  counter("di_store_puts_total", puts, c.puts, {{"outcome", "done"}});
  counter("di_store_puts_total", puts, c.puts_no_space, {{"outcome", "no_space"}});
  counter("di_store_puts_total", puts, c.puts_io, {{"outcome", "io"}});
  counter("di_store_puts_total", puts, c.puts_corrupt, {{"outcome", "corrupt"}});
  counter("di_store_puts_total", puts, c.puts_over_budget, {{"outcome", "over_budget"}});
  counter("di_store_puts_total", puts, c.puts_refused, {{"outcome", "refused"}});
  counter("di_store_put_bytes_total", "Payload bytes written", c.put_bytes);
  counter("di_store_columns_freed_total", "Columns freed for di-meta", c.columns_freed);
  counter("di_store_inventories_total", "Inventories that di-meta took to the end", c.inventories);
  counter("di_store_slots_dropped_total", "Slots whose header could not be read", c.slots_dropped);
  counter("di_store_columns_dropped_total", "Columns that were not what they had been", c.columns_dropped);
  metrics.histogram_from("di_store_read_us", "From kv_read to its last answer", server_->read_us());
  metrics.histogram_from("di_store_put_us", "From kv_put to its answer", server_->put_us());
  metrics.gauge_from("di_store_io_pending", "Disk tasks queued or running",
                     [this] { return static_cast<std::int64_t>(server_->io_pending()); });
  metrics.held_from("reads", [this] { return static_cast<std::int64_t>(server_->transfers()); });
  metrics.held_from("puts", [this] { return static_cast<std::int64_t>(server_->puts()); });
  metrics.held_from("slots_reading", [this] { return static_cast<std::int64_t>(server_->slots_reading()); });
  for (const auto& mount : server_->mounts()) register_metrics(metrics, *mount);
}

// Of one volume, with its number as a label.
void StoreRole::register_metrics(daemon::Metrics& metrics, const store::Mount& mount) {
  const daemon::Metrics::Label volume{"volume", std::to_string(mount.number())};
  const auto gauge = [&](std::string_view name, std::string_view help, auto member) {
    metrics.gauge_from(
        name, help, [&mount, member] { return static_cast<std::int64_t>(mount.stats().*member); }, {volume});
  };
  using Stats = store::Volume::Stats;
  gauge("di_store_slots", "Live slots", &Stats::slots_live);
  gauge("di_store_payload_bytes", "Payload bytes of live slots", &Stats::payload_bytes_live);
  gauge("di_store_slot_bytes", "Bytes that live slots occupy", &Stats::slot_bytes_live);
  gauge("di_store_capacity_bytes", "Bytes of all segments", &Stats::bytes_total);
  gauge("di_store_slots_bad", "Slots not used any more because a write failed", &Stats::slots_bad);
  gauge("di_store_segments_open", "Segments whose headers a restart would read", &Stats::segments_open);
  metrics.gauge_from("di_store_broken", "1 when a write of the tables failed and puts are refused",
                     [&mount] { return mount.reason() == "broken" ? 1 : 0; }, {volume});
  metrics.gauge_from("di_store_disk_state", "0 in service, 1 avoided (slow or full), 2 failed",
                     [&mount] { return static_cast<std::int64_t>(mount.state()); }, {volume});
  metrics.counter_from("di_store_syncs_total", "Flushes with the tables written behind",
                       [&mount] { return mount.syncs(); }, {volume});
  using Scrubbed = store::Scrub::Counters;
  const auto counter = [&](std::string_view name, std::string_view help, std::uint64_t Scrubbed::*member,
                           daemon::Metrics::Labels labels = {}) {
    labels.push_back(volume);
    metrics.counter_from(
        name, help, [&mount, member] { return mount.scrubbed().*member; }, std::move(labels));
  };
  const kv::WriteBudget& budget = mount.budget();
  const auto of_budget = [&](std::string_view name, std::string_view help, auto value) {
    metrics.counter_from(name, help, [&budget, value] { return value(budget); }, {volume});
  };
  of_budget("di_store_write_vetoes_total", "Puts refused for the write budget of the disk",
            [](const kv::WriteBudget& of) { return of.vetoes(); });
  of_budget("di_store_write_vetoed_bytes_total", "Bytes refused for the write budget of the disk",
            [](const kv::WriteBudget& of) { return of.vetoed_bytes(); });
  metrics.gauge_from("di_store_written_bytes", "Bytes written to the volume since it was made",
                     [&budget] { return static_cast<std::int64_t>(budget.written_bytes()); }, {volume});
  metrics.gauge_from("di_store_budget_left_bytes", "What may be written today; 0 without store.endurance",
                     [&mount] { return static_cast<std::int64_t>(mount.budget_left_bytes()); }, {volume});
  metrics.gauge_from("di_store_days_of_life",
                     "Days until the disk has had what it endures, at the pace of a day; 36500: more",
                     [&mount] { return static_cast<std::int64_t>(mount.days_of_life()); }, {volume});
  counter("di_store_scrub_passes_total", "Passes of the scrub that came to the end", &Scrubbed::passes);
  counter("di_store_scrub_columns_total", "Columns read by the scrub", &Scrubbed::columns);
  counter("di_store_scrub_bytes_total", "Bytes read by the scrub", &Scrubbed::bytes);
  const std::string_view bad = "Columns that the scrub found to be bad";
  counter("di_store_scrub_bad_total", bad, &Scrubbed::corrupt, {{"code", "corrupt"}});
  counter("di_store_scrub_bad_total", bad, &Scrubbed::unreadable, {{"code", "io"}});
  const store::DiskFigures& disk = *mount.figures();
  const std::string_view errors = "Accesses to the disk that failed, and payloads that did not match";
  const auto disk_error = [&](std::string_view what, const std::atomic<std::uint64_t>& cell) {
    metrics.counter_from("di_store_disk_errors_total", errors,
                         [&cell] { return cell.load(std::memory_order_relaxed); },
                         {{"what", std::string(what)}, volume});
  };
  disk_error("read", disk.read_errors);
  disk_error("write", disk.write_errors);
  disk_error("no_space", disk.no_space);
  disk_error("corrupt", disk.corrupt);
  metrics.histogram_from("di_store_disk_read_us", "One read of the disk", disk.read_us, {volume});
  metrics.histogram_from("di_store_disk_write_us", "One write of the disk", disk.write_us, {volume});
}

// A row a second for each volume, and the last ones when all passes are over.
void StoreRole::scrub_tell() {
  std::erase_if(watchers_, [&](Watcher& watcher) {
    if (!watcher.reply.wanted()) return true;
    std::vector<std::uint16_t> running;
    for (const std::uint16_t number : watcher.running) {
      if (!server_->mounts()[number]->serves()) {
        watcher.reply.fail(
            Error{Code::cancelled, 0, "volume " + std::to_string(number) + " went out of service"});
        return true;
      }
      const store::Scrub::Pass& pass = server_->mounts()[number]->scrub().pass();
      if (watcher.passes[number] != pass.number) {
        watcher.reply.fail(Error{Code::cancelled, 0, "another pass was asked for"});
        return true;
      }
      daemon::Row row;
      row.number("volume", number)
          .number("pass", pass.number)
          .text("state", pass.running ? "running" : "done")
          .number("slots", pass.slots)
          .number("slots_done", pass.slots_done)
          .number("bytes_done", pass.bytes_done)
          .number("corrupt", pass.corrupt)
          .number("unreadable", pass.unreadable);
      watcher.reply.row(row);
      if (pass.running) running.push_back(number);
    }
    watcher.running = std::move(running);
    if (watcher.running.empty()) watcher.reply.end();
    return watcher.running.empty();
  });
  if (!watchers_.empty()) watch_timer_->start_after(seconds(1));
}

void StoreRole::ctl_scrub(daemon::Reply reply) {
  std::vector<std::uint64_t> passes(server_->mounts().size());
  std::vector<std::uint16_t> running;
  for (const auto& mount : server_->mounts()) {
    if (!mount->serves()) continue;
    mount->scrub().start();
    passes[mount->number()] = mount->scrub().pass().number;
    running.push_back(mount->number());
  }
  if (running.empty()) return reply.fail(Error{Code::io, 0, "no volume is open: show volumes says why"});
  watchers_.push_back({std::move(passes), std::move(running), std::move(reply)});
  scrub_tell();
}

void StoreRole::ctl_check(daemon::Reply reply) {
  const Status begun = server_->check([this, reply](const std::vector<store::Server::Check>& checks) mutable {
    for (const store::Server::Check& found : checks) {
      const store::Mount& mount = *server_->mounts()[found.volume];
      daemon::Row row;
      row.number("volume", found.volume)
          .text("state", state_of(mount))
          .number("slots", found.slots)
          .number("verified", found.verified)
          .number("corrupt", found.corrupt)
          .number("unreadable", found.unreadable)
          .number("orphans", found.orphans)
          .boolean("compared_with_di_meta", found.told);
      reply.row(row);
    }
    reply.end();
  });
  if (!begun.ok()) reply.fail(begun.error());
}

std::string_view StoreRole::state_of(const store::Mount& mount) {
  if (mount.state() == store::DiskState::good) return "up";
  return mount.reason() == "broken" ? "broken" : store::disk_state_name(mount.state());
}

void StoreRole::ctl_volumes(daemon::Reply reply) {
  for (const auto& mount : server_->mounts()) {
    const store::Volume::Stats stats = mount->stats();
    daemon::Row row;
    row.text("place", daemon_->instance())
        .number("volume", mount->number())
        .text("path", mount->path())
        .text("state", state_of(*mount))
        .text("reason", mount->reason())
        .number("columns", stats.slots_live)
        .number("payload_bytes", stats.payload_bytes_live)
        .number("used_bytes", stats.slot_bytes_live)
        .number("capacity_bytes", stats.bytes_total)
        .boolean("direct", direct_[mount->number()])
        .number("written_bytes", mount->budget().written_bytes())
        .number("budget_bytes_per_day", mount->budget().budget_bytes_per_day())
        .number("budget_left_bytes", mount->budget_left_bytes())
        .boolean("budget_spent", mount->spent())
        .number("days_of_life", static_cast<std::uint64_t>(mount->days_of_life()))
        .number("vetoes", mount->budget().vetoes())
        .number("vetoed_bytes", mount->budget().vetoed_bytes())
        .number("segments", stats.segments)
        .number("segments_bound", stats.segments_bound)
        .number("segments_open", stats.segments_open)
        .number("slots_bad", stats.slots_bad)
        .boolean("scrubbing", mount->is_open() && mount->scrub().pass().running)
        .number("epoch", stats.epoch)
        .text("error", mount->refused() ? mount->refused()->message : "");
    reply.row(row);
  }
  reply.end();
}

// An operator has mended a disk: what is there now is opened as at a start, and serves when it can be.
void StoreRole::ctl_return(const std::string& number, daemon::Reply reply) {
  std::uint16_t volume = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), volume);
  if (error != std::errc{} || end != number.data() + number.size())
    return reply.fail(Error{Code::invalid, 0, "'" + number + "' is no number of a volume"});
  if (returning_.contains(volume))
    return reply.fail(Error{Code::busy, 0, "volume " + number + " is being opened"});
  const Status closing = server_->volume_close(volume, [this, volume] {
    returning_.at(volume).opener = std::thread([this, volume, path = server_->mounts()[volume]->path()] {
      auto opened = std::make_shared<Result<Opened>>(open_volume(path));
      daemon_->loop().post("volume opened", [this, alive = alive_, volume, opened] {
        if (*alive) return_opened(volume, std::move(*opened));
      });
    });
  });
  if (!closing.ok()) return reply.fail(closing.error());
  Returning& returning = returning_[volume];
  returning.reply = std::move(reply);
  returning.late = std::make_unique<loop::Timer>(daemon_->loop(), loop::TimerKind::liveness, "volume return",
                                                 [this, volume] { return_late(volume); });
  returning.late->start_after(return_wait);
}

// What was begun on the disk, or its opening, does not end.  Nothing is given up.
void StoreRole::return_late(std::uint16_t volume) {
  std::exchange(returning_.at(volume).reply, std::nullopt)
      ->fail(Error{Code::busy, 0,
                   server_->mounts()[volume]->path() +
                       ": its disk does not answer yet: the volume is in service when it does"});
}

void StoreRole::return_opened(std::uint16_t volume, Result<Opened> opened) {
  Returning returning = std::move(returning_.extract(volume).mapped());
  returning.opener.join();
  std::optional<daemon::Reply>& reply = returning.reply;
  const store::Mount& mount = *server_->mounts()[volume];
  if (opened) {
    if (Status pool = add_pool(*opened, volume, mount.figures()); !pool.ok()) opened = pool.error();
  }
  if (!opened) {
    log_error("store", "volume stays out of service", {{"path", mount.path()}, {"error", opened.error()}});
    store::Mount::Backing without;
    without.refused = opened.error();
    server_->volume_open(volume, std::move(without));
    Error why = opened.error();
    if (why.code == Code::corrupt)
      why.message += ": put a whole volume there, or take the damaged one away for an empty one, and repeat";
    if (reply) reply->fail(why);
    return;
  }
  direct_[volume] = opened->direct;
  server_->volume_open(volume, std::move(opened->backing));
  log_info("store", "volume in service again", {{"path", mount.path()}});
  if (!reply) return;
  daemon::Row row;
  row.number("volume", volume)
      .text("path", mount.path())
      .text("state", state_of(mount))
      .number("columns", mount.stats().slots_live);
  reply->end(row);
}

void StoreRole::tell_degraded() {
  if (!server_) return;  // it is being made
  std::string out;
  bool serves = false;
  for (const auto& mount : server_->mounts()) {
    // One that is slow or full for a while still has what it holds.
    if (mount->state() != store::DiskState::failed) serves = true;
    if (mount->state() == store::DiskState::good) continue;
    out.append(out.empty() ? "" : "; ").append("volume ").append(std::to_string(mount->number()));
    out.append(" takes no columns (").append(mount->reason()).append("): ");
    out.append(mount->refused() ? mount->refused()->message : mount->path());
  }
  daemon_->degraded(out, serves);
}

// One row for the whole node: up as long as one volume takes columns.
void StoreRole::ctl_kv(daemon::Reply reply) {
  store::Volume::Stats sum;
  const store::Mount* shown = server_->mounts().front().get();  // whose state is that of the node
  std::size_t out = 0;
  bool scrubbing = false;
  for (const auto& mount : server_->mounts()) {
    const store::Volume::Stats stats = mount->stats();
    sum.slots_live += stats.slots_live;
    sum.payload_bytes_live += stats.payload_bytes_live;
    sum.slot_bytes_live += stats.slot_bytes_live;
    sum.bytes_total += stats.bytes_total;
    sum.segments += stats.segments;
    sum.segments_bound += stats.segments_bound;
    sum.segments_open += stats.segments_open;
    sum.slots_bad += stats.slots_bad;
    scrubbing = scrubbing || (mount->is_open() && mount->scrub().pass().running);
    if (mount->state() == store::DiskState::good) {
      shown = mount.get();
    } else {
      ++out;
    }
  }
  daemon::Row row;
  row.text("place", daemon_->instance())
      .text("tier", "store")
      .text("state", state_of(*shown))
      .text("reason", shown->reason())
      .number("volumes", server_->mounts().size())
      .number("volumes_out", out)
      .number("slots", sum.slots_live)
      .number("payload_bytes", sum.payload_bytes_live)
      .number("slot_bytes", sum.slot_bytes_live)
      .number("capacity_bytes", sum.bytes_total)
      .number("segments", sum.segments)
      .number("segments_bound", sum.segments_bound)
      .number("segments_open", sum.segments_open)
      .number("slots_bad", sum.slots_bad)
      .number("reads", server_->transfers())
      .number("puts", server_->puts())
      .number("arenas", server_->arenas())
      .boolean("inventory", server_->inventory_running())
      .boolean("scrubbing", scrubbing);
  reply.end(row);
}

bool StoreRole::on_ctl(const daemon::Words& words, daemon::Reply reply) {
  using daemon::Reply;
  using daemon::Words;
  if (!server_) return false;
  const daemon::Command commands[] = {
      {"show kv", [this](const Words&, Reply& to) { ctl_kv(to); }},
      {"show volumes", [this](const Words&, Reply& to) { ctl_volumes(to); }},
      {"kv fsck", [this](const Words&, Reply& to) { ctl_check(to); }},
      {"kv scrub", [this](const Words&, Reply& to) { ctl_scrub(to); }},
      {"kv volume return", [this](const Words& more, Reply& to) { ctl_return(more[0], to); }, 1, 1},
  };
  return daemon::answer_by(commands, words, std::move(reply));
}

void StoreRole::on_dump() {
  if (!server_) return;
  log_info("store", "state",
           {{"reads", server_->transfers()}, {"puts", server_->puts()}, {"arenas", server_->arenas()}});
  for (const auto& mount : server_->mounts()) {
    const store::Volume::Stats stats = mount->stats();
    log_info("store", "volume",
             {{"path", mount->path()},
              {"state", state_of(*mount)},
              {"slots", stats.slots_live},
              {"bytes", stats.payload_bytes_live},
              {"segments_open", stats.segments_open}});
  }
}

}  // namespace di::kvd
