#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/chunk_layout.h"
#include "core/types.h"
#include "device/cuda/call.h"
#include "device/cuda/memory.h"

namespace ringcomm::cuda {

/// What becomes of a reduction's chunks.
enum class ReduceShape : std::uint8_t {
  kAllReduce,      ///< every rank gets all
  kUpdate,         ///< the same, of parameters that the chunk's owner has updated
  kReduceScatter,  ///< every rank gets its own
  kReduce          ///< one chunk, the root's
};

constexpr bool gathers(ReduceShape shape) {
  return shape == ReduceShape::kAllReduce || shape == ReduceShape::kUpdate;
}

/// The chunks of a reduction: whose they are, where they lie, and how they are cut into slices that
/// fit a block's region.
///
/// Chunks of an all_reduce begin at multiples of 16 elements, so that they are as aligned as the
/// buffer; those of the others are the caller's.
template <ReduceShape kShape>
class Chunks {
 public:
  /// Of a call that has passed cut().
  RINGCOMM_HD Chunks(const KernelCall& call, std::size_t input_elem_bytes,
                     std::size_t output_elem_bytes)
      : call_(call), input_elem_bytes_(input_elem_bytes), output_elem_bytes_(output_elem_bytes) {}

  /// Fills in the call's chunk_elems, slice_elems, num_slices, part_bytes and strides: all blocks
  /// get slices of the same length, as many as others or one less.
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
    // In whole turns of the threads, where there is room for one.
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
    const std::size_t num_turns = std::max<std::size_t>(
        ringcomm::num_slices(longest_elems, layout.num_blocks * most_elems), 1);
    // Not so short that threads have nothing.
    const std::size_t fair_elems =
        std::max(ringcomm::num_slices(longest_elems, layout.num_blocks * num_turns),
                 kMinSliceBytes / widest);
    const std::size_t slice_elems =
        std::min(ringcomm::num_slices(fair_elems, kAlignElems) * kAlignElems, most_elems);
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
      return {0, call_.input_bytes[rank] >> std::countr_zero(input_elem_bytes_)};
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
    return buffer + elems.begin_elems * input_elem_bytes_;
  }
  RINGCOMM_HD std::byte* output(const ElemRange& elems) const {
    return call_.outputs[0] + elems.begin_elems * output_elem_bytes_;
  }
  RINGCOMM_HD std::size_t input_bytes(const ElemRange& elems) const {
    return elems.num_elems * input_elem_bytes_;
  }
  RINGCOMM_HD std::size_t output_bytes(const ElemRange& elems) const {
    return elems.num_elems * output_elem_bytes_;
  }
  /// Where in `owner`'s region its part of `rank`'s chunk lies; its own part lies nowhere. Of
  /// kReduce there is one part.
  RINGCOMM_HD std::size_t part_offset(int owner, int rank) const {
    if constexpr (kShape == ReduceShape::kReduce) return 0;
    return static_cast<std::size_t>(rank < owner ? rank : rank - 1) * call_.part_bytes;
  }
  /// Where in an owner's region its result of the slice before lies.
  RINGCOMM_HD std::size_t result_offset() const {
    return static_cast<std::size_t>(call_.world_size - 1) * call_.part_bytes;
  }

 private:
  static constexpr std::size_t kAlignElems = 16;
  static constexpr std::size_t kMinSliceBytes = 16 * kBlockThreads;  ///< a vector for each thread

  const KernelCall& call_;
  std::size_t input_elem_bytes_;
  std::size_t output_elem_bytes_;
};

}  // namespace ringcomm::cuda
