#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/arch.h"
#include "core/packet_protocol.h"
#include "core/arch.h"
#include "cuda/kernels/memory.h"
#include "cuda/kernels/staging.h"

namespace ringcomm::cuda {

/// The copies, sources and outputs of one step. `Tables` has those of two: a step's tables are
/// written while those of the previous step are read, with the barrier of a publication between
/// writing and reading.
struct StepTables {
  Copy staged[kMaxRanks];
  Copy taken[kMaxRanks];
  const std::byte* sources[kMaxRanks];
  std::byte* outputs[kMaxRanks];
  int num_outputs;
};
/// Whether the ranks have lent their buffers to a call. All ranks see the same headers, so all
/// make the same decision.
enum class Lending : std::uint8_t {
  kUnknown,  ///< the call's first phase, which has the headers, is not complete yet
  kNone,
  kSome,
  kAll
};

/// The local addresses of the buffers that each rank has lent to this one; see PhaseHeader.
struct LentTables {
  Lending lending;
  const std::byte* inputs[kMaxRanks];
  std::byte* outputs[kMaxRanks];
};
struct Tables {
  StepTables of_steps[2];
  LentTables lent;
  RINGCOMM_HD StepTables& of(std::uint32_t step) { return of_steps[step % 2]; }
};

/// The interface of a block of threads that runs collectives, in addition to the Arch of core.
/// Kernels are written against it, and run on GPUs (gpu_block.cuh) and, in tests, on host threads.
///
/// - thread_idx, num_threads, block_idx, num_blocks: where this thread is.
/// - sync is the barrier of the block's threads.
/// - agree is a barrier that returns the same value to all threads: kNone if all threads pass
///   kNone, or else one of the other Stops, with awaited_peer() of the thread that passed it.
/// - tables is memory of the block, the same for all of its threads.
/// - store_packet and load_packet move the two words of a Packet, each atomically, in no order.
/// - claim sets a word of device memory to 1, and tells whether it was 0; unclaim sets it to 0
///   again; publish_word makes one of the control block, and all that this thread wrote before,
///   visible to the host.
/// - awaited_peer is the rank of the last stopped() or note_awaited().
template <class B>
concept Block = Arch<B> && requires(B block, Packet& packet, const Packet& there,
                                    std::uint64_t& word, std::uint32_t& flag) {
  { block.thread_idx() } -> std::same_as<unsigned>;
  { block.num_threads() } -> std::same_as<unsigned>;
  { block.block_idx() } -> std::same_as<unsigned>;
  { block.num_blocks() } -> std::same_as<unsigned>;
  block.sync();
  { block.agree(Stop{}) } -> std::same_as<Stop>;
  { block.tables() } -> std::same_as<Tables&>;
  block.store_packet(packet, std::uint64_t{}, std::uint64_t{});
  block.load_packet(there, word, word);
  { block.claim(flag) } -> std::same_as<bool>;
  block.unclaim(flag);
  block.publish_word(flag, std::uint32_t{});
  { block.awaited_peer() } -> std::same_as<int>;
  block.note_awaited(int{});
};

}  // namespace ringcomm::cuda
