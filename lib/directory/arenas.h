// directory/arenas.h: the pages that the arenas of the hosts hold, as the hosts report them.
//
// Pure.  Owner: the directory's thread.  Bounds: pages_max a host, hosts_max hosts.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "directory/lease.h"
#include "wire/messages.h"

namespace di::directory {

// A host that was asked for a snapshot and goes on without is asked again after so many reports.
inline constexpr std::uint64_t resync_again = 64;

class Arenas {
 public:
  struct Options {
    std::size_t hosts_max = 4096;
    std::size_t pages_max = std::size_t{1} << 18;
  };
  struct Page {
    std::uint32_t host = 0;
    wire::ArenaPage page;
  };
  struct Host {
    std::string instance;
    std::uint32_t generation = 0;
    std::uint64_t seq = 0;
    bool complete = false;        // attached and no gap
    std::uint64_t resync_in = 0;  // reports, until a snapshot is asked for; while not complete
    std::map<std::uint64_t, std::uint32_t> pages;  // the host's number -> slot
    std::uint64_t blocks = 0;
  };
  struct Counters {
    std::uint64_t deltas = 0;
    std::uint64_t gaps = 0;
    std::uint64_t refused = 0;
  };
  // Called when a page is there, and before it goes.
  struct Events {
    std::function<void(std::uint32_t slot, const Page& page)> added;
    std::function<void(std::uint32_t slot, const Page& page)> removed;
  };

  Arenas(Options options, Events events) : options_(options), events_(std::move(events)) {}
  Arenas(const Arenas&) = delete;
  Arenas& operator=(const Arenas&) = delete;

  // Starts over, also with the generation that is there.  False when hosts_max is reached.
  bool host_up(const Holder& host);
  void lost(const Holder& host);
  // True: ask the host for a snapshot.
  [[nodiscard]] bool delta(const Holder& host, const wire::meta_arena_delta& message);

  [[nodiscard]] const Page& at(std::uint32_t slot) const { return *slots_[slot]; }
  [[nodiscard]] const Host& host(std::uint32_t number) const { return hosts_.at(number); }
  [[nodiscard]] bool is_host(const Holder& holder) const;
  // In the order of instance names.
  [[nodiscard]] const std::map<std::string, std::uint32_t>& numbers() const { return numbers_; }
  [[nodiscard]] const Counters& counters() const { return counters_; }

 private:
  [[nodiscard]] Host* find(const Holder& holder, std::uint32_t* number);
  void add(std::uint32_t number, Host& host, const wire::ArenaPage& page);
  void remove(Host& host, std::uint64_t page);
  void clear(Host& host);

  Options options_;
  Events events_;
  Counters counters_;
  std::map<std::uint32_t, Host> hosts_;
  std::map<std::string, std::uint32_t> numbers_;
  std::uint32_t next_ = 1;
  std::deque<std::optional<Page>> slots_;
  std::vector<std::uint32_t> free_;
};

}  // namespace di::directory
