// store/server.h: what a store daemon does with messages: reads into arenas, puts from arenas, frees and
// the inventory.
//
// Owner: loop thread; disk work is on the threads of the volumes' IoPools.  Messages come and go as
// wire::Envelope; the shell (cmd/di-kvd) is the network.  A host's arena is mapped over its socket
// (transfer/shm.h) when the host comes up; what arrives before it is mapped waits.  A host on another
// machine is reached through the fabric: a read goes to a buffer and from there, segment by segment, into
// the slot that the host exposed for it; a put is read out of the slot before it is written.
//
// One transfer, from kv_read to its last answer:
//   waiting   the arena is not mapped yet      -> reading; ended by kv_read_cancel or loss of the host
//   reading   it is queued or running          -> kv_read_done as layer groups arrive; the last one, a
//             failure, or its end after kv_read_cancel (kv_read_cancelled) ends it
// Any other kv_read_cancel is answered at once: nothing of that transfer will be written.
//
// Durability: by default a put is acknowledged after its write and the volume is flushed every
// `flush_every`; with `strict` it is acknowledged after the flush.
//
// A node has several volumes, numbered in their order; a message names the one that it is for, and di-meta
// chooses.  Each is a store/mount.h, which a transfer carries.  One that fails, is slow or is full is out of
// service alone, and di-meta hears of it.  A free names none: the column is looked for in all of them.
//
// server_remote.cpp has what goes through the fabric, server_inventory.cpp the inventory.
//
// Bounds: volumes_max volumes; transfers_max reads and puts_max puts at a time, of them remote_max with a
// buffer of a page, above that `busy`; of several volumes none has more of each than share_of_left times what is
// left, so that disks which do not answer leave some to the others (one of them a fifth), and volumes that are well
// hardly notice; remote_kept_bytes of such buffers that wait for the next; one inventory part.
#pragma once

#include <algorithm>
#include <atomic>
#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/histogram.h"
#include "base/result.h"
#include "kv/arena.h"
#include "loop/loop.h"
#include "store/buffers.h"
#include "store/io.h"
#include "store/mount.h"
#include "store/places.h"
#include "store/volume.h"
#include "transfer/fabric.h"
#include "transfer/shm.h"
#include "wire/envelope.h"

namespace di::store {

using wire::Peer;

struct ServerCounters {
  std::uint64_t reads = 0;  // transfers ended well
  std::uint64_t read_bytes = 0;
  std::uint64_t reads_not_found = 0;
  std::uint64_t reads_corrupt = 0;
  std::uint64_t reads_io = 0;
  std::uint64_t reads_refused = 0;  // busy, stale, no arena
  std::uint64_t reads_cancelled = 0;
  std::uint64_t puts = 0;
  std::uint64_t put_bytes = 0;
  std::uint64_t puts_no_space = 0;
  std::uint64_t puts_io = 0;
  std::uint64_t puts_corrupt = 0;  // the arena's bytes did not match
  std::uint64_t puts_over_budget = 0;
  std::uint64_t puts_refused = 0;  // busy, stale, unknown layout, no arena
  std::uint64_t columns_freed = 0;
  std::uint64_t inventories = 0;      // finished
  std::uint64_t slots_dropped = 0;    // wrong headers found by an inventory
  std::uint64_t columns_dropped = 0;  // by reads, inventories and scrubs: not what they were
  std::uint64_t malformed = 0;
};

class Server {
 public:
  static constexpr std::size_t layouts_max = 64;
  static constexpr std::size_t inventory_part_max = 1024;
  // A part that is not acknowledged in this time: the inventory starts over.
  static constexpr Duration inventory_wait = seconds(10);
  static constexpr std::size_t volumes_max = 256;  // as many as di-meta takes from one node
  static constexpr std::size_t checks_max = 8;     // that wait
  static constexpr std::size_t share_of_left = 4;
  // Puts during one inventory; it starts over with more.
  static constexpr std::size_t inventory_fresh_max = 65536;

  struct Options {
    Peer self;            // generation: set_self()
    std::string run_dir;  // arenas are at RUNDIR/INSTANCE.arena
    std::size_t transfers_max = 512;
    std::size_t puts_max = 512;
    std::size_t remote_max = 64;
    std::size_t remote_kept_bytes = std::size_t{64} << 20;  // buffers kept for the next ones
    bool strict = false;
    Duration flush_every = milliseconds(100);
    Scrub::Options scrub;
    kv::WriteBudget::Options budget;  // of each volume
  };
  struct Hooks {
    std::function<void(const wire::Envelope&)> send;
    // Fault points.  The first runs on the disk's thread in the middle of the work (when set, segments are
    // read in halves); the second gets the answer to a put and decides about it.
    std::function<void()> mid_segment = {};
    std::function<void(std::function<void()> answer)> put_written = {};
    // The scrubber moved.  May be null.
    std::function<void()> scrub_beat = {};
    // A disk was looked at, and has not failed.  May be null.
    std::function<void()> disk_beat = {};
    // A volume's state or reason is another.  May be null.
    std::function<void()> volumes_changed = {};
  };
  // What a look at every slot's header found in one volume.
  struct Check {
    std::uint16_t volume = 0;
    std::uint64_t slots = 0;
    std::uint64_t verified = 0;    // every byte was compared since the volume was opened
    std::uint64_t corrupt = 0;     // headers that were not what they should be; dropped
    std::uint64_t unreadable = 0;  // headers that could not be read
    std::uint64_t orphans = 0;     // columns that di-meta did not know; freed
    bool told = false;             // di-meta was there to be asked
  };

  // What the queue of a disk must have room for, so that queueing never fails: everything that may be
  // asked for at once, and an inventory part.
  [[nodiscard]] static std::size_t io_queue_max(const Options& options) {
    return std::max(options.transfers_max, options.puts_max) + 8;
  }

  // `fabric` outlives the server; null: hosts on other machines are refused.
  Server(loop::Loop& loop, std::vector<Mount::Backing> volumes, transfer::Fabric* fabric, Options options,
         Hooks hooks);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  void set_self(const Peer& self) { options_.self = self; }
  // Descriptors come with the members that serve a model; without one puts of its pages are refused.
  void learn_layout(const kv::Layout& layout);

  // di-meta came (again): it gets the states of the volumes, and the inventory.
  void meta_up(const Peer& meta);
  void meta_lost(const Peer& meta);
  // `here`: on this machine, so that its arena can be mapped.
  void host_up(const Peer& host, bool here);
  void host_lost(const Peer& host);
  void on_message(const wire::Envelope& message);
  // The fabric is done with an operation of this server.
  void moved(transfer::OpId op, Code code);

  // Goes through the headers of all slots, which is also an inventory; `done` gets one for each volume.
  // Errors: busy.
  Status check(std::function<void(const std::vector<Check>&)> done);

  // Takes a volume out of service and lets go of its disk; `closed` comes when nothing of it runs any more,
  // in a later turn.  Errors: not_found; busy: it serves and is well, or is being closed already, or the
  // store stops.
  Status volume_close(std::uint16_t volume, std::function<void()> closed);
  // What the disk of a closed volume has now, or why it has none: di-meta hears of it, and of what it holds.
  void volume_open(std::uint16_t volume, Mount::Backing backing);

  // Refuses new work, waits for what runs, writes everything behind, then calls `done`.
  void stop(std::function<void()> done);

  [[nodiscard]] const ServerCounters& counters() const { return counters_; }
  // By number.
  [[nodiscard]] const std::vector<std::unique_ptr<Mount>>& mounts() const { return mounts_; }
  [[nodiscard]] std::size_t transfers() const { return transfers_.size(); }
  [[nodiscard]] std::size_t puts() const { return held_.puts; }
  [[nodiscard]] std::size_t io_pending() const;
  [[nodiscard]] std::uint64_t slots_reading() const;  // without those of scrubs
  [[nodiscard]] std::size_t arenas() const;
  [[nodiscard]] bool inventory_running() const { return inventory_ != nullptr; }
  // From message to last answer, in microseconds.
  [[nodiscard]] const Histogram& read_us() const { return read_us_; }
  [[nodiscard]] const Histogram& put_us() const { return put_us_; }

 private:
  struct Host {
    Peer peer;
    bool here = false;
    std::unique_ptr<transfer::ShmClient> socket;
    std::shared_ptr<kv::ArenaClient> arena;
    std::vector<wire::Envelope> waiting;  // for the arena
  };
  using TransferId = std::pair<Peer, std::uint64_t>;
  // Places that are taken.
  struct Held {
    std::size_t reads = 0;  // that run
    std::size_t puts = 0;
    std::size_t remote = 0;  // of both, with a buffer
  };
  struct RemoteRead;
  struct Transfer {
    std::shared_ptr<std::atomic<bool>> cancelled = std::make_shared<std::atomic<bool>>(false);
    bool answer_cancel = false;
    bool running = false;
    Instant began;
    Mount* mount = nullptr;              // once it is running
    std::shared_ptr<RemoteRead> remote;  // of a host on another machine
  };
  struct PutWork;
  struct Inventory {
    struct Fresh {
      std::uint16_t volume = 0;
      std::uint64_t stripe = 0;
      std::uint16_t column = 0;
    };
    std::optional<Peer> meta;  // none: only a look
    std::uint32_t asked = 0;   // number of di-meta's question
    std::vector<Check> found;  // by volume
    std::vector<std::function<void(const std::vector<Check>&)>> waiting;
    std::uint64_t cursor = 0;
    std::uint16_t volume = 0;  // is listed from `from` on; behind the last one: all are listed
    SlotAddress from;
    // Put since it began: they may lie where the list had been already, and what is not in an inventory is
    // lost for di-meta.
    std::deque<Fresh> fresh;
    bool last = false;
    bool sent = false;         // the part of `cursor`: its answer may come
    std::uint64_t number = 0;  // of this inventory: late results of another are dropped
  };

  void attach(Host& host);
  void detach(const Peer& peer);
  // Its mapping goes when the disk has let go of it.
  void unmap(Host& host);
  Host* host_of(const wire::Envelope& message);
  template <class M>
  bool decode(const wire::Envelope& message, M& out) {
    wire::Decoded<M> decoded = message.as<M>();
    if (!decoded) {
      ++counters_.malformed;
      return false;
    }
    out = std::move(*decoded);
    return true;
  }
  template <class M>
  void send(const Peer& to, const M& message, const wire::Scope& scope = {}) {
    hooks_.send(wire::Envelope::make(to.instance, to.generation, scope, message));
  }
  // Null: there is none of that number.
  [[nodiscard]] Mount* mount_of(std::uint16_t volume) const;
  // Of the places of one kind `used` are taken, `own` of them by the volume that wants one more.
  [[nodiscard]] bool has_place(std::size_t own, std::size_t used, std::size_t max) const;

  void read(Host& host, const wire::Envelope& message);
  [[nodiscard]] bool is_page(std::uint32_t blocks, std::uint64_t bytes) const;
  [[nodiscard]] std::vector<std::uint32_t> segments_known(std::uint32_t blocks, const ColumnRead& job) const;
  [[nodiscard]] ColumnRead job_of(const wire::kv_read& want, const Read& read,
                                  const Transfer& transfer) const;
  void read_ended(const TransferId& id, Mount& mount, const Read& read, const ColumnEnd& end, bool by_disk);
  void refuse_read(const Peer& host, std::uint64_t transfer, Code code);
  void cancel(const Peer& host, std::uint64_t transfer);
  void put(Host& host, const wire::Envelope& message);
  void put_fetch(const std::shared_ptr<PutWork>& work);
  void put_fetched(const std::shared_ptr<PutWork>& work, Code code);
  void put_write(const std::shared_ptr<PutWork>& work);
  void put_ended(const std::shared_ptr<PutWork>& work, const PutOutcome& outcome);
  void read_remote(Host& host, const wire::kv_read& want);
  void remote_read(const std::shared_ptr<RemoteRead>& read, std::uint32_t group);
  void remote_move(const std::shared_ptr<RemoteRead>& read, const Strip& run, std::uint32_t segments);
  void remote_tell(RemoteRead& read);
  void remote_moved(const std::shared_ptr<RemoteRead>& read, std::uint32_t segments, Code code);
  void remote_fail(RemoteRead& read, Code code);
  void cancel(Transfer& transfer);
  void remote_settle(const std::shared_ptr<RemoteRead>& read);
  void put_answer(const Peer& host, std::uint64_t stripe, std::uint16_t column, Code code);
  void free(const wire::kv_free& message);
  void volumes_send();
  void inventory_start();
  void inventory_next();
  void inventory_read(std::uint64_t number, std::uint16_t volume, std::size_t listed, std::vector<Read> reads,
                      std::vector<Result<SlotHeader>> headers);
  void inventory_acked(const Peer& meta, const wire::meta_inventory_ack& ack);
  void inventory_go_on();
  void stop_when_idle();

  loop::Loop& loop_;
  Options options_;
  Hooks hooks_;
  transfer::Fabric* fabric_;
  std::map<transfer::OpId, std::function<void(Code)>> moving_;  // bounded with remote_max
  Held held_;
  std::vector<Held> held_by_;  // by volume
  std::shared_ptr<BufferPool> buffers_;
  std::shared_ptr<const Layouts> layouts_ = std::make_shared<const Layouts>();  // the disk's thread reads it
  std::optional<Peer> meta_;
  std::map<std::string, Host> hosts_;
  std::map<TransferId, Transfer> transfers_;
  std::unique_ptr<Inventory> inventory_;
  std::uint64_t inventories_begun_ = 0;
  bool inventory_reading_ = false;  // headers are on their way, of this inventory or one before
  bool stopping_ = false;
  std::function<void()> stopped_;
  ServerCounters counters_;
  Histogram read_us_;
  Histogram put_us_;
  loop::Timer inventory_timer_;
  std::vector<std::unique_ptr<Mount>> mounts_;  // last: their threads use what is above
};

}  // namespace di::store
