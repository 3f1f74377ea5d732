// store/server_work.h: what a server keeps of a put, and of a read for another machine, while they are under way.
//
// Owner: loop thread; the disk's thread fills what is said to be its own.  Bounds: those of store/server.h.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "store/buffers.h"
#include "store/places.h"
#include "store/server.h"

namespace di::store {

struct Server::PutWork {
  Peer host;
  Mount* mount = nullptr;
  wire::kv_put want;
  Put put;
  Instant began;
  std::shared_ptr<kv::ArenaClient> arena;  // null: the page is in `remote`
  std::shared_ptr<const kv::Layout> layout;
  std::vector<Strip> pieces;  // of the slot, in the order of the column
  Buffer remote;
  std::set<transfer::OpId> moving;  // into `remote`
  Code moved = Code::ok;            // the first thing that went wrong with it
};

// A column on its way to another machine: the disk's thread fills `payload`, the fabric takes it away.
struct Server::RemoteRead {
  TransferId id;
  wire::kv_read want;
  Mount* mount = nullptr;
  Read read;
  Buffer payload;
  // Of the slot; set on the disk's thread before the first segment is told.
  std::vector<Strip> strips;
  std::uint32_t begun = 0;  // segments [0, begun) are on their way or there
  std::uint64_t begun_bytes = 0;
  std::uint32_t arrived = 0;  // bitmap
  std::uint32_t told = 0;     // segments [0, told), or they were not wanted
  std::set<transfer::OpId> moving;
  bool disk_over = false;
  Status disk;  // its error, when that was what went wrong first
  bool verified = false;
  Code code = Code::ok;  // the first thing that went wrong
  std::uint64_t bytes = 0;
};

}  // namespace di::store
