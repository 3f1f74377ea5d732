// cmd/di-kvd/data_plane.h: the fabric between di-kvds on different machines, and how its connections are
// allowed: a di-kvd that wants one asks the other over the control channel (data_open) and gets a ticket.
//
// Kinds: TCP, or RDMA (transfer/verbs_fabric.h), which has a TCP connection of its own for the tickets.  All di-kvds
// of a fleet are of one kind: another one's answer to the hello is malformed, and its peers are unreachable.
//
// Seal: frames are sealed when either side's transfer.seal says so or the zones differ; the side that is
// asked decides, and the side that asked refuses a ticket that is weaker than its own rule.  RDMA cannot seal: where it must, there is no connection.
//
// Owner: the loop thread.  Bounds: transfer/fabric.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "daemon/daemon.h"
#include "transfer/fabric.h"

namespace di::kvd {

enum class DataKind : std::uint8_t { tcp, verbs };

struct DataConfig {
  DataKind kind = DataKind::tcp;
  // of verbs: DEVICE, DEVICE/PORT or DEVICE/PORT/GID; none: the first that is up
  std::vector<std::string> rails;
  std::string bind;       // empty: no data plane, this di-kvd moves bytes on its own machine only
  std::string advertise;  // empty: what was bound
  bool seal = false;
  std::uint64_t link_bytes_per_s = 0;
};
void data_params(config::Params& params, DataConfig& config);
// What others are told: transfer.advertise, with the port that was bound in place of 0, or what was bound.
[[nodiscard]] std::string data_advertised(const std::string& given, const std::string& bound);

class DataPlane {
 public:
  struct Events {
    std::function<void(transfer::OpId op, Code code)> done;
    std::function<void(const wire::Peer& peer, transfer::TransferId transfer)> concealed;
  };

  // What peers may be let into.  Without a region nothing of this process can be reached.
  struct Shared {
    transfer::Region* region = nullptr;
    MutableByteView memory;  // where its slots are
  };
  // Errors: invalid, io; of verbs also not_found, no_space, unsupported.
  static Result<std::unique_ptr<DataPlane>> start(daemon::Daemon& daemon, const DataConfig& config,
                                                  Shared shared, Events events);
  DataPlane(const DataPlane&) = delete;
  DataPlane& operator=(const DataPlane&) = delete;

  // Null without transfer.bind.
  [[nodiscard]] transfer::Fabric* fabric() { return fabric_.get(); }
  // For Member.data.
  [[nodiscard]] const std::string& endpoint() const { return endpoint_; }
  void registered(const wire::Peer& self);
  void peer_up(const net::Member& member);
  void peer_lost(const wire::Peer& peer);

 private:
  DataPlane(daemon::Daemon& daemon, const DataConfig& config) : daemon_(daemon), config_(config) {}
  Status open_tcp(transfer::Region* region);
  Status open_verbs(const Shared& shared);
  void want_ticket(const wire::Peer& peer);
  void asked(const net::Incoming& in, const wire::data_open& message);
  void answered(const net::Incoming& in, const wire::data_opened& message);
  // The peer that `in` comes from; null for others than di-kvds.
  [[nodiscard]] const net::Member* sender(const net::Incoming& in) const;
  [[nodiscard]] bool must_seal(const net::Member& other) const;
  void register_metrics(daemon::Metrics& metrics);

  daemon::Daemon& daemon_;
  const DataConfig config_;
  std::unique_ptr<transfer::Fabric> fabric_;
  std::function<void(const wire::Peer& self)> set_self_;  // of the fabric
  std::string endpoint_;
  std::map<std::string, net::Member> peers_;  // di-kvds that are up, by instance
};

}  // namespace di::kvd
