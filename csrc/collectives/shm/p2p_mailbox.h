#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <utility>

#include "collectives/p2p.h"
#include "core/link_protocol.h"
#include "transport/shm/host_arch.h"

namespace ringcomm {

/// The receives of a rank that no message has matched yet, in the order in which they were posted.
using P2pReceives = std::list<P2pOpPtr>;

/// The two links between this rank and one peer, and the messages on them. Not thread-safe.
///
/// Messages of a pair arrive in the order in which they were sent, and match the first receive
/// posted for their source (or any source) and tag. A message without a matching receive stays in
/// the link, which blocks the sender. As soon as a receive needs a later message of that source, it
/// is moved off the link and kept, so no order of tags deadlocks.
class P2pMailbox {
 public:
  using Arch = shm::HostArch;

  /// A receive matched a message of a different size.
  struct SizeMismatch {
    P2pOpPtr receive;
    std::uint64_t sent_bytes;
  };

  /// `ring` tells the peer that a slot was filled or drained.
  P2pMailbox(Arch& arch, int peer, const LinkGeometry& to, const LinkGeometry& from,
             std::function<void()> ring)
      : peer_(peer),
        ring_(std::move(ring)),
        arch_(arch),
        to_(arch, to, peer),
        from_(arch, from, peer),
        num_slots_(to.num_slots),
        slot_bytes_(to.slot_bytes) {}

  void post_send(const P2pOpPtr& op) { sends_.push_back(op); }
  /// Completes the receive with the first kept message that matches; false if there is none. Throws
  /// SizeMismatch.
  bool match_kept(const P2pOpPtr& op);

  /// Fills free slots with pending sends, at most as many as the link has, so that a fast receiver
  /// does not keep a posting caller here. True if anything was sent.
  bool progress_sends();
  /// Drains at most as many slots while a receive needs a message from this link; a match is
  /// removed from `receives`. True if anything was received. Throws SizeMismatch.
  bool progress_receives(P2pReceives& receives);

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
    P2pOpPtr receive = {};
    std::unique_ptr<std::byte[]> kept = {};

    bool is_complete() const { return moved_bytes == header.num_bytes; }
    std::byte* data() { return receive != nullptr ? receive->data : kept.get(); }
  };

  bool wants_more(const P2pReceives& receives) const;
  void begin_arrival(const MessageHeader& header, P2pReceives& receives);
  void assign(Arrival& arrival, const P2pOpPtr& op) const;

  int peer_;
  std::function<void()>
      ring_;  // after every slot: the peer copies one while this rank does the next
  Arch& arch_;
  SendLink<Arch> to_;
  RecvLink<Arch> from_;
  std::uint32_t num_slots_;
  std::size_t slot_bytes_;
  std::deque<P2pOpPtr> sends_;
  bool has_begun_sending_ = false;  // the first of sends_
  std::list<Arrival> arrivals_;     // in the order of sending; only the last may be incomplete
};

}  // namespace ringcomm
