#include "service.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>

#include "base/crypto.h"
#include "base/sqlite.h"
#include "kv/layout.h"
#include "net/inproc.h"
#include "net/meta_client.h"

namespace di::meta {
namespace {

constexpr Duration patience = seconds(20);

net::Endpoint::Options quick(bool accept_unregistered) {
  net::Endpoint::Options options;
  options.accept_unregistered = accept_unregistered;
  return options;
}

// di-meta on the test's loop.
struct Directory {
  Directory(loop::Loop& loop, net::InprocNetwork& network, const std::string& path, Duration reconcile)
      : transport(network.make_transport(loop)), endpoint(loop, *transport, quick(true)) {
    auto opened = directory::Catalogue::open(path);
    EXPECT_TRUE(opened) << opened.error().message;
    catalogue = std::make_unique<directory::Catalogue>(*std::move(opened));
    Service::Options options;
    options.index.repairs.bytes_per_s = 1 << 30;
    options.index.reconcile = reconcile;
    options.directory_beat = [this] { ++directory_beats; };
    options.catalogue_beat = [this] { ++catalogue_beats; };
    options.degraded = [this](const std::string& what) { degraded.push_back(what); };
    options.shortage_after = Duration{0};
    options.index.tenants[7] = {.quota_bytes = 8192};
    options.tenant_names[7] = "lab";
    auto made = Service::create(loop, endpoint, *catalogue, options);
    EXPECT_TRUE(made);
    service = *std::move(made);
    net::Member self;
    self.instance = "di-meta.0";
    self.program = "di-meta";
    self.host = "h";
    self.control = "meta";
    EXPECT_TRUE(endpoint.bind("meta"));
    EXPECT_TRUE(service->start(self));
  }

  std::unique_ptr<net::Transport> transport;
  net::Endpoint endpoint;
  std::unique_ptr<directory::Catalogue> catalogue;
  std::unique_ptr<Service> service;
  int directory_beats = 0;
  int catalogue_beats = 0;
  std::vector<std::string> degraded;  // as it was told
};

// Any other instance.
struct Client {
  Client(loop::Loop& loop, net::InprocNetwork& network, const std::string& instance,
         const std::string& role = "")
      : transport(network.make_transport(loop)), endpoint(loop, *transport, quick(false)) {
    self.instance = instance;
    self.program = instance.substr(0, instance.find('.'));
    self.role = role;
    self.host = "h";
    self.control = instance;
    if (self.program == "di-prefill") {
      const kv::Layout layout = kv::layout_v41();
      self.ranks = 1;
      self.model = "demo";
      self.layout = layout.descriptor();
      self.fingerprint = layout.fingerprint();
    }
    EXPECT_TRUE(endpoint.bind(self.control));
    endpoint.on_peer_up([this](const net::Member& peer) { ups += peer.program == "di-meta" ? 1 : 0; });
    endpoint.on<wire::meta_matched>(
        [this](const net::Incoming&, const wire::meta_matched& m) { matched = m; });
    endpoint.on<wire::meta_planned>([this](const net::Incoming& in, const wire::meta_planned& m) {
      planned = m;
      planned_for = in.header.request;
    });
    endpoint.on<wire::meta_put_opened>(
        [this](const net::Incoming&, const wire::meta_put_opened& m) { opened = m; });
    endpoint.on<wire::meta_put_committed>(
        [this](const net::Incoming&, const wire::meta_put_committed& m) { committed = m; });
    endpoint.on<wire::meta_inventory_ack>(
        [this](const net::Incoming&, const wire::meta_inventory_ack& m) { ack = m; });
    endpoint.on<wire::meta_arena_resync>(
        [this](const net::Incoming&, const wire::meta_arena_resync&) { ++resyncs; });
    endpoint.on<wire::meta_inventory_want>(
        [this](const net::Incoming&, const wire::meta_inventory_want& m) { want = m; });
    endpoint.on<wire::meta_repair>([this](const net::Incoming&, const wire::meta_repair& m) { repair = m; });
    endpoint.on<wire::kv_free>([this](const net::Incoming&, const wire::kv_free& m) {
      freed.insert(freed.end(), m.stripes.begin(), m.stripes.end());
    });
  }
  void join(loop::Loop& loop) {
    client = std::make_unique<net::MetaClient>(
        loop, endpoint, "meta", self,
        net::MetaClient::Events{.registered = [this](const wire::meta_registered& r) { registered = r; },
                                .refused = [this](const Error& e) { refused = e; },
                                .members = [this](const std::vector<net::Member>& m) { members = m; }});
  }
  template <class M>
  void ask(const M& message, RequestId request = {}) {
    EXPECT_TRUE(endpoint.send(client->meta(), message, {.request = request}));
  }

  std::unique_ptr<net::Transport> transport;
  net::Endpoint endpoint;
  net::Member self;
  std::unique_ptr<net::MetaClient> client;
  int ups = 0;
  int resyncs = 0;
  std::optional<wire::meta_registered> registered;
  std::optional<Error> refused;
  std::vector<net::Member> members;
  std::optional<wire::meta_matched> matched;
  std::optional<wire::meta_planned> planned;
  RequestId planned_for;
  std::optional<wire::meta_put_opened> opened;
  std::optional<wire::meta_put_committed> committed;
  std::optional<wire::meta_inventory_ack> ack;
  std::optional<wire::meta_inventory_want> want;
  std::optional<wire::meta_repair> repair;
  std::vector<std::uint64_t> freed;
};

class ServiceTest : public testing::Test {
 protected:
  ServiceTest() {
    path = testing::TempDir() + "di-service-" + std::to_string(getpid());
    for (const char* suffix : {"", "-wal", "-shm", ".lock"}) unlink((path + suffix).c_str());
    start();
  }
  void start(Duration reconcile = {}) { directory.emplace(loop, network, path, reconcile); }
  std::unique_ptr<Client> enter(const std::string& instance, const std::string& role = "") {
    auto client = std::make_unique<Client>(loop, network, instance, role);
    client->join(loop);
    EXPECT_TRUE(until([&] { return client->ups > 0 || client->refused.has_value(); })) << instance;
    return client;
  }
  bool until(const std::function<bool()>& done) { return loop.run_until(done, patience); }

  // What the service does when the catalogue has answered.
  using Ask = std::function<Status(Service::Done)>;
  Status ended(const Ask& ask) {
    std::optional<Status> end;
    const Status asked = ask([&end](const Status& status) { end = status; });
    if (!asked) return asked;
    EXPECT_TRUE(until([&] { return end.has_value(); }));
    return end.value_or(Status(Error{Code::timeout, 0, "no answer"}));
  }
  Status store_leaves(const std::string& instance, bool leaves) {
    return ended([&](Service::Done done) {
      return directory->service->store_leaves(instance, leaves, std::move(done));
    });
  }
  Status forget(const std::string& instance) {
    return ended([&](Service::Done done) { return directory->service->forget(instance, std::move(done)); });
  }
  Result<directory::Index::Given> store_gone(const std::string& instance) {
    std::optional<directory::Index::Given> gone;
    const Status end = ended([&](Service::Done done) -> Status {
      const auto given = directory->service->store_gone(instance, std::move(done));
      if (!given) return given.error();
      gone = *given;
      return {};
    });
    if (!end) return end.error();
    return *gone;
  }
  Result<std::uint64_t> backup(const std::string& copy) {
    std::optional<Result<std::uint64_t>> end;
    const Status asked =
        directory->service->backup(copy, [&](const Result<std::uint64_t>& bytes) { end = bytes; });
    if (!asked) return asked.error();
    const Status twice = directory->service->backup(copy + "-2", nullptr);
    EXPECT_EQ(twice.error().code, Code::busy);
    EXPECT_TRUE(until([&] { return end.has_value(); }));
    return *end;
  }
  // One page in one stripe, on the way to the catalogue.
  void put(Client& host, const std::string& name) {
    host.opened.reset();
    host.committed.reset();
    Key key;
    key.raw = sha256(as_bytes(name));
    host.ask(wire::meta_put_open{Key{}, {wire::PutPage{Key{}, {key}, {1}, 4096}}});
    ASSERT_TRUE(until([&] { return host.opened.has_value(); }));
    ASSERT_EQ(host.opened->code, 0);
    host.ask(wire::meta_put_commit{host.opened->stripe, {}, {}});
    ASSERT_TRUE(until([&] { return host.committed.has_value(); }));
  }
  sqlite::Database other_writer() {
    auto other = sqlite::Database::open(path, sqlite::Synchronous::normal);
    EXPECT_TRUE(other) << other.error().message;
    return *std::move(other);
  }

  static std::vector<Key> keys(int count) {
    std::vector<Key> out(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i)
      out[static_cast<std::size_t>(i)].raw = sha256(as_bytes(std::to_string(i)));
    return out;
  }
  static wire::PutPage page(int count) { return {Key{}, keys(count), {1}, 4096}; }

  loop::Loop loop;
  net::InprocNetwork network;
  std::string path;
  std::optional<Directory> directory;
};

TEST_F(ServiceTest, EverybodyLearnsOfEverybody) {
  auto router = enter("di-router.0");
  EXPECT_EQ(router->registered->generation, 1U);
  EXPECT_EQ(router->registered->secret.size(), 32U);
  auto host = enter("di-kvd.host0", "host");
  EXPECT_TRUE(host->registered->secret.empty());
  EXPECT_NE(host->registered->id, router->registered->id);
  EXPECT_TRUE(until([&] { return router->members.size() == 3 && host->members.size() == 3; }));
  EXPECT_EQ(router->members[1].instance, "di-meta.0");
  host->client->set_state(1);
  EXPECT_TRUE(until([&] { return router->members[0].state == 1; }));
  host->client->set_state(2);
  EXPECT_TRUE(until([&] { return router->members.size() == 2; }));
}

TEST_F(ServiceTest, WhoeverStopsHearsThatTheOthersKnow) {
  auto router = enter("di-router.0");
  auto host = enter("di-kvd.host0", "host");
  int told = 0;
  const auto count = [&told] { ++told; };
  host->client->when_told(count);
  EXPECT_EQ(told, 1);  // nothing was said
  host->client->set_state(1);
  host->client->when_told(count);
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(until([&] { return told == 2; }));
  host->client->set_state(2);
  host->client->when_told(count);
  EXPECT_TRUE(until([&] { return told == 3; }));
  EXPECT_TRUE(until([&] { return router->members.size() == 2; }));
}

TEST_F(ServiceTest, RefusalSaysWhy) {
  auto first = enter("di-prefill.0");
  auto second = std::make_unique<Client>(loop, network, "di-prefill.1");
  second->self.revision.raw[0] = std::byte{9};
  second->join(loop);
  EXPECT_TRUE(until([&] { return second->refused.has_value(); }));
  EXPECT_NE(second->refused->message.find("weight revision"), std::string::npos);
  EXPECT_EQ(directory->service->counters().refused, 1U);
}

TEST_F(ServiceTest, PutMatchPlanAndFree) {
  auto router = enter("di-router.0");
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  EXPECT_TRUE(until([&] { return store->ack.has_value(); }));
  host->ask(wire::meta_put_open{Key{}, {page(4)}});
  ASSERT_TRUE(until([&] { return host->opened.has_value(); }));
  ASSERT_EQ(host->opened->code, 0);
  EXPECT_EQ(host->opened->columns.at(0).instance, "di-kvd.store0");
  host->ask(wire::meta_put_commit{host->opened->stripe, {}});
  ASSERT_TRUE(until([&] { return host->committed.has_value(); }));
  EXPECT_EQ(host->committed->code, 0);

  router->ask(wire::meta_match{Key{}, keys(6)});
  ASSERT_TRUE(until([&] { return router->matched.has_value(); }));
  EXPECT_EQ(router->matched->hit_blocks, 4U);
  RequestId request;
  request.raw[3] = std::byte{7};
  host->ask(wire::meta_plan{keys(4)}, request);
  ASSERT_TRUE(until([&] { return host->planned.has_value(); }));
  EXPECT_EQ(host->planned->pages.size(), 1U);
  EXPECT_EQ(host->planned_for, request);
  EXPECT_EQ(directory->service->index().leases(), 1U);

  // A corrupt column is not freed under the lease, and at once after it.
  const wire::Column& column = host->planned->pages[0].columns[0];
  host->ask(wire::meta_read_failed{host->planned->pages[0].page, column.column,
                                   static_cast<std::uint16_t>(Code::corrupt), column.instance,
                                   store->registered->generation, column.volume});
  EXPECT_TRUE(until([&] { return directory->service->index().stripes() == 0; }));
  EXPECT_TRUE(store->freed.empty());
  host->ask(wire::meta_release{{host->planned->lease}});
  EXPECT_TRUE(until([&] { return !store->freed.empty(); }));
  EXPECT_EQ(store->freed, (std::vector<std::uint64_t>{host->opened->stripe}));
  EXPECT_EQ(directory->service->index().leases(), 0U);
}

TEST_F(ServiceTest, APutAboveItsTenantsQuotaIsAnsweredSo) {
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  EXPECT_TRUE(until([&] { return store->ack.has_value(); }));
  host->ask(wire::meta_put_open{Key{}, {page(4)}, 7});
  ASSERT_TRUE(until([&] { return host->opened.has_value(); }));
  ASSERT_EQ(host->opened->code, 0);
  host->opened.reset();
  wire::PutPage next{keys(4).back(), {keys(6)[4], keys(6)[5]}, {1}, 8192};
  host->ask(wire::meta_put_open{Key{}, {next}, 7});
  ASSERT_TRUE(until([&] { return host->opened.has_value(); }));
  EXPECT_EQ(host->opened->code, static_cast<std::uint16_t>(Code::over_quota));
  host->opened.reset();
  host->ask(wire::meta_put_open{Key{}, {next}, 8});
  ASSERT_TRUE(until([&] { return host->opened.has_value(); }));
  EXPECT_EQ(host->opened->code, 0);
  const kv::Evictor::TenantRow lab = directory->service->index().evictor().tenant(7);
  EXPECT_EQ(lab.refused, 1U);
  EXPECT_EQ(lab.bytes, 4096U);
}

TEST_F(ServiceTest, WhatIsNotWrittenForWantOfStoresIsToldOnceAndOnceMoreWhenItIsOver) {
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  ASSERT_TRUE(until([&] { return store->ack.has_value(); }));
  EXPECT_TRUE(directory->degraded.empty());
  store.reset();  // the process is killed
  ASSERT_TRUE(until([&] { return !directory->degraded.empty(); }));
  const std::string without = "1+0 wants 1 store nodes, 0 take columns: nothing is written to the store";
  EXPECT_EQ(directory->degraded, std::vector<std::string>{without});
  EXPECT_EQ(directory->service->degraded(), without);
  store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  ASSERT_TRUE(until([&] { return store->ack.has_value(); }));
  EXPECT_EQ(directory->degraded, (std::vector<std::string>{without, ""}));
  EXPECT_EQ(directory->service->degraded(), "");

  // One that is being emptied takes no columns either.
  ASSERT_TRUE(store_leaves("di-kvd.store0", true));
  ASSERT_TRUE(until([&] { return directory->degraded.size() == 3; }));
  EXPECT_EQ(directory->degraded.back(), without);
  ASSERT_TRUE(store_leaves("di-kvd.store0", false));
  ASSERT_TRUE(until([&] { return directory->degraded.size() == 4; }));
  EXPECT_EQ(directory->degraded.back(), "");
}

TEST_F(ServiceTest, LossFreesWhatTheHolderHad) {
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  host->ask(wire::meta_arena_delta{1, true, {{1, Key{}, keys(2), {1}}}, {}});
  EXPECT_TRUE(until([&] { return directory->service->index().blocks() == 2; }));
  host->ask(wire::meta_plan{keys(2)});
  EXPECT_TRUE(until([&] { return host->planned.has_value(); }));
  EXPECT_EQ(directory->service->index().leases(), 1U);
  host->ask(wire::meta_put_open{Key{}, {page(2)}});
  EXPECT_TRUE(until([&] { return directory->service->index().open_puts() == 1; }));
  host.reset();  // the process is killed
  EXPECT_TRUE(until([&] { return directory->service->index().blocks() == 0; }));
  EXPECT_EQ(directory->service->index().leases(), 0U);
  EXPECT_EQ(directory->service->index().open_puts(), 0U);
  EXPECT_EQ(directory->service->membership().count(), 2U);
  host = enter("di-kvd.host0", "host");
  EXPECT_EQ(host->registered->generation, 2U);
}

TEST_F(ServiceTest, GapAsksForASnapshot) {
  auto host = enter("di-kvd.host0", "host");
  host->ask(wire::meta_arena_delta{5, false, {}, {}});
  EXPECT_TRUE(until([&] { return host->resyncs == 1; }));
}

TEST_F(ServiceTest, BrokenConnectionIsALossAndTheInstanceReturns) {
  auto host = enter("di-kvd.host0", "host");
  host->ask(wire::meta_arena_delta{1, true, {{1, Key{}, keys(2), {1}}}, {}});
  EXPECT_TRUE(until([&] { return directory->service->index().blocks() == 2; }));
  network.test_cut("meta");
  EXPECT_TRUE(until([&] { return host->ups == 2; }));
  EXPECT_TRUE(until([&] { return directory->service->membership().count() == 2; }));
  EXPECT_EQ(directory->service->index().blocks(), 0U);
  host->ask(wire::meta_arena_delta{2, true, {{1, Key{}, keys(2), {1}}}, {}});
  EXPECT_TRUE(until([&] { return directory->service->index().blocks() == 2; }));
  EXPECT_FALSE(host->refused.has_value());
}

// G05: members and what they hold are there again without a restart of theirs.
TEST_F(ServiceTest, RestartOfTheDirectoryKeepsGenerations) {
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  EXPECT_TRUE(until([&] { return store->ack.has_value(); }));
  store->ack.reset();
  const std::uint32_t id = host->registered->id;
  directory.reset();
  start();
  EXPECT_TRUE(until([&] { return host->ups == 2 && store->ups == 2; }));
  EXPECT_FALSE(host->refused.has_value());
  EXPECT_EQ(host->endpoint.self().generation, 1U);
  EXPECT_EQ(host->endpoint.self().id, id);
  EXPECT_TRUE(until([&] { return directory->service->membership().count() == 3; }));
  // What the store holds is known again after its inventory.
  store->ask(wire::meta_inventory{0, true, {{77, 0, 0, 1, Key{}, {page(3)}}}});
  EXPECT_TRUE(until([&] { return store->ack.has_value(); }));
  EXPECT_TRUE(store->ack->unknown.empty());
  EXPECT_EQ(directory->service->index().blocks(), 3U);
}

// G06.
TEST_F(ServiceTest, RestartFindsWhatTheCatalogueHas) {
  auto router = enter("di-router.0");
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  EXPECT_TRUE(until([&] { return store->ack.has_value(); }));
  host->ask(wire::meta_put_open{Key{}, {page(4)}});
  ASSERT_TRUE(until([&] { return host->opened.has_value(); }));
  host->ask(wire::meta_put_commit{host->opened->stripe, {}, {}});
  ASSERT_TRUE(until([&] { return host->committed.has_value(); }));
  EXPECT_TRUE(until([&] { return directory->service->persister().counters().rows > 0; }));
  directory.reset();
  start();
  EXPECT_EQ(directory->service->index().stripes(), 1U);
  EXPECT_TRUE(until([&] { return router->ups == 2 && store->ups == 2; }));
  router->ask(wire::meta_match{Key{}, keys(6)});
  ASSERT_TRUE(until([&] { return router->matched.has_value(); }));
  EXPECT_EQ(router->matched->hit_blocks, 4U);  // the store has not told yet
  // It has lost the page: nobody confirms the row.
  store->ask(wire::meta_inventory{0, true, {}});
  EXPECT_TRUE(until([&] { return directory->service->index().stripes() == 0; }));
  EXPECT_TRUE(until([&] { return directory->service->persister().counters().rows > 0; }));
  directory.reset();
  start();
  EXPECT_EQ(directory->service->index().stripes(), 0U);
}

TEST_F(ServiceTest, AStoreIsAskedAgainWhatItHolds) {
  directory.reset();
  start(milliseconds(50));
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  ASSERT_TRUE(until([&] { return store->ack.has_value(); }));
  ASSERT_TRUE(until([&] { return store->want.has_value(); }));
  host->ask(wire::meta_put_open{Key{}, {page(4)}});
  ASSERT_TRUE(until([&] { return host->opened.has_value(); }));
  ASSERT_EQ(host->opened->code, 0) << "a store that is asked takes columns";
  host->ask(wire::meta_put_commit{host->opened->stripe, {}, {}});
  ASSERT_TRUE(until([&] { return host->committed.has_value(); }));
  // It came after the question; the next answer has to show it, and does not.
  const std::uint32_t number = store->want->asked;
  store->want.reset();
  store->ask(wire::meta_inventory{0, true, {}, number});
  ASSERT_TRUE(until([&] { return store->want.has_value(); }));
  EXPECT_EQ(directory->service->index().stripes(), 1U);
  EXPECT_GT(store->want->asked, number);
  store->ask(wire::meta_inventory{0, true, {}, store->want->asked});
  EXPECT_TRUE(until([&] { return directory->service->index().stripes() == 0; }));
  EXPECT_EQ(directory->service->index().counters().reconciled_missing, 1U);
}

TEST_F(ServiceTest, ACatalogueThatIsNotWrittenHasNoHeartbeat) {
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  ASSERT_TRUE(until([&] { return store->ack.has_value(); }));
  ASSERT_TRUE(until([&] { return directory->catalogue_beats > 0 && directory->directory_beats > 0; }));
  // Somebody else writes to the file, and does not come to an end.
  auto other = sqlite::Database::open(path, sqlite::Synchronous::normal);
  ASSERT_TRUE(other) << other.error().message;
  ASSERT_TRUE(other->exec("BEGIN IMMEDIATE"));
  host->ask(wire::meta_put_open{Key{}, {page(4)}});
  ASSERT_TRUE(until([&] { return host->opened.has_value(); }));
  host->ask(wire::meta_put_commit{host->opened->stripe, {}, {}});
  ASSERT_TRUE(until([&] { return host->committed.has_value(); }));
  const int directory_beats = directory->directory_beats;
  const int catalogue_beats = directory->catalogue_beats;
  ASSERT_TRUE(until([&] { return directory->directory_beats > directory_beats + 1; }));
  EXPECT_EQ(directory->catalogue_beats, catalogue_beats);
  ASSERT_TRUE(other->exec("ROLLBACK"));
  EXPECT_TRUE(until([&] { return directory->catalogue_beats > catalogue_beats; }));
  EXPECT_GT(directory->service->persister().counters().rows, 0U);
}

TEST_F(ServiceTest, OthersAreAnsweredWhileARegistrationWaitsForTheCatalogue) {
  auto router = enter("di-router.0");
  auto store = enter("di-kvd.store0", "store");
  sqlite::Database other = other_writer();
  ASSERT_TRUE(other.exec("BEGIN IMMEDIATE"));
  Client late(loop, network, "di-kvd.host0", "host");
  late.join(loop);
  ASSERT_TRUE(until([&] { return directory->service->waiting() == 1; }));
  // What the operator asks waits too, and nobody else for it.
  std::optional<Status> drains;
  ASSERT_TRUE(directory->service->store_leaves("di-kvd.store0", true,
                                               [&](const Status& status) { drains = status; }));
  router->ask(wire::meta_match{Key{}, keys(6)});
  ASSERT_TRUE(until([&] { return router->matched.has_value(); }));
  EXPECT_TRUE(directory->service->persister().waits());
  EXPECT_EQ(directory->service->persister().counters().rows, 0U);
  EXPECT_FALSE(late.registered || drains);
  EXPECT_FALSE(directory->service->index().places().at(0).leaves);
  // It comes on another connection, as after three seconds without an answer.
  network.test_cut("meta");
  ASSERT_TRUE(until([&] { return router->ups == 2; }));
  EXPECT_EQ(directory->service->waiting(), 1U);
  ASSERT_TRUE(other.exec("ROLLBACK"));
  ASSERT_TRUE(until([&] { return late.ups > 0 && drains; }));
  EXPECT_TRUE(*drains);
  EXPECT_EQ(late.registered->generation, 1U);
  EXPECT_EQ(directory->service->waiting(), 0U);
  EXPECT_FALSE(late.refused.has_value());
}

// A process of the same name is there before the first was written: nobody hears of that one's generation.
TEST_F(ServiceTest, TheLastProcessOfANameGetsItWhileTheCatalogueIsLocked) {
  auto router = enter("di-router.0");
  sqlite::Database other = other_writer();
  ASSERT_TRUE(other.exec("BEGIN IMMEDIATE"));
  auto first = std::make_unique<Client>(loop, network, "di-kvd.host0", "host");
  Client second(loop, network, "di-kvd.elsewhere", "host");
  second.self.instance = first->self.instance;
  Client third(loop, network, "di-kvd.host1", "host");
  first->join(loop);
  ASSERT_TRUE(until([&] { return directory->service->waiting() == 1; }));
  second.join(loop);
  third.join(loop);
  ASSERT_TRUE(until([&] { return first->refused && directory->service->waiting() == 2; }));
  EXPECT_EQ(first->refused->code, Code::stale);
  ASSERT_TRUE(other.exec("ROLLBACK"));
  ASSERT_TRUE(until([&] { return second.ups > 0 && third.ups > 0; }));
  EXPECT_FALSE(first->registered);
  first.reset();  // with that its process ends: it does not ask the next di-meta
  EXPECT_NE(second.registered->id, third.registered->id);
  EXPECT_TRUE(until([&] { return router->members.size() == 4; }));
  // What was promised is in the file.
  const std::uint32_t id = second.registered->id;
  const std::uint32_t generation = second.registered->generation;
  directory.reset();
  start();
  ASSERT_TRUE(until([&] { return second.ups == 2 && third.ups == 2; }));
  EXPECT_FALSE(second.refused || third.refused);
  const net::Member* member = directory->service->membership().find(id, generation);
  ASSERT_NE(member, nullptr);
  EXPECT_EQ(member->control, "di-kvd.elsewhere");
}

// A second process of the name ended the one that served.
TEST_F(ServiceTest, ANameIsTakenWhileItsProcessIsConnected) {
  auto first = enter("di-kvd.host0", "host");
  Client second(loop, network, "di-kvd.elsewhere", "host");
  second.self.instance = first->self.instance;
  second.join(loop);
  ASSERT_TRUE(until([&] { return directory->service->counters().refused > 0; }));
  EXPECT_FALSE(second.registered || second.refused);
  EXPECT_FALSE(first->refused);
  EXPECT_TRUE(directory->endpoint.up(first->registered->id));
  // As with kill -9: the connection breaks.
  first.reset();
  ASSERT_TRUE(until([&] { return second.ups > 0; }));
  EXPECT_EQ(second.registered->generation, 2U);
}

// As when a process that cannot register in time is started again and again: no row of each waits.
TEST_F(ServiceTest, ProcessesOfANameThatReplaceEachOtherHaveOneWriteWhileTheCatalogueIsLocked) {
  auto router = enter("di-router.0");
  sqlite::Database other = other_writer();
  ASSERT_TRUE(other.exec("BEGIN IMMEDIATE"));
  std::vector<std::unique_ptr<Client>> processes;
  for (int i = 0; i < 5; ++i) {
    auto next = std::make_unique<Client>(loop, network, "di-kvd.boot" + std::to_string(i), "host");
    next->self.instance = "di-kvd.host0";
    next->join(loop);
    ASSERT_TRUE(until([&] {
      return directory->service->waiting() == 1 && (processes.empty() || processes.back()->refused);
    }));
    EXPECT_EQ(directory->service->persister().rows_waiting(), 0U) << "behind the one that is being written";
    processes.push_back(std::move(next));
  }
  ASSERT_TRUE(other.exec("ROLLBACK"));
  Client& last = *processes.back();
  ASSERT_TRUE(until([&] { return last.ups > 0 && directory->service->waiting() == 0; }));
  EXPECT_FALSE(last.refused);
  const std::uint32_t id = last.registered->id;
  const std::uint32_t generation = last.registered->generation;
  processes.erase(processes.begin(), processes.end() - 1);
  directory.reset();
  start();
  ASSERT_TRUE(until([&] { return last.ups == 2; }));
  const net::Member* member = directory->service->membership().find(id, generation);
  ASSERT_NE(member, nullptr);
  EXPECT_EQ(member->control, "di-kvd.boot4");
}

TEST_F(ServiceTest, ACatalogueThatRefusesIsToldAgainAfterItTook) {
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  ASSERT_TRUE(until([&] { return store->ack.has_value(); }));
  sqlite::Database other = other_writer();
  const Persister& persister = directory->service->persister();
  testing::internal::CaptureStderr();
  std::uint64_t failures = 0;
  for (const char* name : {"first", "second"}) {
    ASSERT_TRUE(
        other.exec("CREATE TRIGGER refuses BEFORE INSERT ON stripe"
                   " BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"));
    put(*host, name);
    // And once more, of which nothing is said.
    EXPECT_TRUE(until([&] { return persister.counters().failures >= failures + 2; }));
    const auto without = [&] { return directory->service->degraded(); };
    EXPECT_TRUE(until(
        [&] { return without().find("stripes cannot be written to the catalogue: ") != std::string::npos; }));
    ASSERT_TRUE(other.exec("DROP TRIGGER refuses"));
    EXPECT_TRUE(until([&] { return !persister.waits(); }));
    EXPECT_TRUE(until([&] { return without().find("catalogue") == std::string::npos; }));
    failures = persister.counters().failures;
  }
  const std::string log = testing::internal::GetCapturedStderr();
  const auto lines = [&log](const std::string& text) {
    int count = 0;
    for (std::size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) ++count;
    return count;
  };
  EXPECT_EQ(lines("cannot write stripes"), 2) << log;
  EXPECT_EQ(lines("stripes are written again"), 2) << log;
}

TEST_F(ServiceTest, WhoeverCannotBeRegisteredYetHearsWhy) {
  auto router = enter("di-router.0");
  sqlite::Database other = other_writer();
  ASSERT_TRUE(
      other.exec("CREATE TRIGGER refuses BEFORE INSERT ON instance"
                 " BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"));
  Client late(loop, network, "di-kvd.host0", "host");
  testing::internal::CaptureStderr();
  late.join(loop);
  // Longer than a connection lives on which nothing is heard.
  bool over = false;
  loop::Timer timer(loop, loop::TimerKind::liveness, "test", [&] { over = true; });
  timer.start_after(net::peer_lost_after + seconds(2));
  EXPECT_TRUE(until([&] { return over; }));
  const std::string log = testing::internal::GetCapturedStderr();
  const std::size_t said = log.find("di-meta cannot register us yet");
  ASSERT_NE(said, std::string::npos) << log;
  EXPECT_NE(log.find("the disk is full", said), std::string::npos) << log;
  EXPECT_EQ(log.find("di-meta cannot register us yet", said + 1), std::string::npos) << log;
  EXPECT_EQ(log.find("no di-meta at its address"), std::string::npos) << log;
  const auto without = [&] { return directory->service->degraded(); };
  EXPECT_NE(without().find("registrations wait, generations cannot be saved: "), std::string::npos)
      << without();
  EXPECT_FALSE(late.refused || late.registered);
  ASSERT_TRUE(other.exec("DROP TRIGGER refuses"));
  ASSERT_TRUE(until([&] { return late.ups > 0 && without().find("registrations") == std::string::npos; }));
  EXPECT_EQ(late.registered->generation, 1U);
}

TEST_F(ServiceTest, AFleetGoesOnWithADirectoryFromABackup) {
  auto router = enter("di-router.0");
  auto gone = enter("di-router.1");
  const std::string copy = path + "-copy";
  for (const std::string& file : {copy, copy + "-2"}) unlink(file.c_str());
  const auto bytes = backup(copy);
  ASSERT_TRUE(bytes) << bytes.error().message;
  EXPECT_GT(*bytes, 0U);
  EXPECT_EQ(backup(copy).error().code, Code::exists);
  // After it: two that are new, of which one ends, and a new start of one that was there.
  auto host = enter("di-kvd.host0", "host");
  auto ended = enter("di-kvd.host1", "host");
  const std::uint32_t id = host->registered->id;
  const std::uint32_t last = ended->registered->id;
  gone.reset();
  gone = enter("di-router.1");
  EXPECT_EQ(gone->registered->generation, 2U);
  directory.reset();
  ended.reset();
  gone.reset();
  for (const char* suffix : {"-wal", "-shm"}) unlink((path + suffix).c_str());
  ASSERT_EQ(rename(copy.c_str(), path.c_str()), 0);
  start();
  ASSERT_TRUE(until([&] { return router->ups == 2 && host->ups == 2; }));
  EXPECT_FALSE(router->refused || host->refused);
  EXPECT_EQ(host->endpoint.self().id, id);
  // Nothing is given out twice.
  auto store = enter("di-kvd.store0", "store");
  EXPECT_GT(store->registered->id, std::max(id, last));
  gone = enter("di-router.1");
  EXPECT_GT(gone->registered->generation, 2U);
  EXPECT_TRUE(until([&] { return router->members.size() == 5 && host->members.size() == 5; }));
}

TEST_F(ServiceTest, AnInstanceOfAnotherCatalogueIsToldToStartAnew) {
  auto router = enter("di-router.0");
  directory.reset();
  for (const char* suffix : {"", "-wal", "-shm"}) unlink((path + suffix).c_str());
  start();
  ASSERT_TRUE(until([&] { return router->refused.has_value(); }));
  EXPECT_EQ(router->refused->code, Code::stale);
  EXPECT_EQ(directory->service->membership().count(), 1U);
  router.reset();
  router = enter("di-router.0");
  EXPECT_FALSE(router->refused.has_value());
}

TEST_F(ServiceTest, AForgottenNameIsForgottenForGood) {
  auto router = enter("di-router.0");
  const std::uint32_t id = router->registered->id;
  router.reset();
  ASSERT_TRUE(until([&] { return directory->service->membership().away().contains("di-router.0"); }));
  ASSERT_TRUE(forget("di-router.0"));
  EXPECT_EQ(forget("di-router.0").error().code, Code::not_found);
  directory.reset();
  start();
  router = enter("di-router.0");
  EXPECT_NE(router->registered->id, id);
  EXPECT_GT(router->registered->generation, 1U);
}

TEST_F(ServiceTest, ANameThatTheCatalogueDidNotForgetIsForgottenAtTheNextCommand) {
  auto router = enter("di-router.0");
  auto store = enter("di-kvd.store0", "store");
  const std::uint32_t id = router->registered->id;
  router.reset();
  store.reset();
  const auto away = [&](const std::string& name) {
    return directory->service->membership().away().contains(name);
  };
  ASSERT_TRUE(until([&] { return away("di-router.0") && away("di-kvd.store0"); }));
  sqlite::Database other = other_writer();
  ASSERT_TRUE(
      other.exec("CREATE TRIGGER refuses BEFORE DELETE ON instance"
                 " BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"));
  EXPECT_FALSE(forget("di-router.0"));
  EXPECT_FALSE(store_gone("di-kvd.store0"));
  EXPECT_TRUE(away("di-router.0") && away("di-kvd.store0"));
  // Who comes meanwhile is not undone.
  std::optional<Status> refused;
  ASSERT_TRUE(other.exec("BEGIN IMMEDIATE"));
  ASSERT_TRUE(directory->service->forget("di-router.0", [&](const Status& status) { refused = status; }));
  router = std::make_unique<Client>(loop, network, "di-router.0");
  router->join(loop);
  ASSERT_TRUE(until([&] { return directory->service->waiting() == 1; }));
  ASSERT_TRUE(other.exec("ROLLBACK"));
  ASSERT_TRUE(until([&] { return router->ups > 0 && refused; }));
  EXPECT_FALSE(*refused);
  EXPECT_NE(router->registered->id, id);
  EXPECT_FALSE(away("di-router.0"));
  const std::uint32_t next = router->registered->id;
  router.reset();
  ASSERT_TRUE(until([&] { return away("di-router.0"); }));
  ASSERT_TRUE(other.exec("DROP TRIGGER refuses"));
  EXPECT_TRUE(forget("di-router.0"));
  EXPECT_TRUE(store_gone("di-kvd.store0"));
  directory.reset();
  start();
  EXPECT_FALSE(away("di-kvd.store0"));
  router = enter("di-router.0");
  store = enter("di-kvd.store0", "store");
  EXPECT_GT(router->registered->id, next);
  EXPECT_GT(store->registered->id, next);
}

// As when a large fleet returns after a restart: each list goes to everybody.
TEST_F(ServiceTest, ManyChangesAreListedTogether) {
  auto router = enter("di-router.0");
  auto host = enter("di-kvd.host0", "host");
  const auto published = [&] { return directory->service->counters().published; };
  const std::uint64_t before = published();
  const Instant begin = loop.monotonic_now();
  std::uint64_t epoch = directory->service->membership().epoch();
  for (int i = 1; i <= 301; ++i, ++epoch) {
    host->client->set_state(static_cast<std::uint8_t>(i % 2));
    ASSERT_TRUE(until([&] { return directory->service->membership().epoch() > epoch; }));
  }
  EXPECT_TRUE(until([&] { return router->members.size() == 3 && router->members[0].state == 1; }));
  const auto pauses = (loop.monotonic_now() - begin) / publish_every;
  EXPECT_LE(published() - before, static_cast<std::uint64_t>(pauses) + 2);
}

TEST_F(ServiceTest, DrainOfAStoreOutlivesTheDirectory) {
  auto store = enter("di-kvd.store0", "store");
  EXPECT_EQ(store_leaves("di-kvd.nobody", true).error().code, Code::not_found);
  ASSERT_TRUE(store_leaves("di-kvd.store0", true));
  directory.reset();
  start();
  ASSERT_EQ(directory->service->index().places().size(), 1U);
  EXPECT_TRUE(directory->service->index().places()[0].leaves);
  ASSERT_TRUE(store_leaves("di-kvd.store0", false));
  directory.reset();
  start();
  EXPECT_TRUE(directory->service->index().places().empty());
}

TEST_F(ServiceTest, AForgottenStoreTakesAlongWhatItHadToFree) {
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  EXPECT_TRUE(until([&] { return store->ack.has_value(); }));
  host->ask(wire::meta_put_open{Key{}, {page(4)}});
  ASSERT_TRUE(until([&] { return host->opened.has_value(); }));
  host->ask(wire::meta_put_commit{host->opened->stripe, {}, {}});
  ASSERT_TRUE(until([&] { return host->committed.has_value(); }));
  const std::uint64_t stripe = host->opened->stripe;
  store.reset();
  ASSERT_TRUE(until([&] { return directory->service->membership().away().contains("di-kvd.store0"); }));
  ASSERT_TRUE(directory->service->drop_stripe(stripe));
  EXPECT_EQ(directory->service->index().pending_frees(), 1U);
  ASSERT_TRUE(forget("di-kvd.store0"));
  EXPECT_EQ(directory->service->index().pending_frees(), 0U);
}

TEST_F(ServiceTest, AStoreThatIsAwayIsShownUntilItIsGivenUp) {
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  EXPECT_TRUE(until([&] { return store->ack.has_value(); }));
  host->ask(wire::meta_put_open{Key{}, {page(4)}});
  ASSERT_TRUE(until([&] { return host->opened.has_value(); }));
  host->ask(wire::meta_put_commit{host->opened->stripe, {}, {}});
  ASSERT_TRUE(until([&] { return host->committed.has_value(); }));
  EXPECT_TRUE(until([&] { return directory->service->persister().counters().rows > 0; }));
  ASSERT_TRUE(store_leaves("di-kvd.store0", true));
  const auto away = [&] { return directory->service->membership().away().contains("di-kvd.store0"); };
  const auto shown = [&] {
    const auto places = directory->service->index().places();
    return std::any_of(places.begin(), places.end(), [](const auto& place) { return place.store; });
  };
  EXPECT_FALSE(away());
  const Error up = store_gone("di-kvd.store0").error();
  EXPECT_EQ(up.code, Code::busy);
  EXPECT_EQ(up.message, "di-kvd.store0 is up: stop it first, or empty it with kv drain di-kvd.store0");
  store.reset();
  EXPECT_TRUE(until(away));
  // Nor does a restart of the directory make the list shorter.
  directory.reset();
  start();
  EXPECT_TRUE(away());
  EXPECT_TRUE(shown());
  EXPECT_EQ(forget("di-kvd.nobody").error().message,
            "no instance 'di-kvd.nobody' is away: there are di-kvd.store0");
  EXPECT_EQ(forget("di-kvd.store0").error().message,
            "di-kvd.store0 has 1 columns that may come back: kv drop store di-kvd.store0 gives them up");
  EXPECT_EQ(store_gone("di-kvd.nobody").error().message,
            "no store 'di-kvd.nobody' is known: there are di-kvd.store0");
  const auto given = store_gone("di-kvd.store0");
  ASSERT_TRUE(given);
  EXPECT_EQ(given->columns, 1U);
  EXPECT_EQ(given->stripes, 1U);
  EXPECT_FALSE(away());
  EXPECT_FALSE(shown());
  // For good; and another of its name is not emptied.
  EXPECT_TRUE(until([&] { return directory->service->persister().counters().rows > 0; }));
  directory.reset();
  start();
  EXPECT_FALSE(shown());
  EXPECT_FALSE(away());
}

// Rows that cannot be written while it stops do not take the place of stripes that wait to be written again.
TEST_F(ServiceTest, StripesThatFailedAreWrittenAtTheStopBehindRowsThatFail) {
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_inventory{0, true, {}});
  ASSERT_TRUE(until([&] { return store->ack.has_value(); }));
  put(*host, "page");
  ASSERT_TRUE(until([&] { return directory->service->persister().counters().rows > 0; }));
  directory.reset();
  const auto stripes = [](directory::Catalogue& catalogue) {
    std::vector<directory::StripeRow> rows;
    EXPECT_TRUE(catalogue.load_stripes([&](const directory::StripeRow& row) { rows.push_back(row); }));
    return rows;
  };
  {
    auto catalogue = directory::Catalogue::open(path);
    ASSERT_TRUE(catalogue);
    auto stripe_writer = catalogue->stripe_writer();
    auto row_writer = catalogue->row_writer();
    ASSERT_TRUE(stripe_writer && row_writer);
    directory::Index::Options options;
    options.run = catalogue->run();
    options.record_changes = true;
    directory::Index index(options, loop.monotonic_now());
    const auto rows = stripes(*catalogue);
    ASSERT_EQ(rows.size(), 1U);
    ASSERT_TRUE(index.restore(rows[0], loop.monotonic_now()));
    Persister persister(loop, index, *std::move(stripe_writer), *std::move(row_writer));
    sqlite::Database other = other_writer();
    ASSERT_TRUE(
        other.exec("CREATE TRIGGER refuses BEFORE DELETE ON stripe"
                   " BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"));
    ASSERT_TRUE(index.drop_stripe(rows[0].id, loop.monotonic_now()));
    persister.poll();
    ASSERT_TRUE(until([&] { return persister.counters().failures == 1; }));
    ASSERT_TRUE(other.exec("DROP TRIGGER refuses"));
    ASSERT_TRUE(
        other.exec("CREATE TRIGGER refuses BEFORE INSERT ON instance"
                   " BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"));
    persister.write({directory::InstanceRow{"di-router.0", 77, 1, 1}}, [](const Status&) {});
    persister.poll();
    persister.finish();
  }
  auto catalogue = directory::Catalogue::open(path);
  ASSERT_TRUE(catalogue);
  EXPECT_TRUE(stripes(*catalogue).empty());
}

TEST_F(ServiceTest, AStoreThatIsGivenUpBehindADrainThatWaitsIsNotEmptied) {
  auto store = enter("di-kvd.store0", "store");
  store.reset();
  ASSERT_TRUE(until([&] { return directory->service->membership().away().contains("di-kvd.store0"); }));
  sqlite::Database other = other_writer();
  ASSERT_TRUE(other.exec("BEGIN IMMEDIATE"));
  std::optional<Status> drained;
  std::optional<Status> given;
  ASSERT_TRUE(directory->service->store_leaves("di-kvd.store0", true,
                                               [&](const Status& status) { drained = status; }));
  ASSERT_TRUE(directory->service->store_gone("di-kvd.store0", [&](const Status& status) { given = status; }));
  ASSERT_TRUE(other.exec("ROLLBACK"));
  ASSERT_TRUE(until([&] { return drained && given; }));
  EXPECT_TRUE(*drained && *given);
  store = enter("di-kvd.store0", "store");
  ASSERT_EQ(directory->service->index().places().size(), 1U);
  EXPECT_FALSE(directory->service->index().places()[0].leaves);
}

TEST_F(ServiceTest, RepairsGoToAHostAndComeBack) {
  auto host = enter("di-kvd.host0", "host");
  auto store = enter("di-kvd.store0", "store");
  store->ask(wire::meta_volumes{{{0, 0, 1 << 20, 1 << 20}}});
  store->ask(wire::meta_inventory{0, true, {}});
  EXPECT_TRUE(until([&] { return store->ack.has_value(); }));
  host->ask(wire::meta_put_open{Key{}, {page(4)}});
  ASSERT_TRUE(until([&] { return host->opened.has_value(); }));
  host->ask(wire::meta_put_commit{host->opened->stripe, {}, {}});
  ASSERT_TRUE(until([&] { return host->committed.has_value(); }));
  auto other = enter("di-kvd.store1", "store");
  other->ask(wire::meta_inventory{0, true, {}});
  EXPECT_TRUE(until([&] { return other->ack.has_value(); }));
  ASSERT_TRUE(store_leaves("di-kvd.store0", true));
  ASSERT_TRUE(until([&] { return host->repair.has_value(); }));
  EXPECT_EQ(host->repair->stripe.stripe, host->opened->stripe);
  EXPECT_EQ(host->repair->targets, (std::vector<wire::Column>{{"di-kvd.store1", 0, 0}}));
  host->ask(wire::meta_repaired{host->opened->stripe, 0, {0}, {}});
  EXPECT_TRUE(until([&] { return !store->freed.empty(); }));
  EXPECT_EQ(directory->service->index().leases(), 0U);
  EXPECT_EQ(directory->service->index().counters().columns_repaired, 1U);
}

}  // namespace
}  // namespace di::meta
