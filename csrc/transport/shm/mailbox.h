#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <utility>

#include "collectives/send_recv.h"
#include "core/link_protocol.h"
#include "host/host_arch.h"

namespace ringcomm {

/// A receive matched a message of a different size.
struct SizeMismatch {
  SendRecvOpPtr receive;
  std::uint64_t sent_bytes;
};

/// The two links between this rank and one peer, and the messages on them. Not thread-safe.
///
/// Messages of a pair arrive in order, and match the first receive posted for their source (or any)
/// and tag. One without a receive stays in the link and blocks the sender, until a receive needs a
/// later one: then it is moved off and kept, so no order of tags deadlocks.
class SendRecvMailbox {
 public:
  using Receives = std::list<SendRecvOpPtr>;

  /// `ring` notifies the peer that a slot was filled or drained.
  SendRecvMailbox(host::HostArch& arch, int peer, const LinkGeometry& to, const LinkGeometry& from,
                  std::function<void()> ring)
      : peer_(peer),
        ring_(std::move(ring)),
        arch_(arch),
        to_(arch, to, peer),
        from_(arch, from, peer),
        num_slots_(to.num_slots),
        slot_bytes_(to.slot_bytes) {}

  void post_send(const SendRecvOpPtr& op) { sends_.push_back(op); }

  /// Completes the receive with the first kept message that matches, also with one that is still
  /// arriving if it `takes_parts`; false if there is none. Throws SizeMismatch.
  bool match_kept(const SendRecvOpPtr& op, bool takes_parts) {
    const auto found = std::ranges::find_if(arrivals_, [&](const Arrival& arrival) {
      return arrival.receive == nullptr && arrival.header.tag == op->tag &&
             (takes_parts || arrival.is_complete());
    });
    if (found == arrivals_.end()) return false;
    assign(*found, op);
    if (found->is_complete()) {
      op->is_done = true;
      arrivals_.erase(found);
    }
    return true;
  }

  /// Fills free slots with pending sends, at most as many as the link has, so that a fast receiver
  /// does not keep a posting caller here. True if anything was sent.
  bool progress_sends() {
    std::byte* slot = nullptr;
    std::uint32_t num_moved = 0;
    for (; num_moved < num_slots_ && !sends_.empty() && to_.try_acquire(slot); ++num_moved) {
      SendRecvOp& op = *sends_.front();
      std::size_t room_bytes = slot_bytes_;
      if (!has_begun_sending_) {
        const MessageHeader header{.tag = op.tag, .num_bytes = op.num_bytes};
        std::memcpy(slot, &header, sizeof(header));
        slot += kHeaderBytes;
        room_bytes -= kHeaderBytes;
      }
      const std::size_t num_bytes = std::min(room_bytes, op.num_bytes - op.moved_bytes);
      arch_.copy(slot, op.data + op.moved_bytes, num_bytes);
      to_.publish();
      ring_();
      op.moved_bytes += num_bytes;
      has_begun_sending_ = op.moved_bytes < op.num_bytes;
      if (has_begun_sending_) continue;
      op.is_done = true;
      sends_.pop_front();
    }
    return num_moved > 0;
  }

  /// Drains at most as many slots while a receive needs a message from this link; a match is
  /// removed from `receives`. True if anything was received. Throws SizeMismatch.
  bool progress_receives(Receives& receives) {
    const std::byte* slot = nullptr;
    std::uint32_t num_moved = 0;
    for (; num_moved < num_slots_ && wants_more(receives) && from_.try_wait(slot); ++num_moved) {
      std::size_t available_bytes = slot_bytes_;
      if (arrivals_.empty() || arrivals_.back().is_complete()) {
        MessageHeader header;
        std::memcpy(&header, slot, sizeof(header));
        begin_arrival(header, receives);
        slot += kHeaderBytes;
        available_bytes -= kHeaderBytes;
      }
      Arrival& arrival = arrivals_.back();
      const std::size_t num_bytes =
          std::min<std::size_t>(available_bytes, arrival.header.num_bytes - arrival.moved_bytes);
      arch_.copy(arrival.data() + arrival.moved_bytes, slot, num_bytes);
      from_.release();
      ring_();
      arrival.moved_bytes += num_bytes;
      if (!arrival.is_complete()) continue;
      // A receive of any source may have come since the message began, and waits for whole ones.
      if (arrival.receive == nullptr) find_receive(arrival, receives);
      if (arrival.receive == nullptr) continue;
      arrival.receive->is_done = true;
      arrivals_.pop_back();
    }
    return num_moved > 0;
  }

 private:
  struct MessageHeader {
    std::uint64_t tag = 0;
    std::uint64_t num_bytes = 0;
  };
  // The header in a message's first slot; a whole line, so that data keeps its alignment.
  static constexpr std::size_t kHeaderBytes = 64;

  // A message that has begun to arrive: into its receive's buffer, or kept.
  struct Arrival {
    MessageHeader header;
    std::size_t moved_bytes = 0;
    SendRecvOpPtr receive = {};
    std::unique_ptr<std::byte[]> kept = {};

    bool is_complete() const { return moved_bytes == header.num_bytes; }
    std::byte* data() { return receive != nullptr ? receive->data : kept.get(); }
  };

  bool may_match(const SendRecvOp& receive) const {
    return receive.peer == peer_ || receive.peer < 0;
  }

  bool wants_more(const Receives& receives) const {
    if (!arrivals_.empty() && !arrivals_.back().is_complete() &&
        arrivals_.back().receive != nullptr)
      return true;
    return std::ranges::any_of(receives, [&](const SendRecvOpPtr& op) { return may_match(*op); });
  }

  void begin_arrival(const MessageHeader& header, Receives& receives) {
    arrivals_.push_back({.header = header});
    Arrival& arrival = arrivals_.back();
    find_receive(arrival, receives);
    if (arrival.receive == nullptr)
      arrival.kept = std::make_unique_for_overwrite<std::byte[]>(header.num_bytes);
  }

  void find_receive(Arrival& arrival, Receives& receives) const {
    const MessageHeader& header = arrival.header;
    const auto found = std::ranges::find_if(
        receives, [&](const SendRecvOpPtr& op) { return may_match(*op) && op->tag == header.tag; });
    if (found == receives.end()) return;
    const SendRecvOpPtr op = *found;
    receives.erase(found);
    assign(arrival, op);
  }

  void assign(Arrival& arrival, const SendRecvOpPtr& op) const {
    op->peer = peer_;
    if (!op->takes(arrival.header.num_bytes)) throw SizeMismatch{op, arrival.header.num_bytes};
    if (arrival.moved_bytes > 0) std::memcpy(op->data, arrival.kept.get(), arrival.moved_bytes);
    arrival.receive = op;
    arrival.kept = nullptr;
  }

  int peer_;
  std::function<void()> ring_;  // after every slot: the peer copies it during the next
  host::HostArch& arch_;
  SendLink<host::HostArch> to_;
  RecvLink<host::HostArch> from_;
  std::uint32_t num_slots_;
  std::size_t slot_bytes_;
  std::deque<SendRecvOpPtr> sends_;
  bool has_begun_sending_ = false;  // the first of sends_
  std::list<Arrival> arrivals_;     // in the order of sending; only the last may be incomplete
};

}  // namespace ringcomm
