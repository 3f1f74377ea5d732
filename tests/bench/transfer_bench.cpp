// What the fabric over TCP costs against plain sockets: one connection, units of 1 MiB, two processes on
// one machine, from one arena into another.
//
//   transfer_bench [ROUNDS [MIB_PER_ROUND [CASE]]]
//
// Every round measures every case once, one after the other, so that what else the machine does hits all
// alike; a row is the median rate of a case, the median of its ratio to the plain sockets of the same round,
// and the median CPU time of both processes.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/assert.h"
#include "base/fd.h"
#include "loop/loop.h"
#include "transfer/tcp.h"

namespace {

using namespace di;
using namespace di::transfer;

constexpr std::size_t unit_bytes = 1 << 20;
constexpr std::uint32_t slots = 64;

class Arena final : public Region {
 public:
  Arena() {
    void* at = ::mmap(nullptr, slots * unit_bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    DI_ASSERT(at != MAP_FAILED);
    base_ = static_cast<std::byte*>(at);
    std::memset(base_, 7, slots * unit_bytes);
  }
  ~Arena() override { ::munmap(base_, slots * unit_bytes); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  Result<MutableByteView> resolve(const SlotName& name) override { return slot(name.slot); }
  [[nodiscard]] MutableByteView slot(std::uint32_t index) const {
    return {base_ + index % slots * unit_bytes, unit_bytes};
  }

 private:
  std::byte* base_ = nullptr;
};

void move_all(int fd, std::byte* bytes, std::size_t count, bool in) {
  while (count > 0) {
    const ssize_t n = in ? ::recv(fd, bytes, count, 0) : ::send(fd, bytes, count, MSG_NOSIGNAL);
    if (n <= 0) std::exit(0);  // the other process is through
    bytes += n;
    count -= static_cast<std::size_t>(n);
  }
}

sockaddr_in loopback_address(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = port;
  return address;
}

const Peer owner{"owner", 1};
const Peer client_open{"open", 1};
const Peer client_sealed{"sealed", 1};

Bytes ticket_bytes_of(const Ticket& ticket) {
  Bytes bytes;
  for (const auto byte : ticket.secret) bytes.push_back(std::byte{byte});
  for (const auto byte : ticket.key) bytes.push_back(std::byte{byte});
  return bytes;
}

// The owner's process: control byte 'o' or 's' asks for a ticket, 'p' announces plain bytes.
[[noreturn]] void serve(int control) {
  Arena arena;
  loop::Loop loop;
  TcpOptions options;
  options.self = owner;
  options.listen = "127.0.0.1:0";
  options.region = &arena;
  auto fabric = *make_tcp_fabric(loop, options);
  std::vector<SlotName> names;
  for (std::uint32_t slot = 0; slot < slots; ++slot) names.push_back({slot, 1});
  for (const Peer& peer : {client_open, client_sealed}) {
    DI_ASSERT(fabric->expose(peer, 1, Access::write, names).ok());
    DI_ASSERT(fabric->expose(peer, 2, Access::read, names).ok());
  }
  Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = loopback_address(0);
  socklen_t length = sizeof address;
  DI_ASSERT(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  DI_ASSERT(::listen(listener.get(), 1) == 0);
  DI_ASSERT(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  Bytes hello(2 + 64);
  std::memcpy(hello.data(), &address.sin_port, 2);
  const std::string endpoint = fabric->endpoint();
  std::memcpy(hello.data() + 2, endpoint.data(), endpoint.size());
  move_all(control, hello.data(), hello.size(), false);
  // The plain receiver has a thread, as the fabric has one.
  std::thread plain([&] {
    const int fd = ::accept(listener.get(), nullptr, nullptr);
    while (true) {
      std::byte count[4];
      move_all(fd, count, sizeof count, true);
      const auto units = get_le<std::uint32_t>(count);
      for (std::uint32_t i = 0; i < units; ++i) move_all(fd, arena.slot(i).data(), unit_bytes, true);
      move_all(fd, count, 1, false);
    }
  });
  loop::Watch watch(loop, control, "control");
  watch.on_readable([&] {
    std::byte what;
    move_all(control, &what, 1, true);
    const bool seal = what == std::byte{'s'};
    Bytes answer = ticket_bytes_of(*fabric->grant(seal ? client_sealed : client_open, seal));
    move_all(control, answer.data(), answer.size(), false);
  });
  loop.run();
  std::exit(0);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Client {
  Client(const Peer& self, int control, const std::string& endpoint, bool seal) {
    TcpOptions options;
    options.self = self;
    fabric = *make_tcp_fabric(loop, options);
    fabric->set_events({[this, control, endpoint, seal](const Peer& peer) {
                          std::byte what{seal ? std::byte{'s'} : std::byte{'o'}};
                          move_all(control, &what, 1, false);
                          Bytes answer(ticket_bytes + seal_key_bytes);
                          move_all(control, answer.data(), answer.size(), true);
                          Ticket ticket;
                          std::memcpy(ticket.secret.data(), answer.data(), ticket_bytes);
                          std::memcpy(ticket.key.data(), answer.data() + ticket_bytes, seal_key_bytes);
                          ticket.seal = seal;
                          fabric->ticket(peer, endpoint, ticket);
                        },
                        [this](OpId, Code code) {
                          DI_ASSERT(code == Code::ok);
                          --pending;
                          next();
                        },
                        {}});
  }
  // Operations of one unit, at most 32 at a time, as a core with a bounded queue would.
  void next() {
    while (left > 0 && pending < 32) {
      const MutableByteView slot = arena->slot(left);
      const Place place{{left % slots, 1}, 0, unit_bytes};
      const auto op = writes ? fabric->write(owner, 1, place, slot, Class::handover)
                             : fabric->read(owner, 2, place, slot, Class::fetch);
      DI_ASSERT(op.ok());
      --left;
      ++pending;
    }
    if (left == 0 && pending == 0) loop.stop();
  }
  double run(const Arena& memory, std::uint32_t units, bool write) {
    arena = &memory;
    left = units;
    writes = write;
    const auto start = std::chrono::steady_clock::now();
    loop.post("start", [this] { next(); });
    loop.run();
    return static_cast<double>(units) * unit_bytes / seconds_since(start) * 1e-9;
  }

  loop::Loop loop;
  std::unique_ptr<TcpFabric> fabric;
  const Arena* arena = nullptr;
  std::uint32_t left = 0;
  std::uint32_t pending = 0;
  bool writes = true;
};

// CPU time of both processes so far.
double cpu_s(pid_t child) {
  clockid_t clock{};
  DI_ASSERT(::clock_getcpuclockid(child, &clock) == 0);
  timespec mine{};
  timespec theirs{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &mine);
  ::clock_gettime(clock, &theirs);
  return static_cast<double>(mine.tv_sec + theirs.tv_sec) +
         static_cast<double>(mine.tv_nsec + theirs.tv_nsec) * 1e-9;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  const auto units = static_cast<std::uint32_t>(argc > 2 ? std::atoi(argv[2]) : 512);
  const char* only = argc > 3 ? argv[3] : nullptr;
  int control[2];
  DI_ASSERT(::socketpair(AF_UNIX, SOCK_STREAM, 0, control) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(control[0]);
    serve(control[1]);
  }
  ::close(control[1]);
  Bytes hello(2 + 64);
  move_all(control[0], hello.data(), hello.size(), true);
  std::uint16_t port = 0;
  std::memcpy(&port, hello.data(), 2);
  const std::string endpoint = reinterpret_cast<const char*>(hello.data() + 2);

  Arena arena;
  Fd plain(::socket(AF_INET, SOCK_STREAM, 0));
  const sockaddr_in address = loopback_address(port);
  DI_ASSERT(::connect(plain.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  const int on = 1;
  ::setsockopt(plain.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const auto run_plain = [&] {
    const auto start = std::chrono::steady_clock::now();
    std::byte count[4];
    put_le<std::uint32_t>(count, units);
    move_all(plain.get(), count, sizeof count, false);
    for (std::uint32_t i = 0; i < units; ++i) {
      move_all(plain.get(), arena.slot(i).data(), unit_bytes, false);
    }
    move_all(plain.get(), count, 1, true);
    return static_cast<double>(units) * unit_bytes / seconds_since(start) * 1e-9;
  };
  Client open(client_open, control[0], endpoint, false);
  Client sealed(client_sealed, control[0], endpoint, true);

  struct Case {
    const char* name;
    std::function<double()> run;
    std::vector<double> rate;
    std::vector<double> ratio;
    std::vector<double> cpu;
  };
  std::vector<Case> cases{
      {"plain sockets", run_plain, {}, {}, {}},
      {"write", [&] { return open.run(arena, units, true); }, {}, {}, {}},
      {"write, sealed", [&] { return sealed.run(arena, units, true); }, {}, {}, {}},
      {"read", [&] { return open.run(arena, units, false); }, {}, {}, {}},
      {"read, sealed", [&] { return sealed.run(arena, units, false); }, {}, {}, {}},
  };
  for (int round = -1; round < rounds; ++round) {  // the first one is for the caches and connections
    double plain_rate = 0;
    for (Case& each : cases) {
      if (only != nullptr && std::strcmp(only, each.name) != 0) continue;
      const double before = cpu_s(child);
      const double rate = each.run();
      if (&each == &cases.front()) plain_rate = rate;
      if (round < 0) continue;
      each.rate.push_back(rate);
      each.ratio.push_back(rate / plain_rate);
      each.cpu.push_back((cpu_s(child) - before) / (static_cast<double>(units) * unit_bytes * 1e-9));
    }
  }
  std::printf("case\tGB/s\tratio\tCPU s/GB\n");
  for (const Case& each : cases) {
    if (each.rate.empty()) continue;
    std::printf("%s\t%.2f\t%.2f\t%.2f\n", each.name, median(each.rate), median(each.ratio), median(each.cpu));
  }
  ::close(control[0]);
  ::kill(child, SIGTERM);
  ::waitpid(child, nullptr, 0);
  return 0;
}
