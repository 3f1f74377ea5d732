// cmd/di-router/prompt_queue.h: whose body is read next, and who may wait for it.
//
// Pure; owner: the loop thread.  Bounds: reader_jobs_max and reader_bytes_max of bodies that wait or are
// being read, of both a tenant may hold as many as it leaves free.  Tenants take turns.  Of bodies longer
// than long_body_bytes one thread fewer is occupied than there are: the others are read within a fraction
// of a second each, and never wait for one that takes many.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "account/key.h"
#include "account/quota.h"
#include "http/server.h"

namespace di::router {

inline constexpr std::size_t reader_jobs_max = 1024;
inline constexpr std::size_t reader_bytes_max = std::size_t{256} << 20;
inline constexpr std::size_t long_body_bytes = 1 << 20;
inline constexpr int reader_threads = 2;

// What the body of a route is read as.
enum class Task : std::uint8_t { chat, completion, tokenize, detokenize };

struct ReadJob {
  Task task = Task::chat;
  http::ExchangeId exchange;
  std::string request_id;
  account::KeyEntry key;
  account::Ticket ticket;
  std::string body;
  std::size_t body_bytes = 0;  // what it was when it was pushed
};

class PromptQueue {
 public:
  // False, and `job` untouched, when there is no room.
  [[nodiscard]] bool push(ReadJob&& job);
  // The job that a thread begins now; nullopt when none waits or may begin.
  [[nodiscard]] std::optional<ReadJob> next();
  // A job of next() has been read.
  void done(const ReadJob& job);
  // Its client left; a job that is being read goes on.
  void drop(http::ExchangeId exchange);

  [[nodiscard]] std::size_t jobs() const { return all_.jobs; }
  [[nodiscard]] std::size_t bytes() const { return all_.bytes; }

 private:
  struct Held {
    std::size_t jobs = 0;
    std::size_t bytes = 0;
  };
  struct Lane {
    std::map<std::string, std::deque<ReadJob>> waiting;  // by tenant, none of them empty
    std::deque<std::string> turns;                       // each tenant of `waiting` once
    int running = 0;
  };
  [[nodiscard]] Lane& lane_of(const ReadJob& job) { return lanes_[job.body_bytes > long_body_bytes ? 1 : 0]; }
  void give_back(const ReadJob& job);

  std::array<Lane, 2> lanes_;  // short bodies, long ones
  Held all_;
  std::map<std::string, Held> by_tenant_;
};

}  // namespace di::router
