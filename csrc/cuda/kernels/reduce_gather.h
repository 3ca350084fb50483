#pragma once

#include "cuda/kernels/chunks.h"
#include "cuda/kernels/combine.h"
#include "cuda/kernels/phases.h"

// Reductions on boards, slice by slice: every rank stages the chunks that others own, each owner
// reduces its part of all staged data and, if all ranks get the result, stages it for the others.
// all_reduce, reduce_scatter, reduce, and reduce_scatter_update_all_gather.

namespace ringcomm::cuda {

/// The operation of the owner of elements: reduces them into the outputs.
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
///   loads the first of slice t, which is of its own rank and needs no wait
///   waits until all ranks have ended step t - 1
///   stages slice t for its owners
///   reduces its part of slice t - 1, which all have staged, and stages the result beside that
///   takes the results of slice t - 2 from their owners
///   publishes
///
/// so that three slices are in flight, and a step reads only data that others wrote in the previous
/// step. The addresses of a step are in the block's tables, which the threads fill in during the
/// previous step, each for one rank.
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
    phases_.begin_lending();
    prepare(step, phases_.phase());
    block_.sync();
    RINGCOMM_ROLLED
    for (; step < num_steps() && step <= call_.last_step; ++step) {
      if (!is_lent()) {
        if (const Stop stop = begin_step(step); stop != Stop::kNone) return stop;
      }
      if (step >= 1 && step <= num_slices()) reduce(step);
      if (is_lent())
        advance_lent(step);
      else
        end_step(step);
    }
    return is_lent() ? phases_.rejoin() : Stop::kNone;
  }

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

  /// Prepares the copies and reductions of step `step`, in the phase with this number. The step's
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
    tables.source_policies[rank] = cache_policy(rank == call_.rank ? Cached::kNo : Cached::kYes);
    if (rank != 0) return;
    tables.outputs[0] = chunks_.output(elems);
    tables.outputs[1] = phases_.region(call_.rank, phase) + chunks_.result_offset();
    tables.num_outputs = kGathers ? 2 : 1;
    tables.output_policy = cache_policy(Cached::kYes);
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

  RINGCOMM_HD CopyList staged(std::uint32_t step, bool has_heading) const {
    const bool is_staging = step < num_slices() && !(has_heading && call_.lends == Lends::kYes);
    const int num =
        kShape == ReduceShape::kReduce ? (call_.rank == call_.root ? 0 : 1) : call_.world_size - 1;
    return {block_.tables().of(step).staged, is_staging ? num : 0, call_.staged_stride};
  }

  RINGCOMM_HD Stop begin_step(std::uint32_t& step) {
    // A rank that lends its buffers stages nothing and does not read them until it knows whether
    // all ranks lend theirs; if all do, peers write to them from step 1 on.
    bool has_heading = step <= 1 && phases_.lending() == Lending::kUnknown;
    HeldVectors<Cached::kNo, Cached::kYes> held;
    held.load(block_, staged(step, has_heading), 0);
    std::byte* region = nullptr;
    const bool is_first = step == 0 && has_heading;
    if (const Stop stop = phases_.open(region, is_first); stop != Stop::kNone) return stop;
    if (step == 1 && has_heading) {
      if (const Stop stop = phases_.compare_lent(); stop != Stop::kNone) return stop;
      if (is_lent()) {
        begin_lent();
        return Stop::kNone;
      }
      // Some ranks lend their buffers and others do not, so all ranks start again with staging.
      if (phases_.lending() == Lending::kSome) {
        has_heading = false;
        step = 0;
        prepare(step, phases_.phase());
        block_.sync();
        held.load(block_, staged(step, false), 0);
      }
    }
    const CopyList list = staged(step, has_heading);
    held.store(block_, list, 0);
    copy_all<Cached::kNo, Cached::kYes>(block_, list, kHeldVectors * block_.num_threads());
    prepare(step + 1, phases_.phase() + 1);
    return Stop::kNone;
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

  /// If all ranks lend their buffers, nothing is staged: each owner reduces its slices of this
  /// block from all inputs into its output, and into all ranks' outputs if all get the result.
  RINGCOMM_HD void begin_lent() {
    StepTables& tables = block_.tables().of(1);
    const LentTables& lent = block_.tables().lent;
    const ElemRange elems = slice(call_.rank, 0);
    RINGCOMM_ROLLED
    for (auto rank = static_cast<int>(block_.thread_idx()); rank < call_.world_size;
         rank += static_cast<int>(block_.num_threads())) {
      const bool is_own = rank == call_.rank;
      tables.sources[rank] =
          is_own ? chunks_.input(rank, elems) : lent.inputs[rank] + chunks_.input_offset(elems);
      // This rank's first: an update reads its parameters there.
      const int k = rank >= call_.rank ? rank - call_.rank : rank - call_.rank + call_.world_size;
      tables.outputs[k] =
          is_own ? chunks_.output(elems) : lent.outputs[rank] + chunks_.output_offset(elems);
      for (std::uint32_t step = 0; step < 2; ++step) {
        StepTables& each = block_.tables().of(step);
        each.source_policies[rank] = cache_policy(Cached::kNo);
        if (!is_own) continue;
        each.output_policy = cache_policy(Cached::kNo);
        each.num_outputs = kGathers ? call_.world_size : 1;
      }
    }
    block_.sync();
  }
  /// The block's next slice: its tables were read a step ago.
  RINGCOMM_HD void advance_lent(std::uint32_t step) {
    const StepTables& tables = block_.tables().of(step);
    StepTables& next = block_.tables().of(step + 1);
    const ElemRange stride{std::size_t{block_.num_blocks()} * call_.slice_elems, 0};
    RINGCOMM_ROLLED
    for (auto rank = static_cast<int>(block_.thread_idx()); rank < call_.world_size;
         rank += static_cast<int>(block_.num_threads())) {
      next.sources[rank] = tables.sources[rank] + chunks_.input_offset(stride);
      next.outputs[rank] = tables.outputs[rank] + chunks_.output_offset(stride);
    }
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
