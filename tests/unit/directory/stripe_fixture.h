// tests/unit/directory/stripe_fixture.h: an index of stripes with two hosts, and stores whose disks the test keeps.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/crypto.h"
#include "directory/index.h"

namespace di::directory {

inline const Holder host0{"di-kvd.host0", 1};
inline const Holder host1{"di-kvd.host1", 1};
inline constexpr std::uint64_t page_bytes = 4096;

inline Instant at_s(int s) {
  return Instant{} + seconds(1000 + s);
}

inline Key key(int chain, int block) {
  Key out;
  out.raw = sha256(as_bytes(std::to_string(chain) + "/" + std::to_string(block)));
  return out;
}

inline std::vector<Key> keys(int chain, int first, int count) {
  std::vector<Key> out;
  for (int i = 0; i < count; ++i) out.push_back(key(chain, first + i));
  return out;
}

// Pages of two blocks each, `first` counts pages.
inline std::vector<wire::PutPage> pages(int chain, int first, int count, std::uint64_t bytes = page_bytes) {
  std::vector<wire::PutPage> out;
  for (int p = first; p < first + count; ++p) {
    out.push_back({key(chain, 2 * p - 1), keys(chain, 2 * p, 2), {1, 2}, bytes});
  }
  return out;
}

inline std::uint16_t code_of(Code c) {
  return static_cast<std::uint16_t>(c);
}

class StripeTest : public testing::Test {
 protected:
  StripeTest() { start(6, {.placement = {{4, 2}, false}}); }
  ~StripeTest() override { index->test_check(); }

  void start(int stores, Index::Options options) {
    options.repairs.bytes_per_s = 1'000'000'000;
    index.emplace(options, at_s(0));
    EXPECT_TRUE(index->host_up(host0));
    EXPECT_TRUE(index->host_up(host1));
    disks.clear();
    for (int n = 0; n < stores; ++n) comes(n, 0);
  }
  static Holder store(int n, std::uint32_t generation = 1) {
    return {"di-kvd.store" + std::to_string(n), generation};
  }
  wire::meta_inventory_ack comes(int n, int s, std::uint32_t generation = 1) {
    const Holder who = store(n, generation);
    EXPECT_TRUE(index->store_up(who, at_s(s), {"h" + std::to_string(n), "", ""}));
    index->volumes(who, {{{0, 0, std::uint64_t{1} << 40, std::uint64_t{1} << 40}}}, at_s(s));
    wire::meta_inventory message{0, true, {}};
    for (const auto& [id, shard] : disks[who.instance]) message.shards.push_back(shard);
    const auto ack = index->inventory(who, message, at_s(s));
    EXPECT_TRUE(ack);
    for (const std::uint64_t id : ack->unknown) free_all(who.instance, id);
    return ack.value_or(wire::meta_inventory_ack{});
  }
  void free_all(const std::string& instance, std::uint64_t id) {
    std::erase_if(disks[instance], [&](const auto& d) { return d.first.first == id; });
  }
  std::uint32_t hit(int chain, int count) { return index->match({Key{}, keys(chain, 0, count)}).hit_blocks; }
  wire::meta_planned plan(int chain, int first, int count, int s = 1) {
    return index->plan(host0, RequestId{}, {keys(chain, first, count)}, at_s(s));
  }
  wire::meta_put_opened open(const std::vector<wire::PutPage>& offered, int s = 1,
                             const Holder& host = host0) {
    return index->put_open(host, {Key{}, offered, tenant}, at_s(s));
  }
  // As a host does: writes every column but the failed ones, then commits.
  std::uint16_t write(const wire::meta_put_opened& opened, const std::vector<wire::PutPage>& offered,
                      std::vector<std::uint32_t> failed = {}, int s = 1, const Holder& host = host0) {
    const std::vector<wire::PutPage> mine(offered.begin() + opened.first,
                                          offered.begin() + opened.first + opened.pages);
    const StripeForm form = StripeForm::of_put({opened.data_columns, opened.parity_columns}, mine);
    const wire::StripeCode code{opened.data_columns, opened.parity_columns,
                                std::vector<std::uint32_t>(form.code_crcs(2), 7)};
    for (const wire::Column& column : opened.columns) {
      if (std::count(failed.begin(), failed.end(), column.column) > 0) continue;
      disks[column.instance][{opened.stripe, column.column}] = {
          opened.stripe, column.volume, column.column, 1, Key{}, mine, code, tenant};
    }
    wire::meta_put_commit commit{opened.stripe, {}, code};
    for (const std::uint32_t column : failed) {
      commit.failed_columns.push_back({static_cast<std::uint16_t>(column), code_of(Code::no_space)});
    }
    return index->put_commit(host, commit, at_s(s)).code;
  }
  wire::meta_put_opened put(int chain, int first, int count, int s = 1) {
    const auto offered = pages(chain, first, count);
    const auto opened = open(offered, s);
    EXPECT_EQ(opened.code, 0);
    EXPECT_EQ(write(opened, offered, {}, s), 0);
    return opened;
  }
  static int number_of(const wire::Column& column) { return column.instance.back() - '0'; }
  // Runs step() and what it frees.
  void step(int s) {
    for (const Index::Free& free : index->step(at_s(s))) {
      for (std::size_t i = 0; i < free.message.stripes.size(); ++i) {
        if (free.message.columns.empty()) {
          free_all(free.store, free.message.stripes[i]);
        } else {
          disks[free.store].erase({free.message.stripes[i], free.message.columns[i]});
        }
      }
    }
  }
  // Somebody read it there and it was not what it should be.
  void failed(std::uint64_t stripe, const wire::Column& column, Code code, int s,
              std::uint32_t generation = 1) {
    index->read_failed(
        {stripe << 8, column.column, code_of(code), column.instance, generation, column.volume}, at_s(s));
  }
  // As a host does: writes the targets and answers.
  void finish(const Index::Repair& repair, int s) {
    wire::meta_repaired answer{repair.message.stripe.stripe, 0, {}};
    for (const wire::Column& column : repair.message.targets) {
      disks[column.instance][{answer.stripe, column.column}] = {answer.stripe,
                                                                column.volume,
                                                                column.column,
                                                                1,
                                                                Key{},
                                                                repair.message.pages,
                                                                repair.message.stripe.code,
                                                                repair.message.tenant};
      answer.written.push_back(column.column);
    }
    index->repaired(repair.host, answer, at_s(s));
  }

  std::optional<Index::Place> place_of(int n) const {
    for (const Index::Place& place : index->places()) {
      if (place.instance == store(n).instance) return place;
    }
    return std::nullopt;
  }

  // Bytes and stripes of each tenant that has some.
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> held() const {
    std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> out;
    for (const kv::Evictor::TenantRow& row : index->evictor().tenants()) {
      if (row.items > 0) out[row.tenant] = {row.bytes, row.items};
    }
    return out;
  }

  std::uint64_t tenant = 0;  // who puts
  std::optional<Index> index;
  // instance -> (stripe, column) -> header
  std::map<std::string, std::map<std::pair<std::uint64_t, std::uint16_t>, wire::ShardRecord>> disks;
};

}  // namespace di::directory
