#pragma once

#include "core/link_protocol.h"
#include "cuda/kernels/plain.h"
#include "cuda/kernels/rendezvous.h"

// Sends and receives, by links: FIFOs of slots in the receiver's staging. Messages of a pair arrive
// in the order in which they were sent.
//
// A message that fits a slot is copied there and from there. Of a longer one the sender announces
// the place, if its peers have mapped it; the receiver's next kernel copies it, and the last one
// says so, for which the sender waits. If it is not mapped, it goes by slots, too.
//
// All messages of a batch run in one kernel, whose blocks go on with whatever channel can: kernels
// for each might run one after the other, and two ranks that both send first would deadlock.

namespace ringcomm::cuda {

template <Block B>
class Exchange {
 public:
  RINGCOMM_HD Exchange(B& block, const P2pCall& call) : block_(block), call_(call) {}

  /// Announces and awaits all messages, and copies those that go by slots.
  RINGCOMM_HD WaitStatus open() {
    WaitStatus stop = claim_all();
    if (stop != WaitStatus::kNone) return stop;
    deal(block_, num_channels(), [&](int i) {
      ChannelState& channel = channel_at(i);
      channel.done_bytes = 0;
      channel.message = call_.first_of_channel[channel_idx(i)];
      channel.num_long = 0;
    });
    for (bool has_more = true; has_more;) {
      block_.sync();
      if (stop = look_at_channels(); stop != WaitStatus::kNone) return stop;
      has_more = false;
      RINGCOMM_ROLLED
      for (int i = 0; i < num_channels(); ++i) {
        // All threads have read it when one writes: handing a slot over has a barrier.
        const ChannelState channel = channel_at(i);
        if (channel.can_go_on != 0)
          if (stop = go_on(i, channel); stop != WaitStatus::kNone) return stop;
        has_more = has_more || channel.message < end_of(i);
      }
    }
    set_open(1);
    if (!call_.has_long) end_claims();
    return WaitStatus::kNone;
  }

  /// Tells senders that their messages have been read where they are, and waits for receivers.
  RINGCOMM_HD WaitStatus close() {
    if (num_channels() == 0) return WaitStatus::kNone;
    if (is_open(last_of(0)) == 0) return WaitStatus::kAborted;
    RINGCOMM_ROLLED
    for (int i = 0; i < num_channels(); ++i) {
      if (last_of(i).is_send) continue;
      LinkWords& mine = words(last_of(i));
      const std::uint64_t all = mine.num_found;
      if (all == mine.num_read) continue;
      // Threads read before the barrier of the publication, and one writes after it.
      advance(block_, call_.staging.link_words(call_.use, last_of(i).peer, call_.rank).read, all);
      if (block_.thread_idx() == 0) mine.num_read = all;
    }
    const WaitStatus stop = block_.each(num_channels(), [&](int i) {
      const LinkWords& mine = words(last_of(i));
      if (!last_of(i).is_send) return WaitStatus::kNone;
      return block_.look_until(mine.read, mine.num_announced, last_of(i).peer);
    });
    if (stop == WaitStatus::kNone) end_claims();
    return stop;
  }

  /// After a failure the claims stay: a later kernel must not send its message as the rest of this
  /// one. The kernels after this one copy nothing.
  RINGCOMM_HD void abort() {
    set_open(0);
    deal(block_, num_channels(), [&](int i) {
      if (last_of(i).is_send) return;
      for (const std::byte*& source : words(last_of(i)).sources) source = nullptr;
    });
  }

 private:
  // The channels of this block: with each send the receive from the same peer, if that follows.
  RINGCOMM_HD int num_channels() const {
    const std::uint32_t num_pairs = (call_.num_channels + 1) / 2;
    const unsigned first = block_.block_idx(), stride = block_.num_blocks();
    if (first >= num_pairs) return 0;
    const unsigned last = first + (num_pairs - 1 - first) / stride * stride;
    const unsigned num = ((last - first) / stride + 1) * 2;
    return static_cast<int>(last * 2 + 1 < call_.num_channels ? num : num - 1);
  }
  RINGCOMM_HD int channel_idx(int i) const {
    const auto pair = block_.block_idx() + static_cast<unsigned>(i / 2) * block_.num_blocks();
    return static_cast<int>(2 * pair) + i % 2;
  }
  RINGCOMM_HD ChannelState& channel_at(int i) const { return block_.tables().channels[i]; }
  RINGCOMM_HD std::uint32_t end_of(int i) const {
    return call_.first_of_channel[channel_idx(i) + 1];
  }
  RINGCOMM_HD const P2pMessage& last_of(int i) const { return call_.messages[end_of(i) - 1]; }
  RINGCOMM_HD LinkWords& words(const P2pMessage& message) const {
    return call_.staging.link_words(call_.use, call_.rank, message.peer);
  }
  RINGCOMM_HD LinkGeometry geometry(const P2pMessage& message) const {
    return message.is_send ? call_.staging.link(call_.use, call_.rank, message.peer)
                           : call_.staging.link(call_.use, message.peer, call_.rank);
  }
  RINGCOMM_HD std::uint32_t& is_open(const P2pMessage& message) const {
    return words(message).is_open[message.is_send ? 1 : 0];
  }
  RINGCOMM_HD void set_open(std::uint32_t value) {
    deal(block_, num_channels(), [&](int i) { is_open(last_of(i)) = value; });
  }

  RINGCOMM_HD WaitStatus claim_all() {
    WaitStatus stop = WaitStatus::kNone;
    deal(block_, num_channels(), [&](int i) {
      if (!block_.claim(words(last_of(i)).is_used[last_of(i).is_send ? 1 : 0])) {
        tell_alone(block_, call_, kOverlap, call_.rank, NoWords());
        stop = WaitStatus::kAborted;
      }
    });
    return block_.agree(stop);
  }
  RINGCOMM_HD void end_claims() {
    block_.sync();
    deal(block_, num_channels(),
         [&](int i) { block_.unclaim(words(last_of(i)).is_used[last_of(i).is_send ? 1 : 0]); });
  }

  /// Sets can_go_on of each channel.
  RINGCOMM_HD WaitStatus look_at_channels() {
    WaitStatus stop = WaitStatus::kNone;
    deal(block_, num_channels(), [&](int i) {
      ChannelState& channel = channel_at(i);
      const bool is_over = channel.message == end_of(i);
      bool can = false;
      if (!is_over) {
        const P2pMessage& message = call_.messages[channel.message];
        const LinkGeometry link = geometry(message);
        const std::uint64_t tail = block_.load_acquire(link.tail->value);
        const std::uint64_t head = block_.load_acquire(link.head->value);
        can = message.is_send ? tail - head < link.num_slots : tail > head;
        // What is received replaces what is sent to the same peer.
        if (call_.is_in_place && !message.is_send && i > 0)
          can = can && (channel_at(i - 1).message == end_of(i - 1) ||
                        channel_at(i - 1).done_bytes > channel.done_bytes);
        if (!can) {
          stop = block_.stopped(message.peer);
          block_.pause();
        }
      }
      channel.can_go_on = can ? 1 : 0;
    });
    return block_.agree(stop);
  }

  RINGCOMM_HD WaitStatus go_on(int i, const ChannelState& channel) {
    const P2pMessage& message = call_.messages[channel.message];
    const std::uint64_t left = message.num_bytes - channel.done_bytes;
    const auto num_bytes =
        static_cast<std::uint32_t>(left < call_.slot_bytes() ? left : call_.slot_bytes());
    bool is_over = num_bytes == left;
    if (message.is_send) {
      is_over = send_slot(message, channel.done_bytes, num_bytes) || is_over;
    } else {
      bool is_announced = false;
      const WaitStatus stop = recv_slot(message, channel, num_bytes, is_announced);
      if (stop != WaitStatus::kNone) return stop;
      is_over = is_over || is_announced;
    }
    const std::uint32_t num_over = is_over ? 1 : 0;
    if (block_.thread_idx() == 0)
      channel_at(i) = {is_over ? 0 : channel.done_bytes + num_bytes, channel.message + num_over,
                       channel.num_long + (call_.is_long(message) ? num_over : 0), 0};
    return WaitStatus::kNone;
  }

  /// Whether the whole message is announced.
  RINGCOMM_HD bool send_slot(const P2pMessage& message, std::uint64_t done_bytes,
                             std::uint32_t num_bytes) {
    SendLink<B> link(block_, geometry(message), message.peer);
    std::byte* slot = nullptr;
    link.try_acquire(slot);
    const bool is_announced = message.place != 0 && call_.is_long(message);
    if (block_.thread_idx() == 0) {
      *reinterpret_cast<Letter*>(slot) = {message.num_bytes, message.tag,
                                          is_announced ? message.place : 0, 0};
      words(message).num_announced += is_announced ? 1 : 0;
    }
    if (!is_announced)
      copy_by_threads<Cached::kNo, Cached::kYes>(block_, slot + sizeof(Letter),
                                                 message.data + done_bytes, num_bytes);
    link.publish();
    return is_announced;
  }
  RINGCOMM_HD WaitStatus recv_slot(const P2pMessage& message, const ChannelState& channel,
                                   std::uint32_t num_bytes, bool& is_announced) {
    RecvLink<B> link(block_, geometry(message), message.peer);
    const std::byte* slot = nullptr;
    link.try_wait(slot);
    const Letter letter = *reinterpret_cast<const Letter*>(slot);
    if (letter.num_bytes != message.num_bytes || letter.tag != message.tag) {
      tell(block_, call_, call_.use == LinkUse::kShards ? kShardDiffers : kP2pDiffers, message.peer,
           [&](int i) {
             const std::uint64_t bytes = i < 2 ? letter.num_bytes : message.num_bytes;
             return i < 4 ? static_cast<std::uint32_t>(bytes >> (i % 2 * 32))
                          : static_cast<std::uint32_t>(i == 4 ? letter.tag : 0);
           });
      return WaitStatus::kAborted;
    }
    is_announced = letter.place != 0;
    if (block_.thread_idx() == 0 && call_.is_long(message)) {
      words(message).sources[channel.num_long] =
          is_announced ? call_.find(letter.place, message.peer) : nullptr;
      words(message).num_found += is_announced ? 1 : 0;
    }
    if (!is_announced)
      copy_by_threads<Cached::kYes, Cached::kNo>(block_, message.data + channel.done_bytes,
                                                 slot + sizeof(Letter), num_bytes);
    link.release();
    return WaitStatus::kNone;
  }

  B& block_;
  const P2pCall& call_;
};

template <Block B>
RINGCOMM_HD void open_messages(B& block, const P2pCall& call) {
  Exchange<B> exchange(block, call);
  const WaitStatus stop = exchange.open();
  if (stop != WaitStatus::kNone) exchange.abort();
  finish(block, call, stop);
}

template <Block B>
RINGCOMM_HD void close_messages(B& block, const P2pCall& call) {
  finish(block, call, Exchange<B>(block, call).close());
}

}  // namespace ringcomm::cuda
