// cmd/di-meta/persister.h: writes to the catalogue, in a thread: a disk that hangs holds up only who waits for it.
//
// Stripes: the index says what changed; a batch goes to the writing thread when batch_max rows are waiting, or
// batch_wait after the first.  A batch that cannot be written is tried again.  Until then, and after a crash, the
// rows are behind the index: the inventories of the stores make up for that.
//
// Rows that must not be forgotten (generations, drained stores) go before stripes, all that wait in one
// transaction, and whoever gave them is told how it ended.
//
// Owner: the loop thread; the thread inside has the writers.  Bound: one transaction in flight.  Stripes wait in
// the index, an id a stripe; rows as many as who gives them has to tell.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "directory/catalogue.h"
#include "directory/index.h"
#include "loop/loop.h"
#include "loop/mailbox.h"

namespace di::meta {

class Persister {
 public:
  static constexpr std::size_t batch_max = 256;
  static constexpr Duration batch_wait = milliseconds(100);
  static constexpr Duration retry_wait = seconds(1);

  struct Counters {
    std::uint64_t batches = 0;
    std::uint64_t rows = 0;
    std::uint64_t failures = 0;
    std::uint64_t transactions = 0;  // of rows too
  };

  using Rows = std::vector<directory::RowChange>;
  using Written = std::function<void(const Status&)>;

  // Loop and index outlive it.
  Persister(loop::Loop& loop, directory::Index& index, directory::StripeWriter stripes,
            directory::RowWriter rows);
  // Waits for what is being written.
  ~Persister();
  Persister(const Persister&) = delete;
  Persister& operator=(const Persister&) = delete;

  // Behind all rows given before.  `written` is called in a later turn: the rows are durable, or none of them is.
  void write(Rows rows, Written written);
  // Looks at what waits; called at the end of each turn.
  void poll();
  // Writes the stripes that wait, here; nobody is told of rows any more.  It is the last call.
  void finish();
  // Something is not in the catalogue yet.
  [[nodiscard]] bool waits() const {
    return busy_ || !waiting_.rows.empty() || !failed_.empty() || index_.changes() > 0;
  }
  // Of those that must not be forgotten, behind the ones that are being written.
  [[nodiscard]] std::size_t rows_waiting() const { return waiting_.rows.size(); }
  // Why the last batch of stripes was not written; empty: it was.
  [[nodiscard]] const std::string& refused() const { return refused_; }
  [[nodiscard]] const Counters& counters() const { return counters_; }

 private:
  using Batch = std::vector<directory::StripeChange>;
  struct Job {
    Batch batch;
    Rows rows;
  };
  struct Done {
    Job job;
    Status status;
  };
  struct Waiting {
    Rows rows;
    std::vector<Written> written;
  };
  void send_stripes();
  void send(Job job);
  void done(Done done);
  void stripes_done(Batch batch, const Status& status);

  directory::Index& index_;
  directory::StripeWriter stripes_;
  directory::RowWriter rows_;
  Counters counters_;
  bool busy_ = false;
  std::string refused_;
  Batch failed_;
  Waiting waiting_;
  std::vector<Written> told_;  // of the rows that are being written
  loop::Timer timer_;
  loop::Mailbox<Job> out_{1};
  loop::Mailbox<Done> in_{1};
  std::optional<loop::MailboxReader<Done>> reader_;
  std::thread thread_;
};

}  // namespace di::meta
