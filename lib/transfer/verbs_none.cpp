// Instead of verbs.cpp in a build without libibverbs: no port opens, so nothing else here is ever called.
#include "base/assert.h"
#include "transfer/verbs.h"

namespace di::transfer {

struct VerbsRail::State {};
struct VerbsQueuePair::State {};

Result<std::unique_ptr<VerbsRail>> VerbsRail::open(const VerbsPort&) {
  return Error{Code::unsupported, 0, "this build has no libibverbs"};
}
VerbsRail::VerbsRail(std::unique_ptr<State> state) : state_(std::move(state)) {}
VerbsRail::~VerbsRail() = default;
std::string VerbsRail::name() const {
  DI_PANIC("no rail");
}
bool VerbsRail::active() const {
  DI_PANIC("no rail");
}
Result<VerbsKeys> VerbsRail::add_memory(MutableByteView, int, std::uint64_t) {
  DI_PANIC("no rail");
}
int VerbsRail::fd() const {
  DI_PANIC("no rail");
}
std::optional<std::uint64_t> VerbsRail::next_ready() {
  DI_PANIC("no rail");
}
int VerbsRail::event_fd() const {
  DI_PANIC("no rail");
}
std::optional<VerbsEvent> VerbsRail::next_event() {
  DI_PANIC("no rail");
}

Result<std::unique_ptr<VerbsQueuePair>> VerbsQueuePair::make(VerbsRail&, const Options&) {
  DI_PANIC("no rail");
}
VerbsQueuePair::VerbsQueuePair(std::unique_ptr<State> state) : state_(std::move(state)) {}
VerbsQueuePair::~VerbsQueuePair() = default;
const VerbsAddress& VerbsQueuePair::address() const {
  DI_PANIC("no rail");
}
Status VerbsQueuePair::connect(const VerbsAddress&) {
  DI_PANIC("no rail");
}
Status VerbsQueuePair::receive(std::uint64_t, const VerbsPiece&) {
  DI_PANIC("no rail");
}
Status VerbsQueuePair::send(std::uint64_t, ByteView) {
  DI_PANIC("no rail");
}
Status VerbsQueuePair::read(std::uint64_t, std::span<const VerbsPiece>, std::uint64_t, std::uint32_t) {
  DI_PANIC("no rail");
}
Status VerbsQueuePair::write_imm(std::uint64_t, std::span<const VerbsPiece>, std::uint64_t, std::uint32_t,
                                 std::uint32_t) {
  DI_PANIC("no rail");
}
Result<std::size_t> VerbsQueuePair::poll(std::span<VerbsCompletion>) {
  DI_PANIC("no rail");
}

}  // namespace di::transfer
