#pragma once

#include <cstddef>
#include <cstdint>

#include "core/chunk_layout.h"
#include "cuda/kernels/phases.h"
#include "cuda/kernels/reducers.h"
#include "kernels/common/types.h"

// Reductions on boards, slice by slice: every rank stages the chunks that others own, each owner
// reduces its part of all and, if all ranks get the result, stages that.

namespace ringcomm::cuda {

enum class ReduceShape : std::uint8_t {
  kAllReduce,      ///< every rank gets all
  kUpdate,         ///< the same, with parameters that the chunk's owner has updated
  kReduceScatter,  ///< every rank gets its own
  kReduce          ///< one chunk, the root's
};

constexpr bool gathers(ReduceShape shape) {
  return shape == ReduceShape::kAllReduce || shape == ReduceShape::kUpdate;
}

/// The chunks of a reduction: their addresses, and their slices, which fit a block's region. Chunks
/// of an all_reduce begin at multiples of 16 elements, so that they are as aligned as the buffer;
/// those of the others are the caller's.
template <ReduceShape kShape>
class Chunks {
 public:
  /// For a call that has passed cut().
  RINGCOMM_HD Chunks(const KernelCall& call, std::size_t input_elem_bytes,
                     std::size_t output_elem_bytes)
      : call_(call), input_elem_bytes_(input_elem_bytes), output_elem_bytes_(output_elem_bytes) {}

  /// Sets the call's chunk_elems, slice_elems, num_slices, part_bytes and strides. The number of
  /// slices per block differs by at most one.
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
    // In a short call a slice is what a step copies in one turn of the threads: more, shorter
    // steps.
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
  /// The offset from the start of a buffer, or of a shard of a reduce_scatter.
  RINGCOMM_HD std::size_t input_offset(const ElemRange& elems) const {
    return elems.begin_elems * input_elem_bytes_;
  }
  RINGCOMM_HD std::size_t output_offset(const ElemRange& elems) const {
    return elems.begin_elems * output_elem_bytes_;
  }
  RINGCOMM_HD Copy copy_input(std::byte* to, int rank, const ElemRange& elems) const {
    return copy_of(to, input(rank, elems), elems.num_elems * input_elem_bytes_);
  }
  RINGCOMM_HD Copy copy_to_output(const ElemRange& elems, const std::byte* from) const {
    return copy_of(output(elems), from, elems.num_elems * output_elem_bytes_);
  }
  /// The offset in `owner`'s region of its part of `rank`'s chunk; its own part is not staged.
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

template <class Reducer>
struct PlainOwner {
  Reducer reducer;
  template <class B, class To, class Sources>
  RINGCOMM_HD void operator()(B& block, const KernelCall& call, const To& outputs,
                              const Sources& sources, std::size_t /*begin_in_chunk*/,
                              std::size_t num_elems) const {
    reducer.combine(block, outputs, sources, static_cast<std::uint32_t>(num_elems), call.divisor);
  }
};

/// A block's slices, in one round each. In step t a block
///
///   loads the first of slice t, which is of its own rank and needs no wait
///   waits until all ranks have ended step t - 1
///   stages slice t for its owners
///   reduces its part of slice t - 1, which all have staged, and stages the result beside that
///   takes the results of slice t - 2 from their owners
///   publishes
///
/// so that three slices are in flight, and a step reads only what others wrote in the previous one.
/// Its addresses are in the block's tables, which the threads fill in during the previous step.
template <ReduceShape kShape, class Owner, Block B>
class ReduceGather {
 public:
  RINGCOMM_HD ReduceGather(B& block, const KernelCall& call, std::size_t input_elem_bytes,
                           std::size_t output_elem_bytes, const Owner& owner)
      : block_(block),
        call_(call),
        owner_(owner),
        phases_(block, call),
        chunks_(call, input_elem_bytes, output_elem_bytes) {}

  RINGCOMM_HD WaitStatus run() {
    if (num_slices() == 0) return WaitStatus::kNone;
    std::uint32_t step = call_.first_step;
    phases_.begin_lending();
    prepare(step, phases_.phase());
    block_.sync();
    RINGCOMM_ROLLED
    for (; step < num_steps() && step <= call_.last_step; ++step) {
      if (!is_lent()) {
        const WaitStatus stop = begin_step(block_, call_, phases_, *this, step);
        if (stop != WaitStatus::kNone) return stop;
        if (is_lent()) begin_lent();
      }
      if (step >= 1 && step <= num_slices()) reduce(step);
      if (is_lent())
        advance_lent(step);
      else
        end_step(step);
    }
    return is_lent() ? phases_.rejoin() : WaitStatus::kNone;
  }

  // ---- for begin_step()

  /// Fills in the tables of a step, in the phase with this number: read after the next barrier.
  RINGCOMM_HD void prepare(std::uint32_t step, std::uint64_t phase) {
    StepTables& tables = block_.tables().of(step);
    deal(block_, call_.world_size, [&](int i) {
      if (i != call_.rank && step < num_slices()) prepare_staging(tables, i, step, phase);
      if (step >= 1 && step <= num_slices()) prepare_reducing(tables, i, step - 1, phase);
      if (kGathers && i != call_.rank && step >= 2) prepare_taking(tables, i, step - 2, phase);
    });
  }
  RINGCOMM_HD CopyList staged(std::uint32_t step, bool is_lent) const {
    const bool is_staging = step < num_slices() && !is_lent;
    const int num =
        kShape == ReduceShape::kReduce ? (call_.rank == call_.root ? 0 : 1) : call_.world_size - 1;
    return {block_.tables().of(step).staged, is_staging ? num : 0, call_.staged_stride};
  }
  RINGCOMM_HD WaitStatus compare() { return phases_.compare_lent(); }

 private:
  static constexpr bool kGathers = gathers(kShape);
  RINGCOMM_HD bool is_lent() const { return phases_.lending() == Lending::kAll; }
  /// Block b of num_blocks has slices b, b + num_blocks and so on.
  RINGCOMM_HD std::uint32_t num_slices() const {
    return call_.slices_each + (block_.block_idx() < call_.num_longer ? 1 : 0);
  }
  RINGCOMM_HD std::uint32_t num_steps() const {
    return num_slices() + (kGathers && !is_lent() ? 2 : 1);
  }
  RINGCOMM_HD ElemRange slice(int rank, std::uint32_t slice_idx) const {
    return chunks_.slice(rank, block_.block_idx() + std::size_t{slice_idx} * block_.num_blocks());
  }

  RINGCOMM_HD void prepare_staging(StepTables& tables, int owner, std::uint32_t slice_idx,
                                   std::uint64_t phase) {
    if (kShape == ReduceShape::kReduce && owner != call_.root) return;
    const int k = kShape == ReduceShape::kReduce ? 0 : owner < call_.rank ? owner : owner - 1;
    const ElemRange elems = slice(owner, slice_idx);
    tables.staged[k] = chunks_.copy_input(
        phases_.region(call_.rank, phase) + chunks_.part_offset(call_.rank, owner), owner, elems);
  }
  RINGCOMM_HD void prepare_reducing(StepTables& tables, int rank, std::uint32_t slice_idx,
                                    std::uint64_t phase) {
    const ElemRange elems = slice(call_.rank, slice_idx);
    tables.sources[rank] = rank == call_.rank ? chunks_.input(rank, elems)
                                              : phases_.region(rank, phase - 1) +
                                                    chunks_.part_offset(rank, call_.rank);
    if (rank != 0) return;
    tables.outputs[0] = chunks_.output(elems);
    tables.outputs[1] = phases_.region(call_.rank, phase) + chunks_.result_offset();
    tables.num_outputs = kGathers ? 2 : 1;
  }
  RINGCOMM_HD void prepare_taking(StepTables& tables, int owner, std::uint32_t slice_idx,
                                  std::uint64_t phase) {
    // Ranks begin with different peers.
    const int k =
        owner > call_.rank ? owner - call_.rank - 1 : owner - call_.rank + call_.world_size - 1;
    const ElemRange elems = slice(owner, slice_idx);
    tables.taken[k] =
        chunks_.copy_to_output(elems, phases_.region(owner, phase - 1) + chunks_.result_offset());
  }

  RINGCOMM_HD void reduce(std::uint32_t step) {
    const StepTables& tables = block_.tables().of(step);
    const ElemRange elems = slice(call_.rank, step - 1);
    if (elems.num_elems == 0) return;
    owner_(block_, call_, TableOutputs{tables}, TableSources{tables, call_.world_size},
           elems.begin_elems - chunks_.chunk(call_.rank).begin_elems, elems.num_elems);
  }

  RINGCOMM_HD void end_step(std::uint32_t step) {
    if (kGathers && step >= 2)
      copy_all<Cached::kYes, Cached::kNo>(
          block_,
          CopyList(block_.tables().of(step).taken, call_.world_size - 1, call_.taken_stride));
    // The last step leaves nothing for others.
    if (step < num_slices() + (kGathers ? 1 : 0)) phases_.publish();
  }

  /// If all ranks lend their buffers, each owner reduces its slices from all inputs into its
  /// output, or into all ranks' if all get the result.
  RINGCOMM_HD void begin_lent() {
    StepTables& tables = block_.tables().of(1);
    const LentTables& lent = block_.tables().lent;
    const ElemRange elems = slice(call_.rank, 0);
    deal(block_, call_.world_size, [&](int rank) {
      const bool is_own = rank == call_.rank;
      tables.sources[rank] =
          is_own ? chunks_.input(rank, elems) : lent.inputs[rank] + chunks_.input_offset(elems);
      // This rank's first: an update reads its parameters there.
      const int k = rank >= call_.rank ? rank - call_.rank : rank - call_.rank + call_.world_size;
      tables.outputs[k] =
          is_own ? chunks_.output(elems) : lent.outputs[rank] + chunks_.output_offset(elems);
      if (is_own)
        for (StepTables& each : block_.tables().of_steps)
          each.num_outputs = kGathers ? call_.world_size : 1;
    });
    block_.sync();
  }
  /// The block's next slice: its tables were read a step ago.
  RINGCOMM_HD void advance_lent(std::uint32_t step) {
    const StepTables& tables = block_.tables().of(step);
    StepTables& next = block_.tables().of(step + 1);
    const ElemRange stride{std::size_t{block_.num_blocks()} * call_.slice_elems, 0};
    deal(block_, call_.world_size, [&](int rank) {
      next.sources[rank] = tables.sources[rank] + chunks_.input_offset(stride);
      next.outputs[rank] = tables.outputs[rank] + chunks_.output_offset(stride);
    });
    block_.sync();
  }

  B& block_;
  const KernelCall& call_;
  const Owner& owner_;
  Phases<B> phases_;
  Chunks<kShape> chunks_;
};

template <class Reducer, ReduceShape kShape, Block B>
RINGCOMM_HD void reduce_gather(B& block, const KernelCall& call) {
  const PlainOwner<Reducer> owner{Reducer(call.dtype, call.reduction)};
  const std::size_t elem_bytes = owner.reducer.elem_bytes();
  run_collective<ReduceGather<kShape, PlainOwner<Reducer>, B>>(block, call, elem_bytes, elem_bytes,
                                                               owner);
}

}  // namespace ringcomm::cuda
