#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/call.h"
#include "cuda/kernels/call.h"

namespace ringcomm::cuda {

using HeaderWords = std::array<std::uint32_t, kHeaderWords>;

/// A header without the call's number, which a replayed graph cannot change.
HeaderWords to_words(const CallHeader& header);
/// As kernels compare it: without sizes that other ranks need not know, and with a digest of those
/// of uneven shards.
HeaderWords compared_words(const Collective& call, int world_size);
CallHeader from_words(const std::uint32_t* words);

/// How a call runs.
enum class LaunchKind : std::uint8_t {
  kPackets,  ///< one kernel
  kInPlace,  ///< a rendezvous, a kernel that waits for nobody, a rendezvous
  kRing,     ///< the same, with a kernel of links
  kShards    ///< messages: shards whose sizes only two ranks know
};

/// The launch of a call; the same on all ranks.
struct LaunchPlan {
  LaunchKind kind = LaunchKind::kInPlace;
  std::string kernel;
  unsigned num_blocks = 1;
  Traffic traffic = {};
  // In place. Where some rank stages, a launch has a piece of each rank's part.
  std::uint64_t piece_size = 0;  ///< in elements, or bytes of a move
  unsigned num_pieces = 1;
  // In scratch memory: a piece of each rank's part. Moves and a reduce have one of all ranks. The
  // outputs of an all_reduce take its inputs' place.
  std::uint64_t input_stride = 0, output_stride = 0, outputs_offset = 0;
};

/// Sets the algorithm.
void plan_algorithm(const CommunicatorOptions& options, const StagingLayout& layout,
                    Collective& call);

/// Sets all of `kernel_call` but its GroupFrame, which must be set, and its places. Throws
/// std::invalid_argument if there is no kernel.
LaunchPlan plan_launch(const Collective& call, int num_multiprocessors, KernelCall& kernel_call);

/// The blocks of a plain kernel that moves so many bytes.
unsigned plain_blocks(std::uint64_t num_bytes, int num_multiprocessors);

/// Whether this rank's kernel writes to a buffer that a peer reads: then it is staged.
bool writes_inputs(const Collective& call, const KernelCall& kernel_call);

/// An optimizer step on this rank's arrays, without communication. Sets all of `kernel_call`.
LaunchPlan plan_own_update(const Collective& call, const void* grad, void* param,
                           std::size_t num_elems, KernelCall& kernel_call);

/// Throws std::invalid_argument where a batch of messages is too large for a kernel.
void check_batch(const std::vector<P2pMessage>& messages);
/// Takes the messages of one launch out of a batch that has passed check_batch(), and sets the
/// call's messages and lanes: those of a lane up to the eighth that is longer than a slot. False if
/// none are left.
bool take_launch(std::vector<P2pMessage>& messages, P2pCall& call);
/// This rank's messages in a call of LaunchKind::kShards.
std::vector<P2pMessage> shards_of(const Collective& call, const KernelCall& kernel_call);

}  // namespace ringcomm::cuda
