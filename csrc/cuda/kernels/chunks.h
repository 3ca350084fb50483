#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/chunk_layout.h"
#include "core/types.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/memory.h"

namespace ringcomm::cuda {

/// What happens to a reduction's chunks.
enum class ReduceShape : std::uint8_t {
  kAllReduce,      ///< every rank gets all
  kUpdate,         ///< the same, with parameters that the chunk's owner has updated
  kReduceScatter,  ///< every rank gets its own
  kReduce          ///< one chunk, the root's
};

constexpr bool gathers(ReduceShape shape) {
  return shape == ReduceShape::kAllReduce || shape == ReduceShape::kUpdate;
}

/// The chunks of a reduction: their owners, their addresses, and their slices, which fit a block's
/// region.
///
/// Chunks of an all_reduce begin at multiples of 16 elements, so that they are as aligned as the
/// buffer; those of the others are the caller's.
template <ReduceShape kShape>
class Chunks {
 public:
  /// For a call that has passed cut().
  RINGCOMM_HD Chunks(const KernelCall& call, std::size_t input_elem_bytes,
                     std::size_t output_elem_bytes)
      : call_(call), input_elem_bytes_(input_elem_bytes), output_elem_bytes_(output_elem_bytes) {}

  /// Sets the call's chunk_elems, slice_elems, num_slices, part_bytes and strides. Slices have the
  /// same length, and the number of slices per block differs by at most one.
  static void cut(KernelCall& call, std::size_t input_elem_bytes, std::size_t output_elem_bytes) {
    const auto world_size = static_cast<std::size_t>(call.world_size);
    call.chunk_elems =
        kShape == ReduceShape::kUpdate
            ? call.num_elems / world_size
            : ringcomm::num_slices(ringcomm::num_slices(call.num_elems, kAlignElems), world_size) *
                  kAlignElems;
    const std::size_t widest =
        input_elem_bytes > output_elem_bytes ? input_elem_bytes : output_elem_bytes;
    const std::size_t num_staged = world_size > 1 ? world_size - 1 : 1;
    const std::size_t num_parts =
        kShape == ReduceShape::kReduce ? 1 : num_staged + (gathers(kShape) ? 1 : 0);
    const StagingLayout& layout = call.staging.layout;
    // In whole rounds of the threads, if there is room for one.
    const std::size_t region_part_bytes = layout.region_bytes / num_parts;
    const std::size_t most_bytes = region_part_bytes > kMinSliceBytes
                                       ? region_part_bytes / kMinSliceBytes * kMinSliceBytes
                                       : region_part_bytes;
    const std::size_t most_elems = most_bytes / widest / kAlignElems * kAlignElems;
    call.part_bytes = static_cast<std::uint32_t>(most_elems * widest);
    const Chunks chunks(call, input_elem_bytes, output_elem_bytes);
    std::size_t longest_elems = 0;
    for (int rank = 0; rank < call.world_size; ++rank)
      longest_elems = std::max(longest_elems, chunks.chunk(rank).num_elems);
    // In a short call a slice is what a step copies in one turn of the threads: more steps, but
    // each of them much shorter.
    const std::size_t num_copied = kShape == ReduceShape::kReduce ? 1 : num_staged;
    const std::size_t turn_elems =
        std::max(kHeldVectors * kMinSliceBytes / num_copied / widest / kAlignElems,
                 std::size_t{1}) *
        kAlignElems;
    const bool is_short = longest_elems <= layout.num_blocks * turn_elems * kMostShortTurns;
    const std::size_t longest_slice = is_short ? std::min(turn_elems, most_elems) : most_elems;
    const std::size_t num_turns = std::max<std::size_t>(
        ringcomm::num_slices(longest_elems, layout.num_blocks * longest_slice), 1);
    // Not so short that threads are idle.
    const std::size_t fair_elems =
        std::max(ringcomm::num_slices(longest_elems, layout.num_blocks * num_turns),
                 std::min(kMinSliceBytes / widest, turn_elems));
    const std::size_t slice_elems =
        std::min(ringcomm::num_slices(fair_elems, kAlignElems) * kAlignElems, longest_slice);
    call.slice_elems = static_cast<std::uint32_t>(slice_elems);
    call.staged_stride = CopyList::stride_of(slice_elems * input_elem_bytes);
    call.taken_stride = CopyList::stride_of(slice_elems * output_elem_bytes);
    // At least one, for the headers.
    call.num_slices = std::max<std::size_t>(ringcomm::num_slices(longest_elems, slice_elems), 1);
  }

  RINGCOMM_HD ElemRange chunk(int rank) const {
    const auto idx = static_cast<std::size_t>(rank);
    if constexpr (kShape == ReduceShape::kUpdate) {  // ChunkLayout's, without its divisions
      const std::size_t num_longer =
          call_.num_elems - call_.chunk_elems * static_cast<std::size_t>(call_.world_size);
      return {idx * call_.chunk_elems + (idx < num_longer ? idx : num_longer),
              call_.chunk_elems + (idx < num_longer ? 1 : 0)};
    }
    if constexpr (kShape == ReduceShape::kReduceScatter)
      return {0, call_.input_bytes[rank] >> shift_of(input_elem_bytes_)};
    if constexpr (kShape == ReduceShape::kReduce)
      return {0, rank == call_.root ? call_.num_elems : 0};
    return slice_of({0, call_.num_elems}, idx, call_.chunk_elems);
  }
  RINGCOMM_HD ElemRange slice(int rank, std::size_t slice_idx) const {
    return slice_of(chunk(rank), slice_idx, call_.slice_elems);
  }

  RINGCOMM_HD const std::byte* input(int rank, const ElemRange& elems) const {
    const std::byte* buffer =
        kShape == ReduceShape::kReduceScatter ? call_.inputs[rank] : call_.inputs[0];
    return buffer + input_offset(elems);
  }
  RINGCOMM_HD std::byte* output(const ElemRange& elems) const {
    return call_.outputs[0] + output_offset(elems);
  }
  /// The offset from the start of a buffer, or of a share of a reduce_scatter.
  RINGCOMM_HD std::size_t input_offset(const ElemRange& elems) const {
    return elems.begin_elems * input_elem_bytes_;
  }
  RINGCOMM_HD std::size_t output_offset(const ElemRange& elems) const {
    return elems.begin_elems * output_elem_bytes_;
  }
  RINGCOMM_HD std::size_t input_bytes(const ElemRange& elems) const {
    return elems.num_elems * input_elem_bytes_;
  }
  RINGCOMM_HD std::size_t output_bytes(const ElemRange& elems) const {
    return elems.num_elems * output_elem_bytes_;
  }
  /// The offset in `owner`'s region of its part of `rank`'s chunk; its own part is not staged.
  /// kReduce has one part.
  RINGCOMM_HD std::size_t part_offset(int owner, int rank) const {
    if constexpr (kShape == ReduceShape::kReduce) return 0;
    return static_cast<std::size_t>(rank < owner ? rank : rank - 1) * call_.part_bytes;
  }
  /// The offset in an owner's region of its result of the previous slice.
  RINGCOMM_HD std::size_t result_offset() const {
    return static_cast<std::size_t>(call_.world_size - 1) * call_.part_bytes;
  }

 private:
  /// Of elements of 1, 2, 4 or 8 bytes, instead of a division.
  RINGCOMM_HD static int shift_of(std::size_t elem_bytes) {
    return (elem_bytes > 1 ? 1 : 0) + (elem_bytes > 2 ? 1 : 0) + (elem_bytes > 4 ? 1 : 0);
  }

  static constexpr std::size_t kAlignElems = 16;
  static constexpr std::size_t kMinSliceBytes = 16 * kBlockThreads;  ///< a vector for each thread
  static constexpr std::size_t kMostShortTurns = 4;  ///< tests/cpp/test_gpu_latency.cc

  const KernelCall& call_;
  std::size_t input_elem_bytes_;
  std::size_t output_elem_bytes_;
};

}  // namespace ringcomm::cuda
