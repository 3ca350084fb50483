#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "collectives/call.h"
#include "cuda/kernels/call.h"

namespace ringcomm::cuda {

/// Facts about a group's devices from which its staging is planned.
struct DeviceFacts {
  int world_size = 1;
  int max_ranks_per_device = 1;  ///< of this group
  int min_multiprocessors = 1;   ///< of any of the devices
  bool has_switches = false;     ///< each rank has a GPU, and all are on switches that can add
  /// Blocks that may wait for other ranks (WaitingBlocks) that each rank has left.
  int free_blocks = std::numeric_limits<int>::max();
  std::uint64_t free_bytes = std::numeric_limits<std::uint64_t>::max();  ///< of the fullest device
};

/// The blocks of one rank's process on a device that may wait for other ranks at a time: its share
/// of seven eighths as many as there are multiprocessors, each of which has room for two.
int share_of_waiting_blocks(int num_multiprocessors, int num_ranks);
/// Those of a new group: three quarters of what its ranks have left, at least one.
int waiting_blocks_of_group(const DeviceFacts& facts);
/// Whether kernels that wait for messages of all peers at a time find room on the device.
bool has_room_for_messages(const DeviceFacts& facts);

/// About 16 MiB for each rank, and scratch memory of at most 64 MiB.
StagingLayout make_staging_layout(const DeviceFacts& facts);

using HeaderWords = std::array<std::uint32_t, kHeaderWords>;

/// A header as kernels compare it: without the call's number, which a replayed graph cannot change,
/// and sizes that other ranks need not know, and with a digest of those of uneven shards.
HeaderWords compared_words(const Collective& call, int world_size);
CallHeader from_words(const std::uint32_t* words, std::uint64_t number = 0);

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
  unsigned copy_blocks = 1;  ///< of the kernels that copy to scratch memory, or from there
  Traffic traffic = {};
  // In place. Where some rank stages, a launch has a piece of each rank's part.
  std::uint64_t piece_size = 0;  ///< in elements, or bytes of a move
  unsigned num_pieces = 1;
  // In scratch memory: a piece of each rank's part. Moves and a reduce have one of all ranks. The
  // outputs of an all_reduce take its inputs' place.
  std::uint64_t input_stride = 0, output_stride = 0, outputs_offset = 0;
};

/// Where GPUs' switches add, all_reduces from this size on go to NCCL: a rank sends (N + 1) / N of
/// the bytes instead of 2 (N - 1) / N. For 8 ranks this saves 12 µs at 450 GB/s, for 4 a third.
inline constexpr std::size_t kLeastSwitchBytes = std::size_t{8} << 20;

/// Sets the algorithm.
void plan_algorithm(const CommunicatorOptions& options, const StagingLayout& layout,
                    Collective& call);

/// Sets all of `kernel_call` but its GroupFrame, which must be set, and its places.
LaunchPlan plan_launch(const Collective& call, int num_multiprocessors, KernelCall& kernel_call);

/// The blocks of a plain kernel that moves so many bytes.
unsigned plain_blocks(std::uint64_t num_bytes, int num_multiprocessors);

/// Whether this rank's kernel writes to a buffer that a peer reads: then it is staged.
bool writes_inputs(const Collective& call, const KernelCall& kernel_call);

/// An optimizer step on this rank's arrays, without communication. Sets all of `kernel_call`.
LaunchPlan plan_own_update(const Collective& call, const void* grad, void* param,
                           std::size_t num_elems, KernelCall& kernel_call);

}  // namespace ringcomm::cuda
