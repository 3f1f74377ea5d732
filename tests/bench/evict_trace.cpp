// Hit ratios of kv/evict.h on chains of blocks, beside least-recently-used and the offline optimum, at
// several capacities.
//
//   evict_trace [TRACE]
//
// TRACE is a JSON-lines file with `hash_ids` (a prompt's blocks, as names) in every line; by default
// $DI_TRACES/conversation-6000.jsonl, with DI_TRACES defaulting to ../shared/traces of the project.  Without
// it that table is skipped, and says so; a generated trace follows in any case.  One tab-separated row per
// figure.
//
// A hit counts up to the first missing block, as a prefix does.  Every policy evicts leaves first:
//   lru       least recently used
//   s3_fifo   the paper's: FIFO queues, 10 % small, two uses to leave it, ghosts
//   ours      kv/evict.h
//   optimum   Belady: the leaf whose next use is furthest away, of new ones too
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <list>
#include <map>
#include <queue>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/file.h"
#include "base/rng.h"
#include "kv/evict.h"

namespace {

using namespace di;

using Chain = std::vector<std::uint64_t>;

// `hash_ids` of every line.  A line without them is left out.
std::vector<Chain> read_trace(const std::string& text) {
  std::vector<Chain> chains;
  std::size_t at = 0;
  while ((at = text.find("\"hash_ids\"", at)) != std::string::npos) {
    at = text.find('[', at);
    if (at == std::string::npos) break;
    Chain chain;
    const char* p = text.data() + at + 1;
    while (*p != ']' && *p != '\0') {
      char* end = nullptr;
      const std::uint64_t id = std::strtoull(p, &end, 10);
      if (end == p) {
        ++p;
        continue;
      }
      chain.push_back(id + 1);
      p = end;
    }
    if (!chain.empty()) chains.push_back(std::move(chain));
  }
  return chains;
}

// Sessions that come back a few times, under a few shared fronts, and batch jobs that read each text once.
std::vector<Chain> make_trace(std::uint64_t seed) {
  Rng rng(seed);
  struct Session {
    Chain chain;
    std::uint64_t turns = 0;
  };
  std::vector<Chain> fronts(8);
  std::uint64_t name = 1;
  for (Chain& front : fronts) {
    for (std::uint64_t i = 0; i < 4 + rng.below(12); ++i) front.push_back(name++);
  }
  std::multimap<double, Session> due;
  std::vector<Chain> chains;
  double now = 0;
  double batch_until = 0;
  while (chains.size() < 4000) {
    now += -std::log(1 - rng.uniform());
    while (!due.empty() && due.begin()->first <= now) {
      Session session = std::move(due.begin()->second);
      due.erase(due.begin());
      for (std::uint64_t i = 0; i < 1 + rng.below(8); ++i) session.chain.push_back(name++);
      chains.push_back(session.chain);
      if (--session.turns > 0) due.emplace(now + 50 - 100 * std::log(1 - rng.uniform()), std::move(session));
    }
    if (rng.chance(0.002)) batch_until = now + 100;
    const bool batch = now < batch_until;
    Session session;
    if (!batch) session.chain = fronts[static_cast<std::size_t>(8 * std::pow(rng.uniform(), 2))];
    for (std::uint64_t i = 0; i < 4 + rng.below(30); ++i) session.chain.push_back(name++);
    chains.push_back(session.chain);
    session.turns = batch ? 0 : rng.below(4);
    if (session.turns > 0) due.emplace(now + 50 - 100 * std::log(1 - rng.uniform()), std::move(session));
  }
  return chains;
}

// Leaf first among the items of one list, oldest use first: the base of the two simple policies.
struct Tree {
  struct Block {
    std::uint64_t parent = 0;
    std::uint32_t children = 0;
  };
  std::unordered_map<std::uint64_t, Block> blocks;

  void add(std::uint64_t name, std::uint64_t parent) {
    blocks[name].parent = parent;
    if (parent != 0) ++blocks.at(parent).children;
  }
  void remove(std::uint64_t name) {
    const std::uint64_t parent = blocks.at(name).parent;
    if (parent != 0) --blocks.at(parent).children;
    blocks.erase(name);
  }
  std::size_t hit(const Chain& chain) const {
    std::size_t n = 0;
    while (n < chain.size() && blocks.contains(chain[n])) ++n;
    return n;
  }
};

std::uint64_t run_lru(const std::vector<Chain>& chains, std::size_t capacity) {
  Tree tree;
  std::list<std::uint64_t> order;  // newest first
  std::unordered_map<std::uint64_t, std::list<std::uint64_t>::iterator> at;
  std::uint64_t hits = 0;
  for (const Chain& chain : chains) {
    const std::size_t hit = tree.hit(chain);
    hits += hit;
    for (std::size_t i = hit; i < chain.size(); ++i) {
      tree.add(chain[i], i == 0 ? 0 : chain[i - 1]);
      order.push_front(chain[i]);
      at[chain[i]] = order.begin();
    }
    // Deepest first: a parent is used later than its child, so the oldest is a leaf.
    for (std::size_t i = chain.size(); i-- > 0;) order.splice(order.begin(), order, at.at(chain[i]));
    while (order.size() > capacity) {
      tree.remove(order.back());
      at.erase(order.back());
      order.pop_back();
    }
  }
  return hits;
}

std::uint64_t run_s3_fifo(const std::vector<Chain>& chains, std::size_t capacity) {
  struct State {
    int uses = 0;
    std::uint64_t parent = 0;
    std::list<std::uint64_t> children;  // oldest first
    std::list<std::uint64_t>::iterator place;
    bool main = false;
  };
  std::unordered_map<std::uint64_t, State> blocks;
  std::array<std::list<std::uint64_t>, 2> queues;  // oldest first
  std::deque<std::uint64_t> ghosts;
  std::unordered_set<std::uint64_t> ghost_set;
  const std::size_t small_share = capacity / 10;
  std::uint64_t hits = 0;
  const auto drop = [&](std::uint64_t name) {
    const State& state = blocks.at(name);
    queues[state.main].erase(state.place);
    if (state.parent != 0) blocks.at(state.parent).children.remove(name);
    blocks.erase(name);
    if (ghost_set.insert(name).second) ghosts.push_back(name);
    while (ghosts.size() > capacity - small_share) {
      ghost_set.erase(ghosts.front());
      ghosts.pop_front();
    }
  };
  for (const Chain& chain : chains) {
    std::size_t hit = 0;
    while (hit < chain.size() && blocks.contains(chain[hit])) ++hit;
    hits += hit;
    for (std::size_t i = 0; i < hit; ++i)
      blocks.at(chain[i]).uses = std::min(3, blocks.at(chain[i]).uses + 1);
    for (std::size_t i = hit; i < chain.size(); ++i) {
      State& state = blocks[chain[i]];
      state.main = ghost_set.contains(chain[i]);
      state.parent = i == 0 ? 0 : chain[i - 1];
      if (i > 0) blocks.at(chain[i - 1]).children.push_back(chain[i]);
      state.place = queues[state.main].insert(queues[state.main].end(), chain[i]);
    }
    while (blocks.size() > capacity) {
      const bool from_small = (queues[0].size() >= small_share && !queues[0].empty()) || queues[1].empty();
      std::uint64_t name = queues[from_small ? 0 : 1].front();
      State& state = blocks.at(name);
      if (from_small && state.uses > 1) {
        queues[1].splice(queues[1].end(), queues[0], state.place);
        state.main = true;
        state.uses = 0;
        continue;
      }
      if (!from_small && state.uses > 0) {
        --state.uses;
        queues[1].splice(queues[1].end(), queues[1], state.place);
        continue;
      }
      while (!blocks.at(name).children.empty()) name = blocks.at(name).children.front();
      drop(name);
    }
  }
  return hits;
}

std::uint64_t run_optimum(const std::vector<Chain>& chains, std::size_t capacity) {
  std::unordered_map<std::uint64_t, std::deque<std::size_t>> uses;
  for (std::size_t i = 0; i < chains.size(); ++i) {
    for (const std::uint64_t name : chains[i]) uses[name].push_back(i);
  }
  struct Next {
    std::size_t use;
    std::size_t depth;
    std::uint64_t name;
    bool operator<(const Next& other) const {
      return std::pair{use, depth} < std::pair{other.use, other.depth};
    }
  };
  std::unordered_map<std::uint64_t, std::size_t> held;  // next use
  std::priority_queue<Next> order;                      // stale entries are passed by
  std::uint64_t hits = 0;
  for (const Chain& chain : chains) {
    std::size_t hit = 0;
    while (hit < chain.size() && held.contains(chain[hit])) ++hit;
    hits += hit;
    for (std::size_t i = 0; i < chain.size(); ++i) {
      std::deque<std::size_t>& left = uses.at(chain[i]);
      left.pop_front();
      if (left.empty()) {
        held.erase(chain[i]);
        continue;
      }
      held[chain[i]] = left.front();
      order.push({left.front(), i, chain[i]});
    }
    while (held.size() > capacity) {
      const Next last = order.top();
      order.pop();
      const auto found = held.find(last.name);
      if (found != held.end() && found->second == last.use) held.erase(found);
    }
  }
  return hits;
}

struct Ours {
  std::uint64_t hits = 0;
  double us_per_block = 0;
  double small_share = 0;
};

Ours run_ours(const std::vector<Chain>& chains, std::size_t capacity) {
  Instant now{};
  // Both marks at the whole: the others hold exactly so many as well.
  kv::Evictor evictor(
      {.capacity_bytes = capacity * 4096, .high_pct = 100, .low_pct = 100, .victims_max = 1u << 30}, now);
  std::unordered_map<std::uint64_t, kv::Evictor::Item> items;
  Ours ours;
  std::size_t blocks = 0;
  double spent_us = 0;
  for (const Chain& chain : chains) {
    now = now + milliseconds(300);
    std::size_t hit = 0;
    while (hit < chain.size() && items.contains(chain[hit])) ++hit;
    ours.hits += hit;
    blocks += chain.size();
    std::vector<kv::Evictor::Item> fresh;
    const auto begin = std::chrono::steady_clock::now();
    kv::Evictor::Item parent = kv::Evictor::item_none;
    if (hit > 0) {
      parent = items.at(chain[hit - 1]);
      evictor.touch(parent, now);
    }
    for (std::size_t i = hit; i < chain.size(); ++i) {
      parent = evictor.put({.id = chain[i], .key = chain[i], .bytes = 4096, .parent = parent}, now).item;
      fresh.push_back(parent);
    }
    const auto victims = evictor.step(now);
    spent_us += std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    for (std::size_t i = hit; i < chain.size(); ++i) items[chain[i]] = fresh[i - hit];
    for (const auto& victim : victims) items.erase(victim.id);
  }
  ours.us_per_block = spent_us / static_cast<double>(blocks);
  ours.small_share = static_cast<double>(evictor.small_share_bytes()) / static_cast<double>(capacity * 4096);
  return ours;
}

void table(const char* name, const std::vector<Chain>& chains) {
  std::unordered_set<std::uint64_t> distinct;
  std::size_t blocks = 0;
  for (const Chain& chain : chains) {
    blocks += chain.size();
    distinct.insert(chain.begin(), chain.end());
  }
  std::printf("%s\trequests %zu\tblocks %zu\tdistinct %zu\n", name, chains.size(), blocks, distinct.size());
  std::printf("trace\tcapacity\tlru\ts3_fifo\tours\toptimum\tours/lru\tsmall_share\tus_per_block\n");
  const auto ratio = [&](std::uint64_t hits) {
    return static_cast<double>(hits) / static_cast<double>(blocks);
  };
  for (const double part : {0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8}) {
    const auto capacity = static_cast<std::size_t>(part * static_cast<double>(distinct.size()));
    if (capacity < 10) continue;
    const double lru = ratio(run_lru(chains, capacity));
    const double s3_fifo = ratio(run_s3_fifo(chains, capacity));
    const double optimum = ratio(run_optimum(chains, capacity));
    const Ours ours = run_ours(chains, capacity);
    std::printf("%s\t%.2f\t%.4f\t%.4f\t%.4f\t%.4f\t%.3f\t%.2f\t%.2f\n", name, part, lru, s3_fifo,
                ratio(ours.hits), optimum, ratio(ours.hits) / std::max(lru, 1e-9), ours.small_share,
                ours.us_per_block);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const char* folder = std::getenv("DI_TRACES");
  const std::string path =
      argc > 1 ? argv[1]
               : (folder != nullptr ? std::string(folder) : DI_SOURCE_DIR "/../shared/traces") +
                     "/conversation-6000.jsonl";
  if (const auto text = file_read(path, std::size_t{1} << 30)) {
    table("conversation", read_trace(*text));
  } else {
    std::printf("SKIP conversation: %s\n", text.error().message.c_str());
  }
  constexpr std::uint64_t seed = 1;
  std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
  table("generated", make_trace(seed));
}
