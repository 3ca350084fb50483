#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/arch.h"
#include "core/packet_protocol.h"
#include "cuda/kernels/memory.h"
#include "cuda/kernels/staging.h"

namespace ringcomm::cuda {

/// How far a channel of messages has come.
struct ChannelState {
  std::uint64_t done_bytes;  ///< of its message
  std::uint32_t message;
  std::uint32_t num_long;  ///< of the messages before
  std::uint32_t can_go_on;
};

/// What the threads of a block share besides: the buffers of a reduction, or the state of channels.
struct Tables {
  const std::byte* sources[kMaxRanks];
  std::byte* outputs[kMaxRanks];
  int num_outputs;
  ChannelState channels[2 * kMaxRanks];
};

/// A block of threads that runs collectives: the Arch of core, and this. Kernels run on GPUs
/// (gpu_block.cuh) and, in tests, on host threads.
///
/// - sync is the barrier of the block's threads.
/// - agree is a barrier that returns the same value to all threads: kNone if all threads pass
///   kNone, or else another WaitStatus, with awaited_peer() of a thread that passed it.
/// - tables is memory of the block, the same for all of its threads.
/// - store_packet and load_packet move the two words of a Packet, each atomically, in no order.
/// - claim sets a word of device memory to 1, and tells whether it was 0; unclaim sets it to 0.
/// - publish_word makes a word of the control block, and all that this thread wrote before, visible
///   to the host.
/// - awaited_peer is the rank of the first stopped() that told to stop, or of record_awaited().
template <class B>
concept Block = Arch<B> && requires(B block, Packet& packet, const Packet& there,
                                    std::uint64_t& word, std::uint32_t& flag) {
  { block.thread_idx() } -> std::same_as<unsigned>;
  { block.num_threads() } -> std::same_as<unsigned>;
  { block.block_idx() } -> std::same_as<unsigned>;
  { block.num_blocks() } -> std::same_as<unsigned>;
  block.sync();
  { block.agree(WaitStatus{}) } -> std::same_as<WaitStatus>;
  { block.tables() } -> std::same_as<Tables&>;
  block.store_packet(packet, std::uint64_t{}, std::uint64_t{});
  block.load_packet(there, word, word);
  { block.claim(flag) } -> std::same_as<bool>;
  block.unclaim(flag);
  block.publish_word(flag, std::uint32_t{});
  { block.awaited_peer() } -> std::same_as<int>;
  block.record_awaited(int{});
};

/// The wait of a block's thread, its look_until(). It does not sleep, and each acquire has a price:
/// on a GPU it empties L1. An acquire follows the relaxed look that found the value.
template <class B>
RINGCOMM_HD WaitStatus look_until_at_least(B& block, const Cursor& cursor, std::uint64_t target,
                                           int peer) {
  for (;; block.pause()) {
    const WaitStatus stop = block.stopped(peer);
    // After the reason to stop: a peer may publish and then die or leave.
    if (block.load_relaxed(cursor.value) >= target && block.load_acquire(cursor.value) >= target)
      return WaitStatus::kNone;
    if (stop != WaitStatus::kNone) return stop;
  }
}

}  // namespace ringcomm::cuda
