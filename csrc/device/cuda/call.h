#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/types.h"
#include "device/cuda/control.h"
#include "device/cuda/staging.h"
#include "device/cuda/tables.h"
#include "device/update_op.h"

namespace ringcomm::cuda {

/// Memory of users that all ranks of a group have mapped, in segments of which each rank has a
/// part: buffers in it can be read and written by peers where they lie.
struct Lent {
  /// `bases[segment * world_size + rank]` is where a rank's part of a segment lies here.
  std::byte* const* bases = nullptr;

  /// A place in a segment, as ranks tell it each other; 0 is none.
  static constexpr int kOffsetBits = 40;
  RINGCOMM_HD static constexpr std::uint64_t place(std::uint64_t segment, std::uint64_t offset) {
    return (segment + 1) << kOffsetBits | offset;
  }
  RINGCOMM_HD std::byte* find(std::uint64_t place, int rank, int world_size) const {
    const std::uint64_t segment = (place >> kOffsetBits) - 1;
    return bases[segment * static_cast<std::uint64_t>(world_size) +
                 static_cast<std::uint64_t>(rank)] +
           (place & ((std::uint64_t{1} << kOffsetBits) - 1));
  }
};

/// What every kernel is told of its group. Parameters of kernels are the same in every replay of a
/// captured graph, so nothing in them changes from call to call.
struct GroupFrame {
  Staging staging;
  Control* control = nullptr;
  /// Which of this rank's collectives, where it is known: not of messages, nor in a graph.
  static constexpr std::uint64_t kNoNumber = ~std::uint64_t{0};
  std::uint64_t launch = kNoNumber;
  std::uint64_t timeout_ns = 0;  ///< from the kernel's first wait that is not over at once
  int rank = 0;
  int world_size = 1;
};

/// One call of a collective, as one rank makes it.
///
/// Shares are for and from each rank, in bytes; of a call with one buffer the first pointer is
/// that.
struct KernelCall : GroupFrame {
  std::uint32_t header[kHeaderWords] = {};
  std::uint64_t header_digest = 0;

  int root = -1;
  DType dtype = DType::kByte;
  Reduction reduction = Reduction::kSum;
  int divisor = 1;  ///< of an average
  std::uint64_t num_elems = 0;
  /// Bytes of the longest share of any pair; kUnknown where ranks may know different sizes.
  static constexpr std::uint64_t kUnknown = ~std::uint64_t{0};
  std::uint64_t longest_bytes = 0;
  /// Of a reduction, how it is cut; see Chunks. Worked out by the host: threads would divide.
  std::uint64_t chunk_elems = 0;
  std::uint64_t num_slices = 0;   ///< or pieces of a move; 0 where the host does not know them all
  std::uint32_t slices_each = 0;  ///< of each block; the first `num_longer` have one more
  std::uint32_t num_longer = 0;
  std::uint32_t slice_elems = 0;
  std::uint32_t part_bytes = 0;
  Stride staged_stride;
  Stride taken_stride;
  std::uint32_t ring_num_slots = 0;
  std::uint32_t ring_slot_bytes = 0;
  /// Which steps of its phases a launch does, where launches take turns instead of waiting for each
  /// other in kernels; all of them otherwise.
  std::uint32_t first_step = 0;
  std::uint32_t last_step = ~0u;

  const std::byte* inputs[kMaxRanks] = {};
  std::byte* outputs[kMaxRanks] = {};
  std::uint64_t input_bytes[kMaxRanks] = {};
  std::uint64_t output_bytes[kMaxRanks] = {};

  Lent lent;
  std::uint64_t lent_input = 0;
  std::uint64_t lent_output = 0;

  // Of reduce_scatter_update_all_gather.
  UpdateScalars update = {};
  Optimizer optimizer = Optimizer::kNone;
  DType param_dtype = DType::kFloat32;
  float* master = nullptr;
  float* states[2] = {};
};

/// A message to another rank, or from it.
struct Mail {
  std::byte* data;
  std::uint64_t num_bytes;
  std::int32_t tag;
  std::int16_t peer;
  bool is_send;
};

/// Messages of which none waits for another, unless it is of the same lane. A lane is what goes to
/// one rank, or comes from one; its messages stand together, in their order.
struct MailCall : GroupFrame {
  static constexpr int kMaxMessages = 128;
  static constexpr int kMaxLanes = 2 * kMaxRanks;

  unsigned blocks_per_lane = 1;
  std::uint8_t first_of_lane[kMaxLanes + 1] =
      {};  ///< of all messages; and where the last lane ends
  Mail messages[kMaxMessages] = {};
};

static_assert(sizeof(KernelCall) <= 4096 && sizeof(MailCall) <= 4096, "what a launch can carry");

}  // namespace ringcomm::cuda
