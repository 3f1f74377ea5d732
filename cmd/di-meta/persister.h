// cmd/di-meta/persister.h: writes the rows of stripes to the catalogue, off the critical path.
//
// The index says what changed; a batch goes to the writing thread when batch_max rows are waiting, or
// batch_wait after the first.  One batch is being written at a time; a batch that cannot be written is tried
// again.  Until then, and after a crash, the rows are behind the index: the inventories of the stores make up
// for that.
//
// Owner: the loop thread; the thread inside has the writer.  Bound: one batch in flight; what waits is in the
// index, an id a stripe.
#pragma once

#include <cstdint>
#include <optional>
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
  };

  // Loop and index outlive it.
  Persister(loop::Loop& loop, directory::Index& index, directory::StripeWriter writer);
  // Waits for the batch that is being written.
  ~Persister();
  Persister(const Persister&) = delete;
  Persister& operator=(const Persister&) = delete;

  // Looks at what waits; called at the end of each turn.
  void poll();
  // Writes what waits, here; it is the last call.
  void finish();
  // Rows are not in the catalogue yet.
  [[nodiscard]] bool waits() const { return busy_ || !failed_.empty() || index_.changes() > 0; }
  [[nodiscard]] const Counters& counters() const { return counters_; }

 private:
  using Batch = std::vector<directory::StripeChange>;
  struct Done {
    Batch batch;
    Status status;
  };
  void send();
  void written(Done done);

  directory::Index& index_;
  directory::StripeWriter writer_;
  Counters counters_;
  bool busy_ = false;
  Batch failed_;
  loop::Timer timer_;
  loop::Mailbox<Batch> out_{1};
  loop::Mailbox<Done> in_{1};
  std::optional<loop::MailboxReader<Done>> reader_;
  std::thread thread_;
};

}  // namespace di::meta
