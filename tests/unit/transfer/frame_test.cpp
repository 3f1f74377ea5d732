#include "transfer/frame.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "transfer/address.h"
#include "transfer/copy.h"
#include "transfer/exposure.h"

namespace di::transfer {
namespace {

Frame example() {
  Frame frame;
  frame.kind = FrameKind::write;
  frame.sealed = true;
  frame.number = 0x0102030405060708;
  frame.transfer = 0x1112131415161718;
  frame.slot = {0x21222324, 0x31323334};
  frame.offset = 0x4142434445464748;
  frame.bytes = 0x515253;
  return frame;
}

TEST(FrameTest, header_is_these_bytes) {
  EXPECT_EQ(to_hex(frame_encode(example())),
            "444944300100030136a2414f0000000008070605040302011817161514131211"
            "2423222134333231484746454443424153525100000000000000000000000000");
  const auto back = frame_decode(frame_encode(example()));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(*back, example());
}

TEST(FrameTest, any_flipped_bit_is_refused) {
  for (std::size_t bit = 0; bit < frame_header_bytes * 8; ++bit) {
    FrameHeader header = frame_encode(example());
    header[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    EXPECT_FALSE(frame_decode(header).ok()) << bit;
  }
}

TEST(FrameTest, nonsense_with_a_right_checksum_is_refused) {
  Frame frame = example();
  frame.bytes = frame_payload_bytes_max + 1;
  EXPECT_FALSE(frame_decode(frame_encode(frame)).ok());
  frame = example();
  frame.kind = static_cast<FrameKind>(7);
  EXPECT_FALSE(frame_decode(frame_encode(frame)).ok());
  frame = example();
  frame.code = static_cast<Code>(400);
  EXPECT_FALSE(frame_decode(frame_encode(frame)).ok());
}

TEST(FrameTest, hello_carries_the_ticket) {
  TicketSecret secret{};
  for (std::size_t i = 0; i < secret.size(); ++i) secret[i] = static_cast<std::uint8_t>(200 + i);
  EXPECT_EQ(frame_ticket(*frame_decode(frame_encode(frame_hello(secret, false)))), secret);
}

TEST(FrameTest, peer_comes_back_and_nobody_is_refused) {
  const Peer peer{"di-kvd.host0", 77};
  EXPECT_EQ(*peer_decode(peer_encode(peer)), peer);
  EXPECT_FALSE(peer_decode(Bytes(4)).ok());
  EXPECT_FALSE(peer_decode(Bytes(hello_payload_bytes_max + 1)).ok());
}

TEST(AddressTest, numeric_addresses_only) {
  for (const char* text : {"127.0.0.1:80", "tcp://127.0.0.1:0", "[::1]:7000", "*:1", ":65535"}) {
    EXPECT_TRUE(address_parse(text).ok()) << text;
  }
  EXPECT_EQ(address_print(*address_parse("tcp://10.1.2.3:7400")), "10.1.2.3:7400");
  EXPECT_EQ(address_print(*address_parse("[fe80::1]:1")), "[fe80::1]:1");
  for (const char* text : {"", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "host.example:80",
                           "::1:80", "tcp://", "1.2.3.4.5:6", "127.0.0.1:-1", "127.0.0.1:0000080"}) {
    EXPECT_FALSE(address_parse(text).ok()) << text;
  }
}

TEST(TicketsTest, each_is_good_once_and_for_a_while) {
  Tickets tickets;
  Ticket ticket;
  ticket.secret[0] = 1;
  tickets.add({"a", 1}, ticket, Instant{100});
  EXPECT_TRUE(tickets.use(ticket.secret, Instant{99}).has_value());
  EXPECT_FALSE(tickets.use(ticket.secret, Instant{99}).has_value());
  tickets.add({"a", 1}, ticket, Instant{100});
  EXPECT_FALSE(tickets.use(ticket.secret, Instant{100}).has_value());
  EXPECT_EQ(tickets.expire(Instant{99}), 0u);
  EXPECT_EQ(tickets.expire(Instant{100}), 1u);
  tickets.add({"a", 1}, ticket, Instant{100});
  EXPECT_EQ(tickets.forget({"a", 2}), 0u);
  EXPECT_EQ(tickets.forget({"a", 1}), 1u);
  EXPECT_EQ(tickets.count(), 0u);
}

TEST(DialPauseTest, doubles_up_to_the_longest) {
  const auto pause = [](unsigned failures) { return dial_pause(failures, dial_pause_min, dial_pause_max); };
  EXPECT_EQ(pause(1), milliseconds(200));
  EXPECT_EQ(pause(2), milliseconds(400));
  EXPECT_EQ(pause(6), milliseconds(6400));
  EXPECT_EQ(pause(7), seconds(10));
  EXPECT_EQ(pause(4000000000), seconds(10));
}

TEST(CopyTest, every_length_and_alignment) {
  Rng rng(3);
  Bytes from(300000);
  for (std::byte& each : from) each = static_cast<std::byte>(rng.next());
  for (const std::size_t bytes : {0u, 1u, 63u, 65535u, 65536u, 65537u, 200001u}) {
    for (const std::size_t skew : {0u, 1u, 17u, 63u}) {
      Bytes to(bytes + 200, std::byte{0});
      copy_streaming(MutableByteView(to).subspan(skew, bytes), ByteView(from).subspan(skew * 3, bytes));
      EXPECT_TRUE(std::equal(to.begin() + static_cast<std::ptrdiff_t>(skew),
                             to.begin() + static_cast<std::ptrdiff_t>(skew + bytes),
                             from.begin() + static_cast<std::ptrdiff_t>(skew * 3)));
      EXPECT_EQ(to[skew + bytes], std::byte{0});
      if (skew > 0) {
        EXPECT_EQ(to[skew - 1], std::byte{0});
      }
    }
  }
}

}  // namespace
}  // namespace di::transfer
