#pragma once

#include "device/cuda/chunks.h"
#include "device/cuda/combine.h"
#include "device/cuda/phases.h"

// Reductions on boards, slice by slice: every rank stages what others own, each owner reduces its
// part of what all have staged, and, where all want it, stages the result for the others.
// all_reduce, reduce_scatter, reduce, and reduce_scatter_update_all_gather.

namespace ringcomm::cuda {

/// What the owner of elements does with them: reduces them into the outputs.
template <class Reducer>
struct PlainOwner {
  Reducer reducer;
  template <class B, class To, class Sources>
  RINGCOMM_HD void operator()(B& block, const KernelCall& call, const To& outputs,
                              const Sources& sources, std::size_t /*begin_in_chunk*/,
                              std::size_t num_elems) const {
    reducer.combine(block, outputs, sources, num_elems, call.divisor);
  }
};

/// A block's slices, one after the other, in one hand-over each. In step t a block
///
///   loads the first of slice t, which is its own rank's and waits for nobody
///   waits until all ranks have ended step t - 1
///   stages slice t for its owners
///   reduces its part of slice t - 1, which all have staged, and stages the result beside that
///   takes the results of slice t - 2 from their owners
///   publishes
///
/// so that three slices are under way, and what a step reads of others is of the step before alone.
/// Where everything of a step lies stands in the block's tables, which threads fill in for the
/// ranks, one each, in the step before.
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

  RINGCOMM_HD Stop run() {
    if (num_slices() == 0) return Stop::kNone;
    std::uint32_t step = call_.first_step;
    prepare(step, phases_.phase());
    block_.sync();
    RINGCOMM_ROLLED
    for (; step < num_steps() && step <= call_.last_step; ++step) {
      if (!is_lent_) {
        if (const Stop stop = begin_step(step); stop != Stop::kNone) return stop;
      }
      if (step >= 1 && step <= num_slices()) reduce(step);
      if (!is_lent_) end_step(step);
    }
    return is_lent_ ? phases_.rejoin() : Stop::kNone;
  }

 private:
  static constexpr bool kGathers = gathers(kShape);
  static constexpr bool kLends = kShape == ReduceShape::kAllReduce;
  /// Block b of num_blocks has every num_blocks-th slice, from b on.
  RINGCOMM_HD std::uint32_t num_slices() const {
    return call_.slices_each + (block_.block_idx() < call_.num_longer ? 1 : 0);
  }
  RINGCOMM_HD std::uint32_t num_steps() const {
    return num_slices() + (kGathers && !is_lent_ ? 2 : 1);
  }
  RINGCOMM_HD ElemRange slice(int rank, std::uint32_t slice_idx) const {
    return chunks_.slice(rank, block_.block_idx() + std::size_t{slice_idx} * block_.num_blocks());
  }

  /// What step `step` copies and combines, in a phase of which this is the number. The step's
  /// tables are read after the block's next barrier.
  RINGCOMM_HD void prepare(std::uint32_t step, std::uint64_t phase) {
    StepTables& tables = block_.tables().of(step);
    RINGCOMM_ROLLED
    for (auto i = static_cast<int>(block_.thread_idx()); i < call_.world_size;
         i += static_cast<int>(block_.num_threads())) {
      if (i != call_.rank && step < num_slices()) prepare_staging(tables, i, step, phase);
      if (step >= 1 && step <= num_slices()) prepare_reducing(tables, i, step - 1, phase);
      if (kGathers && i != call_.rank && step >= 2) prepare_taking(tables, i, step - 2, phase);
    }
  }
  RINGCOMM_HD void prepare_staging(StepTables& tables, int owner, std::uint32_t slice_idx,
                                   std::uint64_t phase) {
    if (kShape == ReduceShape::kReduce && owner != call_.root) return;
    const int k = kShape == ReduceShape::kReduce ? 0 : owner < call_.rank ? owner : owner - 1;
    const ElemRange elems = slice(owner, slice_idx);
    tables.staged[k] =
        copy_of(phases_.region(call_.rank, phase) + chunks_.part_offset(call_.rank, owner),
                chunks_.input(owner, elems), chunks_.input_bytes(elems));
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
  }
  RINGCOMM_HD void prepare_taking(StepTables& tables, int owner, std::uint32_t slice_idx,
                                  std::uint64_t phase) {
    // Ranks begin with different peers.
    const int k =
        owner > call_.rank ? owner - call_.rank - 1 : owner - call_.rank + call_.world_size - 1;
    const ElemRange elems = slice(owner, slice_idx);
    tables.taken[k] =
        copy_of(chunks_.output(elems), phases_.region(owner, phase - 1) + chunks_.result_offset(),
                chunks_.output_bytes(elems));
  }

  RINGCOMM_HD CopyList staged(std::uint32_t step, bool is_lending) const {
    const bool is_staging = step < num_slices() && !is_lending;
    const int num =
        kShape == ReduceShape::kReduce ? (call_.rank == call_.root ? 0 : 1) : call_.world_size - 1;
    return {block_.tables().of(step).staged, is_staging ? num : 0, call_.staged_stride};
  }

  RINGCOMM_HD Stop begin_step(std::uint32_t& step) {
    // A rank that lends its buffers stages nothing until it knows that not all ranks lend theirs,
    // and reads nothing of them: where all do, peers write to them from step 1 on.
    bool is_lending = kLends && has_heading_ && step <= 1 && call_.lent_input != 0;
    HeldVectors<Cached::kNo, Cached::kYes> held;
    held.load(block_, staged(step, is_lending), 0);
    std::byte* region = nullptr;
    const bool is_first = step == 0 && has_heading_;
    if (const Stop stop = phases_.open(region, is_first); stop != Stop::kNone) return stop;
    if (step == 1 && has_heading_) {
      if (const Stop stop = phases_.compare_headers(); stop != Stop::kNone) return stop;
      if constexpr (kLends) {
        const Lending lending = look_at_lending();
        if (lending == Lending::kAll) {
          use_lent();
          return Stop::kNone;
        }
        // Some have staged nothing, and some have lent nothing: all begin again, and stage.
        if (lending == Lending::kSome) {
          has_heading_ = is_lending = false;
          step = 0;
          prepare(step, phases_.phase());
          block_.sync();
          held.load(block_, staged(step, false), 0);
        }
      }
    }
    const CopyList list = staged(step, is_lending);
    held.store(block_, list, 0);
    copy_all<Cached::kNo, Cached::kYes>(block_, list, kHeldVectors * block_.num_threads());
    prepare(step + 1, phases_.phase() + 1);
    return Stop::kNone;
  }

  RINGCOMM_HD void reduce(std::uint32_t step) {
    const StepTables& tables = block_.tables().of(is_lent_ ? 1 : step);
    const ElemRange elems = slice(call_.rank, step - 1);
    if (elems.num_elems == 0) return;
    // Of lent buffers the tables have the beginnings. Inputs and outputs are of one type there.
    const std::size_t offset =
        is_lent_ ? static_cast<std::size_t>(chunks_.output(elems) - call_.outputs[0]) : 0;
    const int num_outputs = is_lent_ ? call_.world_size : kGathers ? 2 : 1;
    owner_(block_, call_, TableRange<std::byte*>{tables.outputs, num_outputs, offset},
           TableRange<const std::byte*>{tables.sources, call_.world_size, offset},
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

  // ---- buffers that ranks have lent

  /// How many ranks have lent their buffers to this call.
  enum class Lending : std::uint8_t { kNone, kSome, kAll };

  RINGCOMM_HD Lending look_at_lending() const {
    int num_lent = 0;
    RINGCOMM_ROLLED
    for (int rank = 0; rank < call_.world_size; ++rank)
      num_lent += phases_.heading(rank).lent_input != 0 ? 1 : 0;
    return num_lent == 0 ? Lending::kNone
                         : (num_lent == call_.world_size ? Lending::kAll : Lending::kSome);
  }

  /// Where all have lent theirs: each owner reduces its slices of this block from all inputs into
  /// all outputs, and nothing is staged.
  RINGCOMM_HD void use_lent() {
    StepTables& tables = block_.tables().of(1);
    RINGCOMM_ROLLED
    for (auto rank = static_cast<int>(block_.thread_idx()); rank < call_.world_size;
         rank += static_cast<int>(block_.num_threads())) {
      const Heading& heading = phases_.heading(rank);
      tables.sources[rank] = call_.lent.find(heading.lent_input, rank, call_.world_size);
      tables.outputs[rank] = call_.lent.find(heading.lent_output, rank, call_.world_size);
    }
    block_.sync();
    is_lent_ = true;
  }

  B& block_;
  const KernelCall& call_;
  const Owner& owner_;
  Phases<B> phases_;
  Chunks<kShape> chunks_;
  bool has_heading_ = true;
  bool is_lent_ = false;
};

template <class Reducer, ReduceShape kShape, Block B>
RINGCOMM_HD void reduce_gather(B& block, const KernelCall& call) {
  const PlainOwner<Reducer> owner{Reducer(call.dtype, call.reduction)};
  const std::size_t elem_bytes = owner.reducer.elem_bytes();
  run_collective<ReduceGather<kShape, PlainOwner<Reducer>, B>>(block, call, elem_bytes, elem_bytes,
                                                               owner);
}

}  // namespace ringcomm::cuda
