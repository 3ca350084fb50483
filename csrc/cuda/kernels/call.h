#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "cuda/kernels/memory.h"
#include "cuda/kernels/staging.h"
#include "kernels/common/types.h"
#include "kernels/updates/update_op.h"

namespace ringcomm::cuda {

/// User memory that all ranks have mapped, in segments with a part for each rank.
struct Lent {
  /// `bases[segment * world_size + rank]` is the local address of a rank's part of a segment.
  std::byte* const* bases = nullptr;

  /// A place in a segment, valid on all ranks; 0 is none.
  static constexpr int kOffsetBits = 40;
  RINGCOMM_HD static constexpr std::uint64_t place(std::uint64_t segment, std::uint64_t offset) {
    return (segment + 1) << kOffsetBits | offset;
  }
  /// Null if there is no place, and before the group has any segment.
  RINGCOMM_HD std::byte* find(std::uint64_t place, int rank, int world_size) const {
    if (place == 0 || bases == nullptr) return nullptr;
    const std::uint64_t segment = (place >> kOffsetBits) - 1;
    return bases[segment * static_cast<std::uint64_t>(world_size) +
                 static_cast<std::uint64_t>(rank)] +
           (place & ((std::uint64_t{1} << kOffsetBits) - 1));
  }
};

/// The group. A captured graph replays with the same parameters, so nothing in them changes between
/// calls.
struct GroupFrame {
  Staging staging;
  Control* control = nullptr;
  /// The number of this rank's collective; unknown for messages and in a graph.
  static constexpr std::uint64_t kNoNumber = ~std::uint64_t{0};
  std::uint64_t launch = kNoNumber;
  std::uint64_t timeout_ns = 0;  ///< from the kernel's first wait that does not end immediately
  int rank = 0;
  int world_size = 1;
};

/// One call of a collective, as one rank makes it: shards for and from each rank. Of a call with
/// one buffer the first pointer is that.
struct KernelCall : GroupFrame {
  std::uint32_t header[kHeaderWords] = {};
  std::uint64_t header_digest = 0;

  int root = -1;
  DType dtype = DType::kByte;
  Reduction reduction = Reduction::kSum;
  int divisor = 1;  ///< of an average
  std::uint64_t num_elems = 0;
  // Chunks of a reduction (see Chunks) or pieces of a move; the host does all divisions.
  std::uint64_t chunk_elems = 0;
  std::uint64_t num_slices = 0;   ///< 0 if ranks may know different sizes
  std::uint32_t slices_each = 0;  ///< of each block; the first `num_longer` have one more
  std::uint32_t num_longer = 0;
  std::uint32_t slice_elems = 0;
  std::uint32_t part_bytes = 0;
  Stride staged_stride;
  Stride taken_stride;
  /// The steps that a launch runs, if ranks take turns instead of waiting in kernels; else all.
  std::uint32_t first_step = 0;
  std::uint32_t last_step = ~0u;

  const std::byte* inputs[kMaxRanks] = {};
  std::byte* outputs[kMaxRanks] = {};
  std::uint64_t input_bytes[kMaxRanks] = {};
  std::uint64_t output_bytes[kMaxRanks] = {};

  Lent lent;
  Lends lends = Lends::kNo;
  std::uint64_t lent_inputs[kMaxRanks] = {};  ///< for each peer; the same where it has one input
  std::uint64_t lent_output = 0;              ///< of calls whose results peers write

  // For reduce_scatter_update_all_gather.
  UpdateScalars update = {};
  float* master = nullptr;
  float* states[2] = {};
};

/// A message to another rank, or from it.
struct P2pMessage {
  std::byte* data;
  std::uint64_t num_bytes;
  std::int32_t tag;
  std::int16_t peer;
  bool is_send;
};

/// Messages by lane: those to one rank, or from one, in order. They wait for no other lane's.
struct P2pCall : GroupFrame {
  static constexpr int kMaxMessages = 128;
  static constexpr int kMaxLanes = 2 * kMaxRanks;

  unsigned blocks_per_lane = 1;                    ///< 1, or whole places
  std::uint8_t first_of_lane[kMaxLanes + 1] = {};  ///< and where the last lane ends
  P2pMessage messages[kMaxMessages] = {};
};

static_assert(sizeof(KernelCall) <= 4096 && sizeof(P2pCall) <= 4096, "what a launch can carry");

}  // namespace ringcomm::cuda
