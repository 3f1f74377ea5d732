// What a host counts: names, help and cells.
#include "host_role.h"

namespace di::kvd {

void HostRole::register_metrics(daemon::Metrics& metrics) {
  const auto counter = [&](std::string_view name, std::string_view help, const std::uint64_t& cell,
                           daemon::Metrics::Labels labels = {}) {
    metrics.counter_from(
        name, help, [&cell] { return cell; }, std::move(labels));
  };
  const host::Books& books = core_->fetches().books();
  counter("di_kv_matched_blocks_total", "Blocks that requests asked for", books.matched);
  counter("di_kv_fetched_blocks_total", "Matched blocks that were there, verified", books.fetched);
  const std::string_view lost = "Matched blocks that were not there for their request";
  const std::string_view reasons[] = {"evicted", "timeout", "checksum", "cancelled", "computed"};
  for (std::size_t i = 0; i < books.lost.size(); ++i) {
    counter("di_kv_lost_blocks_total", lost, books.lost[i], {{"reason", std::string(reasons[i])}});
  }
  counter("di_kv_swapped_blocks_total", "Fetched blocks whose request ended with them", books.swapped);
  counter("di_kv_unused_blocks_total", "Fetched blocks whose request went away", books.unused);
  const host::FetchCounters& fetch = core_->fetches().counters();
  const host::FillingCounters& filling = core_->fillings().counters();
  counter("di_kv_fetches_cut_total", "Fetches of which some blocks were sooner computed", fetch.fetches_cut);
  counter("di_kv_fetch_probes_total", "Fetches that were not cut, to see how long they take by now",
          fetch.probes);
  counter("di_kv_arena_blocks_total", "Matched blocks found in the arena", fetch.arena_blocks);
  counter("di_kv_plans_total", "Plans asked of di-meta", fetch.plans);
  counter("di_kv_plans_failed_total", "Plans without an answer", fetch.plans_failed);
  counter("di_kv_plans_malformed_total", "Pages of plans that do not fit the layout", filling.malformed);
  const host::ReadCounters& reads = core_->reads().counters();
  counter("di_kv_reads_total", "Columns asked of stores, and pages of other arenas", reads.reads);
  counter("di_kv_arena_reads_total", "Pages asked of other arenas", reads.arena_reads);
  counter("di_kv_read_bytes_total", "Bytes of pages that came, verified", filling.read_bytes);
  counter("di_kv_reads_failed_total", "Reads that failed or went silent", reads.failed);
  counter("di_kv_reads_corrupt_total", "Reads whose bytes did not match the plan", filling.columns_corrupt);
  counter("di_kv_reads_cancelled_total", "Reads that nobody wanted any more", reads.cancelled);
  counter("di_kv_pages_failed_total", "Pages that did not come", filling.pages_failed);
  counter("di_kv_pages_rebuilt_total", "Pages of which columns were made out of others",
          filling.pages_rebuilt);
  counter("di_kv_hedges_total", "Pages with a late column that others were to make", filling.hedges);
  counter("di_kv_hedges_won_total", "Hedges that were sooner than the late column", filling.hedges_won);
  const host::HedgeCounters& hedge = core_->hedge().counters();
  counter("di_kv_hedges_refused_total", "Late columns that the budget had no read for", hedge.hedges_refused);
  counter("di_kv_skips_total", "Columns not asked for because their store is slow", hedge.skips);
  counter("di_kv_skip_probes_total", "Columns of slow stores that were asked for all the same", hedge.probes);
  const host::RebuildCounters& rebuild = core_->rebuilds().counters();
  counter("di_kv_rebuilds_total", "Stripes of which columns were to be made", rebuild.rebuilds);
  counter("di_kv_rebuilds_failed_total", "Pages for which too few columns were left", rebuild.failed);
  counter("di_kv_rebuilt_bytes_total", "Bytes that were made out of other columns", rebuild.bytes);
  counter("di_kv_rebuild_reads_total", "Columns read for nothing but a rebuild", rebuild.scratch_reads);
  counter("di_kv_rebuild_corrupt_total", "Columns that did not match when they were used for a rebuild",
          rebuild.columns_corrupt);
  const host::RepairCounters& repair = core_->repairs().counters();
  counter("di_kv_repairs_total", "Stripes repaired here for di-meta", repair.repairs);
  counter("di_kv_repairs_refused_total", "Repairs refused: too many at once, or no room", repair.refused);
  counter("di_kv_repairs_failed_total", "Repairs that came to nothing, or not to all", repair.failed);
  counter("di_kv_cross_checks_total", "Stripes whose columns were compared with each other here",
          repair.checks);
  counter("di_kv_repaired_columns_total", "Columns written by repairs", repair.columns);
  counter("di_kv_repaired_bytes_total", "Their bytes", repair.bytes);
  counter("di_kv_repair_copies_total", "Of them, columns that were copied and not made out of others",
          repair.copied);
  counter("di_kv_prefetches_total", "Hints from routers", fetch.prefetches);
  counter("di_kv_prefetched_blocks_total", "Blocks read because of a hint", fetch.prefetched_blocks);
  const host::PageCounters& pages = core_->pages().counters();
  counter("di_kv_pages_sealed_total", "Pages sealed by ranks", pages.sealed);
  counter("di_kv_pages_filled_total", "Pages filled from stores and other arenas", pages.filled);
  counter("di_kv_pages_duplicate_total", "Sealed pages that brought no new block", pages.duplicates);
  counter("di_kv_pages_evicted_total", "Pages thrown out for room", pages.evicted);
  counter("di_kv_pages_dropped_total", "Pages thrown out by order", pages.dropped);
  counter("di_kv_pages_recovered_total", "Pages kept over a restart", pages.recovered);
  metrics.counter_from("di_kv_pages_recovery_bad_total",
                       "Pages not kept because they did not match their records",
                       [this] { return core_->recovery().bad(); });
  counter("di_kv_pages_unrecorded_total", "Sealed pages that a restart would lose", pages_unrecorded());
  counter("di_kv_pages_quarantined_total", "Pages that waited for their writer to let go", pages.quarantined);
  counter("di_kv_room_refused_total", "Requests for room that found none", pages.room_refused);
  const host::WritebackCounters& back = core_->writeback().counters();
  counter("di_kv_writebacks_queued_total", "Pages that were to be written to the store", back.queued);
  counter("di_kv_writebacks_total", "Pages published in the store", back.written);
  counter("di_kv_writeback_bytes_total", "Bytes published in the store", back.written_bytes);
  counter("di_kv_writebacks_existed_total", "Pages that the store had already", back.existed);
  counter("di_kv_writebacks_retried_total", "Write-backs tried again", back.retried);
  const std::string_view dropped = "Pages not written to the store";
  counter("di_kv_writebacks_dropped_total", dropped, back.dropped_full, {{"reason", "full"}});
  counter("di_kv_writebacks_dropped_total", dropped, back.dropped_evicted, {{"reason", "evicted"}});
  counter("di_kv_writebacks_dropped_total", dropped, back.dropped_failed, {{"reason", "failed"}});
  counter("di_kv_writebacks_dropped_total", dropped, back.dropped_quota, {{"reason", "over_quota"}});
  counter("di_kv_writebacks_dropped_total", dropped, back.dropped_over_budget, {{"reason", "over_budget"}});
  counter("di_kv_stripes_total", "Stripes published in the store", back.stripes);
  counter("di_kv_stripes_degraded_total", "Stripes published with fewer columns than they should have",
          back.degraded);
  counter("di_kv_columns_written_total", "Columns of stripes written", back.columns);
  counter("di_kv_columns_failed_total", "Columns of stripes that could not be written", back.columns_failed);
  counter("di_kv_encoded_bytes_total", "Bytes of pages that parity or checksums of parts were made of",
          back.encoded_bytes);
  counter("di_kv_pages_changed_total", "Pages that were not what they had been when they were encoded",
          back.pages_changed);
  const host::HandoverCounters& hand = core_->handovers().counters();
  counter("di_kv_handovers_total", "Hand-overs begun here", hand.sources);
  counter("di_kv_handovers_acknowledged_total", "Hand-overs acknowledged", hand.acknowledged);
  counter("di_kv_handovers_failed_total", "Hand-overs that failed", hand.failed);
  counter("di_kv_handovers_replaced_total", "Hand-overs to another seat instead", hand.replaced);
  counter("di_kv_seats_total", "Seats expected here", hand.seats);
  counter("di_kv_seats_refused_total", "Seats without room", hand.seats_refused);
  counter("di_kv_seated_total", "Seats whose request arrived", hand.seated);
  counter("di_kv_handover_pages_taken_total", "Pages of other hosts taken for seats here", hand.pages_taken);
  counter("di_kv_handover_pages_corrupt_total", "Handed-over pages and tails whose bytes did not match",
          hand.pages_corrupt);
  counter("di_kv_handovers_gave_up_total", "Hand-overs over a link that was too slow", hand.gave_up);
  const host::PushCounters& push = core_->pushes().counters();
  counter("di_kv_pushed_pages_total", "Pages written into arenas of other hosts", push.pages);
  counter("di_kv_pushed_bytes_total", "Their bytes", push.bytes);
  counter("di_kv_pushes_failed_total", "Pages that did not get there", push.failed);
  counter("di_kv_pushes_cancelled_total", "Pages that nobody wanted any more on their way", push.cancelled);
  const host::ServeCounters& serve = core_->serves().counters();
  counter("di_kv_served_pages_total", "Pages that other hosts read here", serve.served);
  counter("di_kv_serves_not_found_total", "Pages asked for by other hosts that are not here",
          serve.not_found);
  counter("di_kv_holds_lapsed_total", "Holds that ended by time", hand.lapsed);
  const host::CoreCounters& core = core_->counters();
  counter("di_kv_messages_ignored_total", "Messages about what is gone, or from who may not send them",
          core.ignored);
  counter("di_kv_messages_malformed_total", "Messages that do not decode", core.malformed);
  counter("di_kv_grants_refused_total", "kv_open without room", core.grants_refused);
  counter("di_kv_seals_corrupt_total", "Sealed pages whose bytes did not match", core.seals_corrupt);
  counter("di_kv_seals_invalid_total", "Sealed pages that do not fit", core.seals_invalid);
  counter("di_kv_clients_lost_total", "Clients that went away holding something", core.clients_lost);
  counter("di_kv_arena_deltas_total", "Reports to di-meta", core.deltas);
  counter("di_kv_arena_snapshots_total", "Full reports to di-meta", core.snapshots);
  metrics.gauge_from("di_kv_arena_free_bytes", "Free bytes of the arena", [this] {
    return static_cast<std::int64_t>(core_->pages().has_layout() ? core_->pages().bytes_free()
                                                                 : config_.arena_bytes);
  });
  metrics.gauge_from("di_kv_arena_evictable_bytes", "Bytes of cached pages that nobody holds",
                     [this] { return static_cast<std::int64_t>(core_->pages().bytes_evictable()); });
  metrics.gauge_from("di_kv_arena_clients", "Processes that map the arena",
                     [this] { return static_cast<std::int64_t>(core_->attached_count()); });
  const std::vector<host::Gauge> gauges = core_->gauges();
  for (std::size_t i = 0; i < gauges.size(); ++i) {
    metrics.held_from(gauges[i].name,
                      [this, i] { return static_cast<std::int64_t>(core_->gauges()[i].count); });
  }
}

}  // namespace di::kvd
