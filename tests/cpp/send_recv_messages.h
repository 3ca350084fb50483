#pragma once

// Sends and receives of one rank. The content of a message identifies its sender, tag and number.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "communicator/communicator.h"
#include "host/group.h"
#include "thread_ranks.h"

namespace ringcomm::testing {

inline constexpr std::size_t kSendRecvSlotBytes = host::SegmentConfig{}.send_recv_slot_bytes;
inline constexpr std::size_t kSendRecvHeaderBytes = 64;
/// The bytes of one message that a link holds before the receiver drains it.
inline constexpr std::size_t kSendRecvLinkBytes =
    host::SegmentConfig{}.send_recv_num_slots * kSendRecvSlotBytes - kSendRecvHeaderBytes;

using Bytes = std::vector<std::byte>;

/// The content of message `turn` with `tag` from `source`.
inline Bytes message(int source, std::uint64_t tag, std::uint64_t turn, std::size_t num_bytes) {
  Bytes bytes(num_bytes);
  std::uint64_t state = static_cast<std::uint64_t>(source) * 1'000'003 + tag * 10'007 + turn;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

/// An operation and its buffer.
struct Message {
  Bytes bytes;
  SendRecvOpPtr op;
};

inline Message post(Communicator& communicator, OpKind kind, int peer, std::uint64_t tag,
                    Bytes bytes, std::chrono::milliseconds timeout = kBound,
                    std::function<void()> done = {}) {
  Message posted{.bytes = std::move(bytes), .op = std::make_shared<SendRecvOp>()};
  posted.op->kind = kind;
  posted.op->peer = peer;
  posted.op->tag = tag;
  posted.op->data = posted.bytes.data();
  posted.op->num_bytes = posted.bytes.size();
  posted.op->timeout = timeout;
  posted.op->done = std::move(done);
  communicator.send_recv()->post(posted.op);
  return posted;
}

inline Message post_send(Communicator& communicator, int peer, std::uint64_t tag, Bytes bytes,
                         std::chrono::milliseconds timeout = kBound,
                         std::function<void()> done = {}) {
  return post(communicator, OpKind::kSend, peer, tag, std::move(bytes), timeout, std::move(done));
}

/// The buffer starts as 0xee.
inline Message post_recv(Communicator& communicator, int peer, std::uint64_t tag,
                         std::size_t num_bytes, std::chrono::milliseconds timeout = kBound,
                         std::function<void()> done = {}) {
  return post(communicator, OpKind::kRecv, peer, tag, Bytes(num_bytes, std::byte{0xee}), timeout,
              std::move(done));
}

inline bool is_done(Communicator& communicator, const Message& message) {
  return communicator.send_recv()->wait(message.op, SendRecv::Clock::now(), {});
}

/// Waits until it is done, and throws its error if it has one.
inline void finish(Communicator& communicator, const Message& posted) {
  const auto deadline = SendRecv::Clock::now() + kBound;
  expect(communicator.send_recv()->wait(posted.op, deadline, {}), "an operation done in time");
  if (posted.op->error != nullptr) std::rethrow_exception(posted.op->error);
}

inline void expect_message(const Message& received, int source, std::uint64_t tag,
                           std::uint64_t turn) {
  expect(received.bytes == message(source, tag, turn, received.bytes.size()),
         "message " + std::to_string(turn) + " with tag " + std::to_string(tag) + " from rank " +
             std::to_string(source));
}

inline void send_and_finish(Communicator& communicator, int peer, std::uint64_t tag,
                            std::uint64_t turn, std::size_t num_bytes) {
  finish(communicator,
         post_send(communicator, peer, tag, message(communicator.rank(), tag, turn, num_bytes)));
}

inline void recv_and_check(Communicator& communicator, int peer, std::uint64_t tag,
                           std::uint64_t turn, std::size_t num_bytes) {
  const Message received = post_recv(communicator, peer, tag, num_bytes);
  finish(communicator, received);
  expect_message(received, peer, tag, turn);
}

}  // namespace ringcomm::testing
