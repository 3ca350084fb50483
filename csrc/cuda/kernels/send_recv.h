#pragma once

#include "core/chunk_layout.h"
#include "core/link_protocol.h"
#include "cuda/kernels/memory.h"
#include "cuda/kernels/phases.h"

// Sends and receives: slices of a message go through the channels of a pair of ranks, which are
// links in the receiver's staging. Messages of a pair arrive in the order in which they were sent.
//
// All messages of a batch run in one kernel, each lane in its own blocks: separate kernels might
// run one after the other, and two ranks that both send first would deadlock. The ends of a lane
// may have different numbers of blocks. Every block handles messages, and a message's channels, in
// order, so the first unfinished one on either end never waits for a later one.

namespace ringcomm::cuda {

struct alignas(16) P2pHeader {
  std::uint64_t num_bytes;  ///< of the whole message
  std::int64_t tag;
};

/// The slices of a message, distributed round-robin over its channels. An empty message has one.
struct P2pSlices {
  std::uint32_t slice_bytes;
  std::uint32_t num;
  unsigned num_channels;
  RINGCOMM_HD P2pSlices(const StagingLayout& layout, std::uint64_t num_bytes)
      : slice_bytes(layout.p2p_slot_bytes - sizeof(P2pHeader)),
        num(num_bytes == 0 ? 1 : static_cast<std::uint32_t>(num_slices(num_bytes, slice_bytes))),
        num_channels(num < layout.num_p2p_channels ? num : layout.num_p2p_channels) {}
};

template <Block B>
RINGCOMM_HD WaitStatus send_channel(B& block, const P2pCall& call, const P2pMessage& message,
                                    const P2pSlices& slices, unsigned channel) {
  SendLink<B> link(block, call.staging.p2p_link(call.rank, message.peer, channel), message.peer);
  for (std::uint32_t i = channel; i < slices.num; i += slices.num_channels) {
    std::byte* slot = nullptr;
    if (const WaitStatus stop = link.acquire(slot); stop != WaitStatus::kNone) return stop;
    if (block.thread_idx() == 0)
      *reinterpret_cast<P2pHeader*>(slot) = {message.num_bytes, message.tag};
    const ElemRange bytes = slice_of({0, message.num_bytes}, i, slices.slice_bytes);
    copy_by_block<Cached::kNo, Cached::kYes>(block, slot + sizeof(P2pHeader),
                                             message.data + bytes.begin_elems, bytes.num_elems);
    link.publish();
  }
  return WaitStatus::kNone;
}

template <Block B>
RINGCOMM_HD WaitStatus recv_channel(B& block, const P2pCall& call, const P2pMessage& message,
                                    const P2pSlices& slices, unsigned channel) {
  RecvLink<B> link(block, call.staging.p2p_link(message.peer, call.rank, channel), message.peer);
  for (std::uint32_t i = channel; i < slices.num; i += slices.num_channels) {
    const std::byte* slot = nullptr;
    if (const WaitStatus stop = link.wait(slot); stop != WaitStatus::kNone) return stop;
    const P2pHeader theirs = *reinterpret_cast<const P2pHeader*>(slot);
    if (theirs.num_bytes != message.num_bytes || theirs.tag != message.tag) {
      tell(block, call, kP2pDiffers, message.peer,
           FewWords{theirs.num_bytes, static_cast<std::uint32_t>(theirs.tag)});
      return WaitStatus::kAborted;
    }
    const ElemRange bytes = slice_of({0, message.num_bytes}, i, slices.slice_bytes);
    copy_by_block<Cached::kYes, Cached::kNo>(block, message.data + bytes.begin_elems,
                                             slot + sizeof(P2pHeader), bytes.num_elems);
    link.release();
  }
  return WaitStatus::kNone;
}

template <Block B>
RINGCOMM_HD WaitStatus exchange_lane(B& block, const P2pCall& call) {
  const unsigned lane = block.block_idx() / call.blocks_per_lane;
  const unsigned first_channel = block.block_idx() % call.blocks_per_lane;
  RINGCOMM_ROLLED
  for (unsigned m = call.first_of_lane[lane]; m < call.first_of_lane[lane + 1]; ++m) {
    const P2pMessage& message = call.messages[m];
    const P2pSlices slices(call.staging.layout, message.num_bytes);
    RINGCOMM_ROLLED
    for (unsigned channel = first_channel; channel < slices.num_channels;
         channel += call.blocks_per_lane) {
      // The barrier at the claim's end shows all threads what one has published for the channel's
      // last message. After a failure the claim stays: a later kernel must not send its message as
      // the rest of this one.
      std::uint32_t& busy = call.staging.word_at(
          call.rank, call.staging.layout.busy_p2p_offset(static_cast<std::uint32_t>(message.peer),
                                                         message.is_send, channel));
      const Claim<B> claim(block, busy);
      WaitStatus stop =
          block.agree(claim.check(block, call) ? WaitStatus::kNone : WaitStatus::kAborted);
      if (stop == WaitStatus::kNone)
        stop = message.is_send ? send_channel(block, call, message, slices, channel)
                               : recv_channel(block, call, message, slices, channel);
      if (stop != WaitStatus::kNone) return stop;
      claim.end(block, busy);
    }
  }
  return WaitStatus::kNone;
}

template <Block B>
RINGCOMM_HD void exchange_messages(B& block, const P2pCall& call) {
  finish(block, call, exchange_lane(block, call));
}

}  // namespace ringcomm::cuda
