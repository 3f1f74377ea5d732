#include "directory/membership.h"

#include <algorithm>
#include <array>

#include "base/assert.h"
#include "kv/layout.h"
#include "wire/names.h"

namespace di::directory {

namespace {

constexpr std::array<std::string_view, 6> programs = {"di-router",  "di-meta",   "di-kvd",
                                                      "di-prefill", "di-decode", "di-ctl"};

bool is_printable(std::string_view text, std::size_t bytes_max) {
  return text.size() <= bytes_max &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

// An address may be a path, and a path may have spaces and letters of any language.
bool is_endpoint(std::string_view text) {
  return text.size() <= endpoint_bytes_max && std::all_of(text.begin(), text.end(), [](char c) {
           return static_cast<unsigned char>(c) >= ' ' && c != 0x7f;
         });
}

Error invalid(std::string message) {
  return Error{Code::invalid, 0, std::move(message)};
}

Status check(const wire::Member& self) {
  if (!wire::is_instance_of(self.program, self.instance)) {
    return invalid("instance: want " +
                   (self.program.empty() ? std::string("PROGRAM") : std::string("the program")) +
                   ", a dot and 1 to 64 letters, digits, '-' or '_'");
  }
  if (std::find(programs.begin(), programs.end(), self.program) == programs.end() ||
      self.program == "di-ctl") {
    return invalid("program: not one that registers");
  }
  const bool kvd = self.program == "di-kvd";
  const bool rank_program = self.program == "di-prefill" || self.program == "di-decode";
  const bool script = rank_program && self.role == "script";
  if (kvd ? self.role != "host" && self.role != "store" : !self.role.empty() && !script) {
    return invalid(
        "role: host or store for di-kvd, script or empty for di-prefill and di-decode, empty otherwise");
  }
  for (const auto& [name, label] : {std::pair<std::string_view, const std::string&>{"host", self.host},
                                    {"rack", self.rack},
                                    {"zone", self.zone}}) {
    if (!wire::is_label(label)) {
      return invalid(std::string(name) + ": want at most 64 letters, digits, '-', '_', '.' or ':'");
    }
  }
  if (self.host.empty()) return invalid("host: empty");
  if (self.control.empty() || !is_endpoint(self.control)) {
    return invalid("control: not an endpoint");
  }
  if (!is_endpoint(self.data) || !is_printable(self.public_key, endpoint_bytes_max)) {
    return invalid("data or public_key: not printable, or too long");
  }
  if (self.state > static_cast<std::uint8_t>(MemberState::draining)) return invalid("state: want 0 or 1");
  if (rank_program ? (self.ranks == 0 || self.ranks > ranks_max) : self.ranks != 0) {
    return invalid("ranks: 1 to 1024 for di-prefill and di-decode, 0 otherwise");
  }
  if (!is_printable(self.model, model_bytes_max)) return invalid("model: not printable, or too long");
  if (self.model.empty()) {
    if (rank_program) return invalid("model: empty");
    return {};
  }
  const auto layout = kv::Layout::decode(self.layout);
  if (!layout) return layout.error().in("layout");
  if (layout->fingerprint() != self.fingerprint) return invalid("fingerprint: not that of the layout");
  return {};
}

}  // namespace

Membership::Membership(std::vector<InstanceRow> rows, std::uint64_t run, Issued issued)
    : issued_(issued), epoch_(run << 32) {
  for (InstanceRow& row : rows) {
    issued_.next_id = std::max(issued_.next_id, row.id + 1);
    std::string name = row.instance;
    rows_.emplace(std::move(name), std::move(row));
  }
}

// A number that was issued before the row was lost: with an older copy of the catalogue, or for a newer name.
bool Membership::may_keep(std::uint32_t id) const {
  return id != 0 && id < issued_.next_id &&
         std::none_of(rows_.begin(), rows_.end(), [id](const auto& row) { return row.second.id == id; }) &&
         std::none_of(held_.begin(), held_.end(), [id](const auto& held) { return held.second == id; });
}

const InstanceRow* Membership::oldest_unused() const {
  const InstanceRow* oldest = nullptr;
  for (const auto& [name, row] : rows_) {
    if (oldest != nullptr && oldest->id < row.id) continue;
    if (!members_.contains(name) && !away_.contains(name) && !held_.contains(name)) oldest = &row;
  }
  return oldest;
}

Result<Membership::Admission> Membership::judge(const wire::meta_register& message) const {
  const wire::Member& self = message.self;
  if (const Status checked = check(self); !checked) return checked.error();
  if (message.boot == 0) return invalid("boot: zero");
  if (self.generation > said_generation_max) return invalid("generation: nobody was issued one above 2^31");

  Admission admission;
  admission.member = self;
  const auto known = rows_.find(self.instance);
  if (known == rows_.end()) {
    if (rows_.size() >= instance_rows_max) {
      const InstanceRow* oldest = oldest_unused();
      if (oldest == nullptr)
        return Error{Code::no_space, 0, "instance: 65536 names are here, or not forgotten yet"};
      admission.dropped = *oldest;
    }
    // A number and a generation that are already in use come from before di-meta lost its row.
    const bool kept = self.generation != 0 && may_keep(self.id);
    admission.row = {self.instance, kept ? self.id : issued_.next_id,
                     self.generation != 0 ? self.generation : issued_.generation + 1, message.boot};
    admission.row_changed = true;
  } else if (known->second.boot == message.boot) {
    admission.row = known->second;
  } else if (self.generation == 0) {
    if (const auto holder = members_.find(self.instance); holder != members_.end()) {
      return Error{Code::busy, 0,
                   self.instance + " is taken by a process on " + holder->second.member.host + " at " +
                       holder->second.member.control};
    }
    admission.row = known->second;
    admission.row.generation = std::max(known->second.generation, issued_.generation) + 1;
    admission.row.boot = message.boot;
    admission.row_changed = true;
  } else if (self.generation > known->second.generation) {
    admission.row = known->second;
    admission.row.generation = self.generation;
    admission.row.boot = message.boot;
    admission.row_changed = true;
  } else {
    return Error{Code::stale, 0, self.instance + ": another process has taken this name since"};
  }
  if (admission.row.generation == UINT32_MAX || admission.row.generation == 0 ||
      admission.row.id == UINT32_MAX) {
    return Error{Code::no_space, 0, self.instance + ": out of numbers"};
  }
  if (!members_.contains(self.instance) && members_.size() >= members_max) {
    return Error{Code::no_space, 0, "the fleet has 4096 members already"};
  }
  if (!self.model.empty()) {
    for (const auto& [instance, present] : members_) {
      const wire::Member& other = present.member;
      if (instance == self.instance || other.model != self.model) continue;
      std::string what;
      if (other.fingerprint != self.fingerprint) {
        what = "layout " + to_hex(self.fingerprint.raw).substr(0, 16) + ", not " +
               to_hex(other.fingerprint.raw).substr(0, 16);
      } else if (other.revision != self.revision) {
        what = "weight revision " + to_hex(self.revision.raw).substr(0, 16) + ", not " +
               to_hex(other.revision.raw).substr(0, 16);
      }
      if (what.empty()) continue;
      return Error{Code::exists, 0,
                   "model " + self.model + " is served by " + instance + " already: this one has " + what +
                       " as " + instance + " has"};
    }
  }
  admission.member.id = admission.row.id;
  admission.member.generation = admission.row.generation;
  return admission;
}

void Membership::hold(const Admission& admission) {
  const InstanceRow& row = admission.row;
  held_[row.instance] = row.id;
  issued_.next_id = std::max(issued_.next_id, row.id + 1);
  if (admission.dropped) drop(admission.dropped->instance);
}

void Membership::keep(const InstanceRow& row) {
  rows_[row.instance] = row;
  held_.erase(row.instance);
  issued_.next_id = std::max(issued_.next_id, row.id + 1);
}

void Membership::drop(const std::string& instance) {
  const auto row = rows_.find(instance);
  if (row == rows_.end()) return;
  issued_.generation = std::max(issued_.generation, row->second.generation);
  rows_.erase(row);
}

Membership::Change Membership::admit(const Admission& admission, Instant now) {
  return admit_as(admission, now, false);
}

Membership::Change Membership::admit_self(const Admission& admission) {
  return admit_as(admission, Instant{}, true);
}

Membership::Change Membership::admit_as(const Admission& admission, Instant now, bool self) {
  const InstanceRow& row = admission.row;
  DI_ASSERT(admission.member.id == row.id && admission.member.generation == row.generation);
  Change change;
  keep(row);
  const auto at = members_.find(row.instance);
  if (at == members_.end()) {
    away_.erase(row.instance);
    members_.emplace(row.instance, Present{admission.member, now, self});
    instances_.emplace(row.id, row.instance);
    change.changed = true;
  } else {
    Present& present = at->second;
    if (present.member.generation != row.generation) {
      change.lost.push_back({row.instance, present.member.generation});
    }
    change.changed = present.member != admission.member;
    present.member = admission.member;
    present.heard = now;
  }
  if (change.changed) ++epoch_;
  return change;
}

Membership::Change Membership::rejoin(const wire::Member& member, Instant now) {
  const auto row = rows_.find(member.instance);
  if (row == rows_.end() || row->second.id != member.id || row->second.generation != member.generation)
    return {};
  if (!members_.contains(member.instance) && members_.size() >= members_max) return {};
  return admit_as({member, row->second, false, {}}, now, false);
}

Membership::Change Membership::set_state(std::uint32_t id, std::uint32_t generation, MemberState state) {
  if (find(id, generation) == nullptr) return {};
  const auto at = members_.find(instances_.at(id));
  if (state == MemberState::leaves) return remove(at, true);
  Change change;
  change.changed = at->second.member.state != static_cast<std::uint8_t>(state);
  at->second.member.state = static_cast<std::uint8_t>(state);
  if (change.changed) ++epoch_;
  return change;
}

void Membership::heard(std::uint32_t id, std::uint32_t generation, Instant now) {
  if (find(id, generation) == nullptr) return;
  members_.at(instances_.at(id)).heard = now;
}

Membership::Change Membership::lost(std::uint32_t id, std::uint32_t generation) {
  if (find(id, generation) == nullptr) return {};
  return remove(members_.find(instances_.at(id)), false);
}

Membership::Change Membership::remove(std::map<std::string, Present>::iterator at, bool stopped) {
  // Whoever stops drains first, and nobody counts on one that the operator drained.
  stopped = stopped || at->second.member.state != static_cast<std::uint8_t>(MemberState::up);
  remember({at->second.member, at->second.heard, stopped});
  Change change;
  change.changed = true;
  change.lost.push_back({at->first, at->second.member.generation});
  instances_.erase(at->second.member.id);
  members_.erase(at);
  ++epoch_;
  return change;
}

void Membership::remember(Away away) {
  if (away_.size() >= away_max) {
    away_.erase(std::min_element(away_.begin(), away_.end(), [](const auto& a, const auto& b) {
      return a.second.since < b.second.since;
    }));
  }
  std::string name = away.member.instance;
  away_.insert_or_assign(std::move(name), std::move(away));
}

void Membership::expect(const std::string& instance, const std::string& role, Instant now) {
  const auto row = rows_.find(instance);
  if (row == rows_.end() || members_.contains(instance)) return;
  Away away;
  away.member.instance = instance;
  away.member.id = row->second.id;
  away.member.generation = row->second.generation;
  away.member.program = instance.substr(0, instance.find('.'));
  away.member.role = role;
  away.since = now;
  remember(std::move(away));
}

std::optional<Membership::Forgotten> Membership::forget(const std::string& instance) {
  const auto row = rows_.find(instance);
  if (row == rows_.end() || members_.contains(instance) || held_.contains(instance)) return std::nullopt;
  Forgotten forgotten{row->second, std::nullopt};
  if (auto away = away_.extract(instance)) forgotten.away = std::move(away.mapped());
  drop(instance);
  return forgotten;
}

void Membership::restore(const Forgotten& forgotten) {
  const std::string& instance = forgotten.row.instance;
  if (rows_.contains(instance) || held_.contains(instance)) return;
  rows_.emplace(instance, forgotten.row);
  if (forgotten.away) remember(*forgotten.away);
}

Membership::Change Membership::step(Instant now) {
  std::erase_if(away_, [&](const auto& entry) { return entry.second.since + away_forgotten_after <= now; });
  Change all;
  for (auto at = members_.begin(); at != members_.end();) {
    const auto next = std::next(at);
    if (!at->second.self && at->second.heard + member_lost_after <= now) {
      Change one = remove(at, false);
      all.changed = true;
      all.lost.insert(all.lost.end(), one.lost.begin(), one.lost.end());
    }
    at = next;
  }
  return all;
}

Instant Membership::next_due() const {
  Instant due = instant_never;
  for (const auto& [instance, present] : members_) {
    if (!present.self) due = std::min(due, present.heard + member_lost_after);
  }
  return due;
}

const wire::Member* Membership::find(std::uint32_t id) const {
  const auto at = instances_.find(id);
  return at == instances_.end() ? nullptr : &members_.at(at->second).member;
}

const wire::Member* Membership::find(std::uint32_t id, std::uint32_t generation) const {
  const wire::Member* member = find(id);
  return member != nullptr && member->generation == generation ? member : nullptr;
}

std::vector<wire::Member> Membership::members() const {
  std::vector<wire::Member> out;
  out.reserve(members_.size());
  for (const auto& [instance, present] : members_) out.push_back(present.member);
  return out;
}

wire::meta_members Membership::snapshot() const {
  return {epoch_, members()};
}

}  // namespace di::directory
