#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/chunk_layout.h"
#include "core/types.h"
#include "device/cuda/call.h"

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
  RINGCOMM_HD Chunks(const KernelCall& call, std::size_t input_elem_bytes,
                     std::size_t output_elem_bytes)
      : call_(call),
        input_elem_bytes_(input_elem_bytes),
        output_elem_bytes_(output_elem_bytes),
        exact_(call.num_elems, call.world_size) {
    const std::size_t widest =
        input_elem_bytes > output_elem_bytes ? input_elem_bytes : output_elem_bytes;
    const std::size_t num_parts =
        kShape == ReduceShape::kReduce ? 1 : num_staged() + (gathers(kShape) ? 1 : 0);
    const StagingLayout& layout = call.staging.layout;
    slice_elems_ = layout.region_bytes / num_parts / widest / kAlignElems * kAlignElems;
    part_bytes_ = slice_elems_ * widest;
    // Shorter where there is not enough for all blocks, but not so short that threads have nothing.
    const std::size_t fair_elems = num_slices(longest_elems(), layout.num_blocks);
    const std::size_t least_elems = kMinSliceBytes / widest;
    const std::size_t wanted_elems = fair_elems > least_elems ? fair_elems : least_elems;
    const std::size_t aligned_elems = num_slices(wanted_elems, kAlignElems) * kAlignElems;
    if (aligned_elems < slice_elems_) slice_elems_ = aligned_elems;
  }

  RINGCOMM_HD ElemRange chunk(int rank) const {
    if constexpr (kShape == ReduceShape::kUpdate) return exact_.chunk(rank);
    if constexpr (kShape == ReduceShape::kReduceScatter)
      return {0, call_.input_bytes[rank] / input_elem_bytes_};
    if constexpr (kShape == ReduceShape::kReduce)
      return {0, rank == call_.root ? call_.num_elems : 0};
    const std::size_t chunk_elems = num_slices(num_slices(call_.num_elems, kAlignElems),
                                               static_cast<std::size_t>(call_.world_size)) *
                                    kAlignElems;
    return slice_of({0, call_.num_elems}, static_cast<std::size_t>(rank), chunk_elems);
  }
  RINGCOMM_HD ElemRange slice(int rank, std::size_t slice_idx) const {
    return slice_of(chunk(rank), slice_idx, slice_elems_);
  }
  /// Of the longest chunk; at least one, for the headers.
  RINGCOMM_HD std::size_t max_slices() const {
    const std::size_t slices = num_slices(longest_elems(), slice_elems_);
    return slices > 0 ? slices : 1;
  }

  RINGCOMM_HD const std::byte* input(int rank, const ElemRange& elems) const {
    const std::byte* buffer =
        kShape == ReduceShape::kReduceScatter ? call_.inputs[rank] : call_.inputs[0];
    return buffer + elems.begin_elems * input_elem_bytes_;
  }
  RINGCOMM_HD std::byte* output(const ElemRange& elems) const {
    return call_.outputs[0] + elems.begin_elems * output_elem_bytes_;
  }
  /// Where in `owner`'s region its part of `rank`'s chunk lies; its own part lies nowhere.
  RINGCOMM_HD std::size_t part_offset(int owner, int rank) const {
    return static_cast<std::size_t>(rank < owner ? rank : rank - 1) * part_bytes();
  }
  /// Where in an owner's region its result of the slice before lies.
  RINGCOMM_HD std::size_t result_offset() const { return num_staged() * part_bytes_; }
  /// From one part of a region to the next; 0 where there is only one.
  RINGCOMM_HD std::size_t part_bytes() const {
    return kShape == ReduceShape::kReduce ? 0 : part_bytes_;
  }

 private:
  static constexpr std::size_t kAlignElems = 16;
  static constexpr std::size_t kMinSliceBytes = 8 << 10;

  RINGCOMM_HD std::size_t longest_elems() const {
    std::size_t most = 0;
    for (int rank = 0; rank < call_.world_size; ++rank) {
      const std::size_t elems = chunk(rank).num_elems;
      most = elems > most ? elems : most;
    }
    return most;
  }

  RINGCOMM_HD std::size_t num_staged() const {
    return call_.world_size > 1 ? static_cast<std::size_t>(call_.world_size - 1) : 1;
  }

  const KernelCall& call_;
  std::size_t input_elem_bytes_;
  std::size_t output_elem_bytes_;
  ChunkLayout exact_;
  std::size_t slice_elems_ = 0;
  std::size_t part_bytes_ = 0;
};

}  // namespace ringcomm::cuda
