// tests/support/softverbs/softverbs.h: a provider of verbs in software, in the place of libibverbs: linked
// into a test, or preloaded into a daemon.  This header is what a test may do to it.
//
// Two devices, softverbs0 and softverbs1, of one port each.  RC queue pairs with SEND, RDMA WRITE, RDMA READ
// and their immediates; keys, bounds, rights, depths and states are checked as a NIC does, and stricter where
// that finds faults of ours.  What it cannot show: the order in which a NIC writes, timers, MTU and flow
// control of a real network, limits of translation tables, memory of a GPU.
//
// Threaded, the default: one thread moves what is posted, also between processes (wire.cpp).  Deterministic:
// nothing moves but in step(), in an order that the seed determines, inside one process.
//
// Owner: any thread, one lock.  Bound: what the test creates.
#pragma once

#include <cstddef>
#include <cstdint>

namespace di::softverbs {

// From now on, while no device is open.
void run_threaded();
void run_deterministic(std::uint64_t seed);

// Deterministic: moves one piece of one work request, of any queue pair that can move; false when none can.
bool step();
// Until none can.
void run_all();

// Faults, either mode.  `nth` counts work requests that begin to move, from 1 for the next.
void fail_nth(std::uint64_t nth, int wc_status);  // before a byte is moved
void lose_completion_nth(std::uint64_t nth);      // its bytes arrive; nobody is told
void flip_next(std::size_t bytes_min);            // a bit of the next payload that is at least that long
// Its bytes arrive; its completion, and those of what its queue pair does later, wait for let_go().
void hold_nth(std::uint64_t nth);
void let_go();
// Deterministic: chance that a work request rests for some steps.
void set_delay(double chance);
// Deterministic: a WRITE or a READ of more than 2 bytes becomes visible in two steps.
void set_tear(bool tear);
// Port 1 of a device: IBV_EVENT_PORT_ERR or IBV_EVENT_PORT_ACTIVE, and the state that query_port tells.  Nothing
// gets out or in while it is down.
void set_port(std::size_t device, bool up);
// The same, and nobody is told: a path that is broken beyond the next switch.
void set_path(std::size_t device, bool whole);
// The last byte of the GID of a device's port.  Who connects to another one finds no route.
void set_gid(std::size_t device, std::uint8_t last);
void no_faults();  // but those of ports and GIDs

struct Counts {
  std::uint64_t begun = 0;  // work requests that began to move
  std::uint64_t bytes = 0;
  std::size_t objects = 0;  // contexts, domains, regions, channels, queues and queue pairs alive
};
[[nodiscard]] Counts counts();

}  // namespace di::softverbs
