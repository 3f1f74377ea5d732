#include "transfer/stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/assert.h"

namespace di::transfer {

namespace {

// Room that is kept at the end of the staging buffer for what is no payload: a header, two tags.
constexpr std::size_t stage_reserve = frame_header_bytes + 2 * seal_tag_bytes;
// The cipher is fast on whole blocks.
constexpr std::size_t cipher_block_bytes = 16;
// Frames of one sendmsg: two pieces each.
constexpr std::size_t send_pieces_max = 16;

std::span<const std::byte, frame_header_bytes> header_of(
    const std::array<std::byte, frame_header_bytes + seal_tag_bytes>& head) {
  return std::span<const std::byte, frame_header_bytes>(head.data(), frame_header_bytes);
}

}  // namespace

Stream::Stream(Fd fd, MutableByteView drain) : fd_(std::move(fd)), drain_(drain) {
  DI_ASSERT(drain_.size() >= frame_header_bytes);
}

Stream::~Stream() = default;

void Stream::seal(const SealKey& key, SealDirection ours) {
  DI_ASSERT(!sealer_ && out_.empty());
  const SealDirection theirs =
      ours == SealDirection::from_dialler ? SealDirection::from_acceptor : SealDirection::from_dialler;
  sealer_ = std::make_unique<Sealer>(key, ours);
  opener_ = std::make_unique<Opener>(key, theirs);
  in_.resize(stream_buffer_bytes);
  stage_.resize(stream_buffer_bytes);
  if (in_payload_) {
    in_payload_ = false;
    announced_ = true;
    head_have_ = frame_header_bytes;
  }
}

std::optional<Stream::Got> Stream::fill(std::byte* at, std::size_t room, std::size_t& budget,
                                        std::size_t& got) {
  if (budget == 0) return Got::nothing;
  while (true) {
    const ssize_t n = ::recv(fd_.get(), at, std::min(room, budget), 0);
    if (n > 0) {
      got = static_cast<std::size_t>(n);
      budget -= got;
      return std::nullopt;
    }
    if (n == 0) return Got::ended;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == EWOULDBLOCK ? Got::nothing : Got::ended;
  }
}

Stream::Got Stream::receive(std::size_t& budget) {
  return opener_ ? receive_sealed(budget) : receive_open(budget);
}

Stream::Got Stream::receive_open(std::size_t& budget) {
  while (true) {
    if (!in_payload_) {
      if (head_have_ < frame_header_bytes) {
        std::size_t got = 0;
        if (const auto end = fill(&head_[head_have_], frame_header_bytes - head_have_, budget, got))
          return *end;
        head_have_ += got;
        continue;
      }
      const Result<Frame> frame = frame_decode(header_of(head_));
      // A sealed hello is a matter for whoever knows the tickets; later nothing here is sealed.
      if (!frame || (frame->sealed && frame->kind != FrameKind::hello)) return Got::malformed;
      frame_ = *frame;
      head_have_ = 0;
      payload_have_ = 0;
      target_ = {};
      in_payload_ = true;
      return Got::header;
    }
    const std::size_t left = frame_.payload_bytes() - payload_have_;
    if (left == 0) {
      in_payload_ = false;
      return Got::frame;
    }
    if (budget == 0) return Got::nothing;
    // The rest of the payload and the header behind it in one call, when that much is there.
    std::array<iovec, 2> parts{};
    const std::size_t room = target_.empty() ? std::min(left, drain_.size()) : left;
    parts[0] = {target_.empty() ? drain_.data() : target_.data() + payload_have_, room};
    parts[1] = {head_.data(), frame_header_bytes};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = room == left ? 2 : 1;
    const ssize_t n = ::recvmsg(fd_.get(), &message, 0);
    if (n == 0) return Got::ended;
    if (n < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? Got::nothing : Got::ended;
    }
    const auto got = static_cast<std::size_t>(n);
    budget -= std::min(budget, got);
    payload_have_ += std::min(got, room);
    head_have_ = got - std::min(got, room);
  }
}

Stream::Got Stream::receive_sealed(std::size_t& budget) {
  const auto more = [this, &budget]() -> std::optional<Got> {
    if (in_begin_ > 0) {
      std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
      in_end_ -= in_begin_;
      in_begin_ = 0;
    }
    std::size_t got = 0;
    if (const auto end = fill(in_.data() + in_end_, in_.size() - in_end_, budget, got)) return end;
    in_end_ += got;
    return std::nullopt;
  };
  while (true) {
    if (!in_payload_) {
      if (head_have_ < head_.size()) {
        const std::size_t take = std::min(in_end_ - in_begin_, head_.size() - head_have_);
        std::copy_n(in_.data() + in_begin_, take, head_.data() + head_have_);
        in_begin_ += take;
        head_have_ += take;
        if (head_have_ < head_.size()) {
          if (const auto end = more()) return *end;
        }
        continue;
      }
      SealTag tag;
      std::copy_n(head_.data() + frame_header_bytes, tag.size(), tag.data());
      opener_->begin(header_of(head_));
      if (!opener_->finish(tag)) return Got::forged;
      head_have_ = 0;
      payload_have_ = 0;
      in_payload_ = true;
      const bool told = announced_;
      announced_ = false;
      if (!told) {
        const Result<Frame> frame = frame_decode(header_of(head_));
        if (!frame || !frame->sealed) return Got::malformed;
        frame_ = *frame;
        target_ = {};
      }
      if (frame_.payload_bytes() > 0) opener_->begin({});
      if (told) continue;
      return Got::header;
    }
    const std::size_t left = frame_.payload_bytes() - payload_have_;
    const std::size_t there = in_end_ - in_begin_;
    if (left > 0) {
      std::size_t take = std::min(left, there);
      if (target_.empty()) take = std::min(take, drain_.size());
      if (take < left) take = take / cipher_block_bytes * cipher_block_bytes;
      if (take == 0) {
        if (const auto end = more()) return *end;
        continue;
      }
      const MutableByteView text =
          target_.empty() ? drain_.first(take) : target_.subspan(payload_have_, take);
      opener_->update(ByteView(in_).subspan(in_begin_, take), text);
      in_begin_ += take;
      payload_have_ += take;
      continue;
    }
    if (frame_.payload_bytes() > 0) {
      if (there < seal_tag_bytes) {
        if (const auto end = more()) return *end;
        continue;
      }
      SealTag tag;
      std::copy_n(in_.data() + in_begin_, tag.size(), tag.data());
      in_begin_ += tag.size();
      if (!opener_->finish(tag)) return Got::forged;
    }
    in_payload_ = false;
    return Got::frame;
  }
}

void Stream::push(const Frame& frame, ByteView payload, std::optional<std::uint64_t> mark) {
  DI_ASSERT(payload.size() == frame.payload_bytes());
  Queued queued;
  queued.out = {frame, payload, mark};
  queued.head = frame_encode(frame);
  unsent_bytes_ += frame_header_bytes + payload.size();
  out_.push_back(std::move(queued));
}

Stream::Sent Stream::flush(std::size_t& budget) {
  return sealer_ ? flush_sealed(budget) : flush_open(budget);
}

Stream::Sent Stream::flush_open(std::size_t& budget) {
  while (!out_.empty()) {
    if (budget == 0) return Sent::some;
    std::array<iovec, send_pieces_max> parts{};
    std::size_t count = 0;
    const auto add = [&parts, &count](ByteView bytes) {
      if (bytes.empty()) return;
      parts[count++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};  // sendmsg only reads
    };
    for (const Queued& queued : out_) {
      if (count + 2 > parts.size()) break;
      add(ByteView(queued.head).subspan(queued.head_sent));
      add(queued.payload_left());
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t n = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? Sent::some : Sent::ended;
    }
    auto left = static_cast<std::size_t>(n);
    budget -= std::min(budget, left);
    unsent_bytes_ -= left;
    while (left > 0) {
      Queued& front = out_.front();
      front.begun = true;
      const std::size_t head = std::min(left, front.head.size() - front.head_sent);
      front.head_sent += head;
      left -= head;
      const std::size_t payload = std::min(left, front.payload_left().size());
      front.payload_sent += payload;
      left -= payload;
      if (front.head_sent == front.head.size() && front.payload_left().empty()) out_.pop_front();
    }
  }
  return Sent::all;
}

// Seals what fits: as many frames, or as much of one, as the buffer takes.
void Stream::stage_fill() {
  stage_begin_ = 0;
  stage_end_ = 0;
  const auto append = [this](ByteView bytes) {
    std::copy(bytes.begin(), bytes.end(), stage_.data() + stage_end_);
    stage_end_ += bytes.size();
  };
  while (!out_.empty() && stage_.size() - stage_end_ > stage_reserve + cipher_block_bytes) {
    Queued& front = out_.front();
    if (!front.begun) {
      front.begun = true;
      sealer_->begin(front.head);
      append(front.head);
      append(sealer_->finish());
      front.head_sent = front.head.size();
      unsent_bytes_ -= front.head.size();
      if (!front.out.payload.empty()) sealer_->begin({});
    }
    const ByteView left = front.payload_left();
    if (!left.empty()) {
      std::size_t take = std::min(left.size(), stage_.size() - stage_end_ - seal_tag_bytes);
      if (take < left.size()) take = take / cipher_block_bytes * cipher_block_bytes;
      sealer_->update(left.first(take), MutableByteView(stage_).subspan(stage_end_, take));
      stage_end_ += take;
      front.payload_sent += take;
      unsent_bytes_ -= take;
      if (take < left.size()) return;
    }
    if (!front.out.payload.empty()) append(sealer_->finish());
    out_.pop_front();
  }
}

Stream::Sent Stream::flush_sealed(std::size_t& budget) {
  while (true) {
    if (stage_left() == 0) {
      if (out_.empty()) return Sent::all;
      if (budget == 0) return Sent::some;
      stage_fill();
    }
    const ssize_t n = ::send(fd_.get(), stage_.data() + stage_begin_, stage_left(), MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? Sent::some : Sent::ended;
    }
    stage_begin_ += static_cast<std::size_t>(n);
    budget -= std::min(budget, static_cast<std::size_t>(n));
  }
}

void Stream::own_rest(Queued& queued) {
  const ByteView rest = queued.payload_left();
  queued.own.assign(rest.begin(), rest.end());
  queued.out.payload = queued.own;
  queued.payload_sent = 0;
  queued.out.mark.reset();
}

std::vector<std::uint64_t> Stream::release(std::uint64_t mark) {
  std::vector<std::uint64_t> removed;
  std::deque<Queued> kept;
  for (Queued& queued : out_) {
    if (queued.out.mark == mark && !queued.begun) {
      removed.push_back(queued.out.frame.number);
      unsent_bytes_ -= queued.head.size() + queued.out.payload.size();
      continue;
    }
    if (queued.out.mark == mark) own_rest(queued);
    kept.push_back(std::move(queued));
    // A vector that moves keeps its bytes where they were, so the view stays good.
  }
  out_ = std::move(kept);
  return removed;
}

void Stream::release_as(std::uint64_t mark, Code code) {
  for (Queued& queued : out_) {
    if (queued.out.mark != mark) continue;
    if (queued.begun) {
      own_rest(queued);
      continue;
    }
    unsent_bytes_ -= queued.out.payload.size();
    queued.out.payload = {};
    queued.out.mark.reset();
    queued.out.frame.code = code;
    queued.out.frame.bytes = 0;
    queued.head = frame_encode(queued.out.frame);
  }
}

}  // namespace di::transfer
