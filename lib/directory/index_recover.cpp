// Inventory, failed reads and repair.
#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "directory/index.h"

namespace di::directory {

namespace {

constexpr std::uint64_t stripe_of(std::uint64_t page) {
  return page >> 8;
}

std::uint16_t wire_code(Code code) {
  return static_cast<std::uint16_t>(code);
}

}  // namespace

// ---- Inventory ---------------------------------------------------------------------------------

bool Index::adopt(std::uint32_t number, const wire::ShardRecord& shard, Instant now) {
  Store& store = stores_[number];
  if (!id_valid(shard.stripe) || shard.volume >= volumes_max || !pages_valid(shard.pages)) return true;
  const auto form = StripeForm::of_code(shard.code, shard.pages);
  if (!form || !form->is_stored(shard.column)) return true;
  if (frees_.pending(number, shard.stripe, shard.column)) return false;  // on its way out
  if (puts_.find(shard.stripe) != nullptr) return false;                 // its writer will say
  std::uint32_t slot = stripes_.find(shard.stripe);
  const StripeName name{shard.stripe, shard.fingerprint, shard.tenant};
  const StripeColumn found{number, shard.volume, shard.column, store.inventory};
  if (slot == none) {
    // Forgotten with its volume, until that is opened anew; a failed one may still say what it has.
    if (form->columns_stored() == 1 && on_failed_volume(found)) return false;
    if (!store.adopts) {
      ++counters_.reconciled_unknown;
      return true;
    }
    const auto forgotten = forgotten_.find(shard.stripe);
    const std::uint32_t born_s =
        forgotten != forgotten_.end() ? forgotten->second : born_not_before(shard.stripe, now);
    // It expired while this store was away, and nobody remembers that it is to be freed.
    if (past_cap(shard.tenant, born_s, now)) return true;
    if (brings_nothing_new(shard.pages)) return true;
    std::size_t keys = 0;
    for (const wire::PutPage& page : shard.pages) keys += page.keys.size();
    // Known to nobody, it would be space that never comes back.
    if (!has_room(keys)) return true;
    next_stripe_ = std::max(next_stripe_, shard.stripe + 1);
    Stripe adopted(name, shard.pages, *form, shard.code.crcs);
    adopted.born_s = born_s;
    if (forgotten != forgotten_.end()) forgotten_.erase(forgotten);
    slot = publish(std::move(adopted), kv::Evictor::item_none, now);
    column_add(slot, found);
    ++counters_.stripes_adopted;
    if (form->columns_stored() > 1) {
      const Instant due = std::max(now + options_.adopt_grace, frees_safe_at_);
      adopting_.emplace(due, shard.stripe);
      adopting_since_.emplace(shard.stripe, due);
    }
    return false;
  }
  Stripe& stripe = stripes_.at(slot);
  if (!stripe.is(name, shard.pages, *form)) return true;
  if (const RepairQueue::Running* running = repairs_.running(shard.stripe)) {
    // Being written there by a repair: its answer says what it is.
    const auto aims =
        std::any_of(running->aims.begin(), running->aims.end(), [&](const RepairQueue::Aim& aim) {
          return aim.column == shard.column && aim.target.store == number;
        });
    if (aims) return false;
  }
  const StripeColumn* known = stripe.column(shard.column);
  if (known != nullptr) {
    const bool same = known->store == number;
    const bool shown = known->seen == stores_[known->store].inventory && stores_[known->store].up;
    if (same && (known->volume == shard.volume || !shown)) {
      if (known->volume != shard.volume) {
        column_remove(slot, shard.column);
        column_add(slot, found);
      } else {
        for (StripeColumn& column : stripe.columns()) {
          if (column.column == shard.column) column.seen = store.inventory;
        }
      }
      return false;
    }
    ++counters_.columns_duplicate;
    // Two of one column count as one.  The one that its store has shown stays.
    if (same || shown) return true;
    const StripeColumn other = *known;
    column_remove(slot, shard.column);
    column_add(slot, found);
    free_column(other.store, shard.stripe, other.column, stripe.column_bytes(other.column), now);
    return false;
  }
  if (!store.adopts) ++counters_.reconciled_back;
  column_add(slot, found);
  if (adopted_whole(slot)) consider_repair(slot, now);  // a column may be on a store that leaves
  return false;
}

bool Index::adopted_whole(std::uint32_t slot) {
  const Stripe& stripe = stripes_.at(slot);
  if (stripe.columns().size() != stripe.form().columns_stored()) return false;
  if (const auto since = adopting_since_.find(stripe.id()); since != adopting_since_.end()) {
    adopting_.erase({since->second, stripe.id()});
    adopting_since_.erase(since);
  }
  return true;
}

std::optional<wire::meta_inventory_ack> Index::inventory(const Holder& holder,
                                                         const wire::meta_inventory& message, Instant now) {
  std::uint32_t number = 0;
  Store* store = store_of(holder, &number);
  if (store == nullptr || message.shards.size() > inventory_part_max ||
      (message.cursor != 0 && message.cursor != store->next_part)) {
    ++counters_.inventory_refused;
    return std::nullopt;
  }
  if (message.cursor == 0 && !store->complete) ++store->inventory;
  store->next_part = message.cursor + 1;
  wire::meta_inventory_ack answer;
  answer.cursor = message.cursor;
  for (const wire::ShardRecord& shard : message.shards) {
    if (!adopt(number, shard, now)) continue;
    const std::uint32_t slot = stripes_.find(shard.stripe);
    const StripeColumn* good = slot == none ? nullptr : stripes_.at(slot).column(shard.column);
    // A free names a column of a stripe, not a volume: with a good one of the same number on this node, the
    // other stays until the stripe goes.
    if (good != nullptr && good->store == number) continue;
    if (has_other_column(number, shard.stripe, shard.column)) {
      frees_.schedule(leases_, number, shard.stripe, shard.column, 0, std::max(now, frees_safe_at_));
    } else if (now >= frees_safe_at_ && !leases_.holds(shard.stripe)) {
      ++counters_.stripes_freed;
      answer.unknown.push_back(shard.stripe);
    } else {
      frees_.schedule(leases_, number, shard.stripe, Frees::every_column, 0, std::max(now, frees_safe_at_));
    }
  }
  if (message.last) {
    // One that nobody asked for says nothing about what it does not show: commits may have overtaken it.
    const bool asked = store->asked && message.asked == store->inventory;
    const bool all = !store->complete || asked;
    std::vector<std::pair<std::uint64_t, std::uint16_t>> missing;
    for (auto at = stripes_.ids().begin(); all && at != stripes_.ids().end(); ++at) {
      for (const StripeColumn& column : stripes_.at(at->second).columns()) {
        if (column.store != number || column.seen == store->inventory) continue;
        // What is on a volume that failed is known to be lost, until the volume is back.
        if (asked && !can_read(column)) continue;
        missing.emplace_back(at->first, column.column);
      }
    }
    if (asked) counters_.reconciled_missing += missing.size();
    if (all) reconciled(number, now);
    if (!store->complete) frees_.store_ready(number, now);
    store->complete = true;
    store->adopts = false;
    if (store->volumes.empty()) store->volumes[0] = wire::VolumeState{};
    for (const auto& [id, column] : missing) {
      const std::uint32_t slot = stripes_.find(id);
      if (slot == none) continue;  // went with an earlier column
      ++counters_.stripes_missing;
      lose_column(slot, column, now);
    }
    targets_changed(number);
    if (std::exchange(repairs_wait_for_stores_, false) || store->leaves) repair_now(now);
  }
  return answer;
}

void Index::end_reconcile(std::uint32_t number) {
  stores_[number].asked = false;
  stores_[number].reconcile_at = instant_never;
  if (reconciling_ == number) reconciling_.reset();
}

void Index::reconciled(std::uint32_t number, Instant now) {
  Store& store = stores_[number];
  const bool first = !store.complete;
  end_reconcile(number);
  if (options_.reconcile == Duration{0}) return;
  // Stores that came together are not asked together.
  const Duration sooner =
      first ? options_.reconcile / 1024 * static_cast<std::int64_t>(number * 618 % 512) : Duration{0};
  store.reconcile_at = now + options_.reconcile - sooner;
}

std::optional<Index::Question> Index::reconcile(Instant now) {
  if (reconciling_) {
    if (reconcile_until_ > now) return std::nullopt;
    ++counters_.reconciles_failed;
    const std::uint32_t late = *reconciling_;
    end_reconcile(late);
    stores_[late].reconcile_at = now + options_.reconcile;
  }
  const auto next = std::min_element(stores_.begin(), stores_.end(), [](const Store& a, const Store& b) {
    return a.reconcile_at < b.reconcile_at;
  });
  if (next == stores_.end() || next->reconcile_at > now) return std::nullopt;
  ++counters_.reconciles;
  // What is committed from now on need not be shown.
  ++next->inventory;
  next->asked = true;
  next->reconcile_at = instant_never;
  reconciling_ = static_cast<std::uint32_t>(next - stores_.begin());
  reconcile_until_ = now + reconcile_wait;
  return Question{{next->instance, next->generation}, {next->inventory}};
}

void Index::settle_adoptions(Instant now) {
  if (adopting_.empty() || adopting_.begin()->first > now) return;
  const bool told = std::all_of(stores_.begin(), stores_.end(),
                                [](const Store& store) { return !store.up || store.complete; });
  while (!adopting_.empty() && adopting_.begin()->first <= now) {
    const std::uint64_t id = adopting_.begin()->second;
    adopting_.erase(adopting_.begin());
    if (!told) {
      adopting_since_.at(id) = now + options_.adopt_grace;
      adopting_.emplace(now + options_.adopt_grace, id);
      continue;
    }
    adopting_since_.erase(id);
    const std::uint32_t slot = stripes_.find(id);
    if (stripes_.at(slot).columns().size() >= stripes_.at(slot).form().data_stored()) {
      consider_repair(slot, now);
      continue;
    }
    ++counters_.stripes_incomplete;
    drop(slot, now);
  }
}

void Index::read_failed(const wire::meta_read_failed& message, Instant now) {
  const std::uint64_t id = stripe_of(message.page);
  const std::uint32_t slot = stripes_.find(id);
  const StripeColumn* found = slot == none ? nullptr : stripes_.at(slot).column(message.column);
  // It was reported before, made anew elsewhere, or its store has told since then what it holds.
  if (found == nullptr || stores_[found->store].instance != message.instance ||
      stores_[found->store].generation != message.generation || found->volume != message.volume) {
    ++counters_.reports_late;
    return;
  }
  if (message.code == wire_code(Code::corrupt)) {
    ++counters_.columns_corrupt;
  } else if (message.code == wire_code(Code::not_found)) {
    ++counters_.columns_not_found;
  } else {
    ++counters_.columns_io;  // the next read may do better
    return;
  }
  const StripeColumn column = *found;
  free_column(column.store, id, column.column, stripes_.at(slot).column_bytes(column.column), now);
  lose_column(slot, column.column, now);
}

// ---- Repair ------------------------------------------------------------------------------------

// It can still be read, perhaps; it is to be made anew elsewhere.
bool Index::is_lost(const StripeColumn& column) const {
  const Store& store = stores_[column.store];
  return store.gone || store.leaves || on_failed_volume(column);
}

std::vector<std::uint16_t> Index::lost_columns(const Stripe& stripe) const {
  std::vector<std::uint16_t> out;
  for (std::uint32_t i = 0; i < stripe.form().columns_stored(); ++i) {
    const std::uint16_t number = stripe.form().stored_column(i);
    const StripeColumn* column = stripe.column(number);
    if (column == nullptr || is_lost(*column)) out.push_back(number);
  }
  return out;
}

bool Index::leaves(const Stripe& stripe) const {
  const auto columns = stripe.columns();
  return std::any_of(columns.begin(), columns.end(),
                     [&](const StripeColumn& column) { return stores_[column.store].leaves; });
}

void Index::consider_repair(std::uint32_t slot, Instant now) {
  if (options_.repair == RepairPolicy::off) return;
  const Stripe& stripe = stripes_.at(slot);
  const std::uint32_t readable = readable_columns(stripe);
  const bool hot = stripe.used_at + options_.repair_hot > now;
  const bool wanted = !adopting_since_.contains(stripe.id()) && !lost_columns(stripe).empty() &&
                      (hot || options_.repair == RepairPolicy::all || leaves(stripe));
  if (wanted && readable < stripe.form().data_stored()) repairs_wait_for_stores_ = true;
  if (!wanted && repairs_.cross_checks(stripe.id())) return;
  if (!wanted || readable < stripe.form().data_stored()) return repairs_.drop(stripe.id());
  if (repairs_.want(stripe.id(), {readable - stripe.form().data_stored(), !hot})) return;
  // The queue is full: the scan comes here again.
  scan_at_ = std::min(scan_at_, now + seconds(1));
  scan_after_ = std::min(scan_after_, stripe.id() - 1);
}

void Index::repair_now(Instant now) {
  repairs_.hurry();
  scan_after_ = 0;
  scan_at_ = now;
}

void Index::scan_for_repairs(Instant now) {
  if (scan_after_ == 0) repairs_wait_for_places_ = false;  // they are all looked at again
  auto at = stripes_.ids().upper_bound(scan_after_);
  for (std::size_t i = 0; i < repair_scan_stripes && at != stripes_.ids().end(); ++i, ++at) {
    if (repairs_.full()) {
      scan_at_ = now + seconds(1);
      return;
    }
    scan_after_ = at->first;
    consider_repair(at->second, now);
  }
  if (at != stripes_.ids().end()) {
    scan_at_ = now + repair_scan_pause;
    return;
  }
  scan_at_ = instant_never;
  // Something of a stripe may be on its way out where a column of it could be, and nobody says when it is gone.
  if (!repairs_wait_for_places_) return;
  scan_after_ = 0;
  scan_at_ = now + repair_look_again;
}

void Index::put_off_repair(std::uint64_t id, Instant now) {
  if (repairs_.put_off(id, now)) return;
  repairs_wait_for_places_ = true;
  if (scan_at_ != instant_never) return;
  scan_after_ = 0;
  scan_at_ = now + repair_look_again;
}

std::string Index::repairs_wait_for(const Redundancy& now_is, Instant now) const {
  constexpr std::size_t names_max = 4;
  std::string out;
  const auto add = [&](const std::string& text) { out.append(out.empty() ? "" : "; ").append(text); };
  const bool leaving = std::any_of(stores_.begin(), stores_.end(),
                                   [](const Store& store) { return store.leaves && store.columns > 0; });
  if (now_is.degraded == 0 && now_is.unreadable == 0 && repairs_.waiting() == 0 && !leaving) return out;
  if (options_.repair == RepairPolicy::off || repairs_.options().bytes_per_s == 0)
    add("repairs to be switched on");
  const auto seconds_until = [&](Instant at) {
    return std::to_string(std::max<std::int64_t>(to_ms(at - now) / 1000, 0)) + " s";
  };
  if (!adopting_.empty()) {
    add("what stores may still bring of stripes found since the start: " + std::to_string(adopting_.size()) +
        " (decided in " + seconds_until(adopting_.rbegin()->first) + ")");
  }
  if (repairs_.waiting() > 0) {
    if (arenas_.numbers().empty()) add("a di-kvd host, which makes the columns");
    if (const std::string lack = placements_.lack(); !lack.empty()) add(lack);
  }
  // By name; those that may come back first.
  std::string names;
  std::size_t count = 0;
  for (const auto& [instance, number] : store_numbers_) {
    const Store& store = stores_[number];
    if (store.up || store.columns == 0 || (store.gone && now_is.unreadable == 0) || ++count > names_max)
      continue;
    names.append(names.empty() ? "" : ", ").append(instance);
    if (!store.gone)
      names.append(" (given up in ")
          .append(seconds_until(store.away_since + options_.repair_after))
          .append(")");
  }
  if (count > names_max) names.append(", and ").append(std::to_string(count - names_max)).append(" more");
  if (!names.empty()) add("stores that are away: " + names);
  return out;
}

bool Index::can_cross_check(const Stripe& stripe) const {
  const StripeForm& form = stripe.form();
  if (form.parity_columns == 0 || adopting_since_.contains(stripe.id())) return false;
  for (std::uint32_t i = 0; i <= form.data_stored(); ++i) {
    const StripeColumn* column = stripe.column(form.stored_column(i));
    if (column == nullptr || !can_read(*column)) return false;
  }
  return true;
}

void Index::want_cross_check(Instant now) {
  if (cross_check_at_ > now) return;
  cross_check_at_ = now + options_.cross_check;
  // One at a time: when repairs leave no time for it the next one has to wait.
  if (options_.repair == RepairPolicy::off || repairs_.options().bytes_per_s == 0) return;
  if (repairs_.cross_checks(cross_check_) || repairs_.full()) return;
  for (int i = 0; i < cross_check_draws; ++i) {
    const std::uint32_t slot = stripes_.draw(draws_);
    if (slot == none || !can_cross_check(stripes_.at(slot)) || repairs_.has(stripes_.at(slot).id())) continue;
    cross_check_ = stripes_.at(slot).id();
    static_cast<void>(repairs_.want(cross_check_, {.cross_check = true}));
    return;
  }
}

std::vector<Index::Repair> Index::repairs(Instant now) {
  std::vector<Repair> out;
  want_cross_check(now);
  repairs_.set_hosts(arenas_.numbers().size());
  for (int tries = 0; tries < repair_tries_max; ++tries) {
    const auto id = repairs_.next(now);
    if (!id) break;
    if (auto repair = start_repair(*id, now)) out.push_back(*std::move(repair));
  }
  return out;
}

std::optional<Holder> Index::repair_host() {
  const auto& hosts = arenas_.numbers();
  std::optional<Holder> best;
  std::size_t best_running = 0;
  ++next_repair_host_;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const auto at =
        std::next(hosts.begin(), static_cast<std::ptrdiff_t>((next_repair_host_ + i) % hosts.size()));
    const Holder host{at->first, arenas_.host(at->second).generation};
    const std::size_t running = repairs_.running_of(host).size();
    if (!best || running < best_running) {
      best = host;
      best_running = running;
    }
  }
  return best;
}

std::optional<Index::Repair> Index::start_repair(std::uint64_t id, Instant now) {
  const std::uint32_t slot = stripes_.find(id);
  DI_ASSERT(slot != none);
  const Stripe& stripe = stripes_.at(slot);
  const bool cross_check = repairs_.cross_checks(id);
  if (cross_check && !can_cross_check(stripe)) {
    repairs_.drop(id);
    return std::nullopt;
  }
  const std::vector<std::uint16_t> lost = cross_check ? std::vector<std::uint16_t>() : lost_columns(stripe);
  const std::uint32_t readable = readable_columns(stripe);
  if (!cross_check && (lost.empty() || readable < stripe.form().data_stored())) {
    if (lost.empty()) {
      ++counters_.repairs_unneeded;
    } else {
      repairs_wait_for_stores_ = true;
    }
    repairs_.drop(id);
    return std::nullopt;
  }
  const std::optional<Holder> host = repair_host();
  if (!host) {
    put_off_repair(id, now);
    return std::nullopt;
  }
  // Beside the columns that stay; not where something of this stripe is still to be freed.
  std::vector<Target> others;
  for (const StripeColumn& column : stripe.columns()) {
    if (!is_lost(column)) others.push_back({column.store, column.volume});
  }
  std::vector<Target> not_these;
  for (std::uint32_t number = 0; number < stores_.size(); ++number) {
    if (!frees_.pending(number, id)) continue;
    for (const auto& [volume, state] : stores_[number].volumes) not_these.push_back({number, volume});
  }
  RepairQueue::Running running;
  std::uint64_t bytes = 0;
  // A host makes at most as many columns at a time as parity makes up for; on stores that leave, from where
  // they are copied, there may be more, and those have their turn.
  const std::size_t aims_max = std::max<std::size_t>(stripe.form().parity_columns, 1);
  for (const std::uint16_t column : lost) {
    if (running.aims.size() == aims_max) break;
    const auto target = placements_.substitute(id, others, not_these);
    if (!target) break;
    others.push_back(*target);
    running.aims.push_back({column, *target, stripe.column_bytes(column)});
    bytes += running.aims.back().bytes;
  }
  if (running.aims.empty() && !cross_check) {
    put_off_repair(id, now);
    return std::nullopt;
  }
  std::uint64_t longest = 0;
  for (const StripeColumn& column : stripe.columns())
    longest = std::max(longest, stripe.column_bytes(column.column));
  bytes += longest * (stripe.form().data_stored() + (cross_check ? 1 : 0));

  running.host = *host;
  running.lease = leases_.take(running.host, RequestId{}, {id}, now);
  if (running.lease == 0) {
    put_off_repair(id, now);
    return std::nullopt;
  }
  Repair out;
  out.host = running.host;
  out.message.lease = running.lease;
  out.message.ttl_ms = static_cast<std::uint32_t>(to_ms(leases_.ttl()));
  out.message.fingerprint = stripe.fingerprint();
  out.message.tenant = stripe.tenant();
  out.message.pages = stripe.put_pages();
  out.message.stripe = planned_stripe(stripe);
  for (const RepairQueue::Aim& aim : running.aims) {
    add_bytes(aim.target, aim.bytes);
    out.message.targets.push_back({stores_[aim.target.store].instance, aim.target.volume, aim.column});
  }
  if (!cross_check) ++counters_.repairs_started;
  repairs_.start(id, std::move(running), bytes, now);
  return out;
}

Index::RepairEnd Index::repaired(const Holder& host, const wire::meta_repaired& message, Instant now) {
  const RepairQueue::Running* running = repairs_.running(message.stripe);
  if (running == nullptr || running->host != host) return RepairEnd::unknown;
  std::vector<RepairQueue::Aim> failed;
  for (const RepairQueue::Aim& aim : running->aims) {
    if (std::find(message.written.begin(), message.written.end(), aim.column) == message.written.end())
      failed.push_back(aim);
  }
  // As for a put: nobody else makes room, when nothing is put.  Which of several was refused is not said.
  for (const RepairQueue::Aim& aim : failed) {
    const bool answered = std::find(message.unanswered.begin(), message.unanswered.end(), aim.column) ==
                          message.unanswered.end();
    if (answered && message.code == wire_code(Code::no_space) && stores_[aim.target.store].up)
      make_room(aim.target.store, aim.bytes, now);
  }
  return end_repair(message, now);
}

Index::RepairEnd Index::give_up_repair(std::uint64_t id, Code code, Instant now) {
  wire::meta_repaired unknown{id, wire_code(code), {}, {}};
  for (const RepairQueue::Aim& aim : repairs_.running(id)->aims) unknown.unanswered.push_back(aim.column);
  return end_repair(unknown, now);
}

Index::RepairEnd Index::verdict(std::uint64_t id, Code code, Instant now) {
  const std::uint32_t slot = stripes_.find(id);
  if (code == Code::ok) {
    ++counters_.cross_checks_right;
    return RepairEnd::right;
  }
  if (code != Code::corrupt) {
    ++counters_.cross_checks_undecided;
    return RepairEnd::undecided;
  }
  ++counters_.cross_checks_wrong;
  if (slot != none) drop(slot, now);
  return RepairEnd::wrong;
}

Index::RepairEnd Index::end_repair(const wire::meta_repaired& message, Instant now) {
  const std::uint64_t id = message.stripe;
  const auto code = static_cast<Code>(message.code);
  if (repairs_.cross_checks(id)) {
    const RepairQueue::Running ended = repairs_.finish(id, false, now);
    leases_.release(ended.host, ended.lease);
    const RepairEnd end = verdict(id, code, now);
    if (const std::uint32_t slot = stripes_.find(id); slot != none) consider_repair(slot, now);
    return end;
  }
  const std::uint32_t slot = stripes_.find(id);
  const auto is_among = [](const std::vector<std::uint32_t>& columns, std::uint32_t column) {
    return std::find(columns.begin(), columns.end(), column) != columns.end();
  };
  const auto is_written = [&](std::uint32_t column) { return is_among(message.written, column); };
  const auto& aims = repairs_.running(id)->aims;
  const bool all = std::all_of(aims.begin(), aims.end(),
                               [&](const RepairQueue::Aim& aim) { return is_written(aim.column); });
  const bool wrong = code == Code::corrupt;  // every column is what it was, and no other can be made
  const RepairQueue::Running ended = repairs_.finish(id, slot != none && !all && !wrong, now);
  leases_.release(ended.host, ended.lease);
  if (!all) ++counters_.repairs_failed;
  // What is to be freed is so when all are in their places: a store may have got one column and not another.
  struct Gone {
    std::uint32_t store;
    std::uint16_t column;
    std::uint64_t bytes;
    Instant at;
  };
  std::vector<Gone> gone;
  for (const RepairQueue::Aim& aim : ended.aims) {
    remove_bytes(aim.target, aim.bytes);
    if (!is_written(aim.column)) {
      // It may still be on its way; a store that went tells what it has when it is back.
      if (is_among(message.unanswered, aim.column) && stores_[aim.target.store].up)
        gone.push_back({aim.target.store, aim.column, aim.bytes, now + put_grace});
      continue;
    }
    if (slot == none) {
      gone.push_back({aim.target.store, aim.column, aim.bytes, now});
      continue;
    }
    const StripeColumn* known = stripes_.at(slot).column(aim.column);
    if (known != nullptr) {
      const StripeColumn old = *known;
      if (!is_lost(old)) {  // it came back in the meantime, and one is enough
        gone.push_back({aim.target.store, aim.column, aim.bytes, now});
        continue;
      }
      column_remove(slot, aim.column);
      gone.push_back({old.store, old.column, aim.bytes, now});
    }
    ++counters_.columns_repaired;
    stores_[aim.target.store].evict_part = evict_store_part;
    column_add(slot, {aim.target.store, aim.target.volume, aim.column, stores_[aim.target.store].inventory});
  }
  for (const Gone& each : gone) {
    const StripeColumn* known = slot == none ? nullptr : stripes_.at(slot).column(each.column);
    // On another volume of the same store: a free does not tell them apart.
    if (known != nullptr && known->store == each.store) continue;
    free_column(each.store, id, each.column, each.bytes, each.at);
  }
  if (slot != none && wrong) {
    drop(slot, now);
    return RepairEnd::wrong;
  }
  if (slot != none) {
    adopted_whole(slot);  // it may have gone meanwhile, and come back with a store
    if (!repairs_.has(id)) consider_repair(slot, now);
  }
  return all ? RepairEnd::repaired : RepairEnd::failed;
}

}  // namespace di::directory
