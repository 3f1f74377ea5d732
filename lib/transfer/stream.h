// transfer/stream.h: the bytes of one data connection: frames out of a queue, frames in piece by piece,
// in clear or sealed.
//
// In clear, payload goes straight between the socket and the memory it belongs to.  Sealed, it passes a
// buffer of stream_buffer_bytes each way, small enough to stay in the cache between socket and cipher.
//
// Owner: the I/O thread of its fabric.  Bounds: the queue is its user's (unsent_bytes, queued); no more
// memory than the two buffers, and the rest of one payload that release() copied.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"
#include "transfer/frame.h"
#include "transfer/seal.h"

namespace di::transfer {

inline constexpr std::size_t stream_buffer_bytes = 256 << 10;

class Stream {
 public:
  enum class Got : std::uint8_t {
    nothing,    // no more for now
    header,     // frame() has arrived; say where its payload goes before the next receive()
    frame,      // frame() is complete
    ended,      // by the other side, or broken
    malformed,  // nothing that follows can be understood
    forged,     // a tag is wrong
  };
  enum class Sent : std::uint8_t { all, some, ended };

  struct Outgoing {
    Frame frame;
    ByteView payload;                   // somebody else's, until sent or released
    std::optional<std::uint64_t> mark;  // whose; for release()
  };

  // `drain` is where payload goes that nobody wants; outlives the stream, may be shared.
  Stream(Fd fd, MutableByteView drain);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] int fd() const { return fd_.get(); }
  // All that is sent and received from now on is sealed.  An acceptor calls it at the header of the hello,
  // whose own tag is then checked next.
  void seal(const SealKey& key, SealDirection ours);

  // Reads until something is to be told, or `budget` bytes are used up; takes what it read off it.
  [[nodiscard]] Got receive(std::size_t& budget);
  [[nodiscard]] const Frame& frame() const { return frame_; }
  // The payload of frame() goes there (frame().payload_bytes() long), or nowhere: also in the middle of it.
  void payload_into(MutableByteView target) { target_ = target; }
  void payload_drain() { target_ = {}; }

  void push(const Frame& frame, ByteView payload = {}, std::optional<std::uint64_t> mark = {});
  [[nodiscard]] Sent flush(std::size_t& budget);
  [[nodiscard]] std::size_t unsent_bytes() const { return unsent_bytes_ + stage_left(); }
  [[nodiscard]] std::size_t queued() const { return out_.size(); }

  // Lets go of the payloads of the frames with this mark.  One that is under way keeps a copy of its
  // rest; the others are taken out and their numbers returned.
  [[nodiscard]] std::vector<std::uint64_t> release(std::uint64_t mark);
  // The same, but the others stay as answers with `code` and no payload.
  void release_as(std::uint64_t mark, Code code);

 private:
  struct Queued {
    Outgoing out;
    FrameHeader head{};
    std::size_t head_sent = 0;
    std::size_t payload_sent = 0;
    Bytes own;  // the copy that release() made
    bool begun = false;

    [[nodiscard]] ByteView payload_left() const { return out.payload.subspan(payload_sent); }
  };

  Got receive_open(std::size_t& budget);
  Got receive_sealed(std::size_t& budget);
  // Into the head or the input buffer.  Nothing: got some.
  std::optional<Got> fill(std::byte* at, std::size_t room, std::size_t& budget, std::size_t& got);
  Sent flush_open(std::size_t& budget);
  Sent flush_sealed(std::size_t& budget);
  void stage_fill();
  [[nodiscard]] std::size_t stage_left() const { return stage_end_ - stage_begin_; }
  static void own_rest(Queued& queued);

  Fd fd_;
  MutableByteView drain_;
  std::unique_ptr<Sealer> sealer_;
  std::unique_ptr<Opener> opener_;

  // In.
  bool in_payload_ = false;
  bool announced_ = false;  // the header of a hello was told before its tag was there
  std::array<std::byte, frame_header_bytes + seal_tag_bytes> head_{};
  std::size_t head_have_ = 0;
  Frame frame_;
  std::size_t payload_have_ = 0;
  MutableByteView target_;
  Bytes in_;  // sealed only
  std::size_t in_begin_ = 0;
  std::size_t in_end_ = 0;

  // Out.
  std::deque<Queued> out_;
  std::size_t unsent_bytes_ = 0;
  Bytes stage_;  // sealed only
  std::size_t stage_begin_ = 0;
  std::size_t stage_end_ = 0;
};

}  // namespace di::transfer
