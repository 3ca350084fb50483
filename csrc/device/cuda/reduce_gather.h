#pragma once

#include "device/cuda/chunks.h"
#include "device/cuda/combine.h"
#include "device/cuda/phases.h"

// Reductions on boards, slice by slice: every rank stages what others own, each owner reduces its
// part of what all have staged, and, where all want it, stages the result for the others.
// all_reduce, reduce_scatter, reduce, and reduce_scatter_update_all_gather.

namespace ringcomm::cuda {

/// One slice of every rank's part of this rank's chunk, in the order of ranks.
struct SliceSources {
  const KernelCall& call;
  const std::byte* own;
  unsigned block;
  std::uint64_t phase;
  std::size_t part_bytes;  // of ReduceShape::kReduce 0: there is one part

  RINGCOMM_HD int num() const { return call.world_size; }
  RINGCOMM_HD const std::byte* at(int rank) const {
    if (rank == call.rank) return own;
    const int part = call.rank < rank ? call.rank : call.rank - 1;
    return call.staging.of[rank] + call.staging.layout.region_offset(block, phase) +
           static_cast<std::size_t>(part) * part_bytes;
  }
};

/// Every rank's buffer of a call, where that lies in lent memory.
struct LentBuffers {
  int num_ranks = 0;
  std::byte* of[kMaxRanks];
};
/// The same range of all of them.
struct LentRange {
  const LentBuffers& buffers;
  std::size_t offset;
  RINGCOMM_HD int num() const { return buffers.num_ranks; }
  RINGCOMM_HD std::byte* at(int rank) const { return buffers.of[rank] + offset; }
};

/// What the owner of elements does with them: reduces them into the outputs.
template <class Element>
struct PlainOwner {
  template <class B, class To, class Sources>
  RINGCOMM_HD void operator()(B& block, const KernelCall& call, const To& outputs,
                              const Sources& sources, const ElemRange& elems) const {
    combine<Element>(block, outputs, sources, elems.num_elems, call.reduction, call.divisor);
  }
};

/// A block's slices, one after the other, in one hand-over each. In step t a block
///
///   waits until all ranks have ended step t - 1
///   stages slice t for its owners
///   reduces its part of slice t - 1, which all have staged, and stages the result beside that
///   takes the results of slice t - 2 from their owners
///   publishes
///
/// so that three slices are under way, and what a step reads is of the step before alone.
template <ReduceShape kShape, class Owner, Block B>
class ReduceGather {
 public:
  RINGCOMM_HD ReduceGather(B& block, const KernelCall& call, std::size_t input_elem_bytes,
                           std::size_t output_elem_bytes, const Owner& owner)
      : block_(block),
        call_(call),
        owner_(owner),
        phases_(block, call),
        chunks_(call, input_elem_bytes, output_elem_bytes),
        input_elem_bytes_(input_elem_bytes),
        output_elem_bytes_(output_elem_bytes),
        num_slices_(slices_of_block()) {}

  RINGCOMM_HD Stop run() {
    const std::size_t num_steps = num_slices_ + (kGathers ? 2 : 1);
    bool has_heading = true;
    for (std::size_t step = 0; num_slices_ > 0 && step < num_steps; ++step) {
      if (!does(call_, static_cast<std::uint32_t>(step))) continue;
      std::byte* region = nullptr;
      const bool is_first = step == 0 && has_heading;
      if (const Stop stop = phases_.open(region, is_first); stop != Stop::kNone) return stop;
      if (step == 1 && has_heading) {
        if (const Stop stop = phases_.compare_headers(); stop != Stop::kNone) return stop;
        if (kShape == ReduceShape::kAllReduce) {
          const Lending lending = look_at_lending();
          if (lending == Lending::kAll) return reduce_lent();
          // Some have staged nothing, and some have lent nothing: all begin again, and stage.
          if (lending == Lending::kSome) {
            has_heading = false;
            step = 0;
          }
        }
      }
      do_step(step, region, is_first);
    }
    return Stop::kNone;
  }

 private:
  static constexpr bool kGathers = gathers(kShape);

  /// Block b of num_blocks has every num_blocks-th slice, from b on.
  RINGCOMM_HD std::size_t slices_of_block() const {
    const std::size_t slices = chunks_.max_slices();
    const std::size_t block_idx = block_.block_idx();
    return block_idx < slices ? num_slices(slices - block_idx, block_.num_blocks()) : 0;
  }
  RINGCOMM_HD ElemRange slice(int rank, std::size_t slice_idx) const {
    return chunks_.slice(rank, block_.block_idx() + slice_idx * block_.num_blocks());
  }

  RINGCOMM_HD void do_step(std::size_t step, std::byte* region, bool is_first) {
    // Whoever lends its buffers stages nothing before it has seen whether all do.
    if (step < num_slices_ && !(is_first && call_.lent_input != 0)) stage(step, region);
    if (step >= 1 && step <= num_slices_) reduce(step - 1, region);
    if (kGathers && step >= 2) gather(step - 2);
    // The last step leaves nothing for others.
    if (step < num_slices_ + (kGathers ? 1 : 0)) phases_.publish();
  }

  RINGCOMM_HD void stage(std::size_t slice_idx, std::byte* region) {
    for (int rank = 0; rank < call_.world_size; ++rank) {
      if (rank == call_.rank) continue;
      const ElemRange elems = slice(rank, slice_idx);
      block_.copy(region + chunks_.part_offset(call_.rank, rank), chunks_.input(rank, elems),
                  elems.num_elems * input_elem_bytes_);
    }
  }

  RINGCOMM_HD void reduce(std::size_t slice_idx, std::byte* region) {
    const ElemRange elems = slice(call_.rank, slice_idx);
    if (elems.num_elems == 0) return;
    const SliceSources sources{call_, chunks_.input(call_.rank, elems), block_.block_idx(),
                               phases_.phase() - 1, chunks_.part_bytes()};
    std::byte* result = kGathers ? region + chunks_.result_offset() : nullptr;
    owner_(block_, call_, Outputs{chunks_.output(elems), result}, sources, elems);
  }

  RINGCOMM_HD void gather(std::size_t slice_idx) {
    for (int distance = 1; distance < call_.world_size; ++distance) {
      const int peer = (call_.rank + distance) % call_.world_size;
      const ElemRange elems = slice(peer, slice_idx);
      block_.copy(chunks_.output(elems), phases_.region(peer) + chunks_.result_offset(),
                  elems.num_elems * output_elem_bytes_);
    }
  }

  // ---- buffers that ranks have lent

  /// How many ranks have lent their buffers to this call.
  enum class Lending : std::uint8_t { kNone, kSome, kAll };

  RINGCOMM_HD Lending look_at_lending() const {
    int num_lent = 0;
    for (int rank = 0; rank < call_.world_size; ++rank)
      num_lent += phases_.heading(rank).lent_input != 0 ? 1 : 0;
    return num_lent == 0 ? Lending::kNone
                         : (num_lent == call_.world_size ? Lending::kAll : Lending::kSome);
  }

  /// Where all have lent theirs: each owner reduces its slices of this block from all inputs into
  /// all outputs, and nothing is staged.
  RINGCOMM_HD Stop reduce_lent() {
    LentBuffers inputs{call_.world_size, {}};
    LentBuffers outputs{call_.world_size, {}};
    for (int rank = 0; rank < call_.world_size; ++rank) {
      const Heading& heading = phases_.heading(rank);
      inputs.of[rank] = call_.lent.find(heading.lent_input, rank, call_.world_size);
      outputs.of[rank] = call_.lent.find(heading.lent_output, rank, call_.world_size);
    }
    for (std::size_t slice_idx = 0; slice_idx < num_slices_; ++slice_idx) {
      const ElemRange elems = slice(call_.rank, slice_idx);
      if (elems.num_elems == 0) continue;
      owner_(block_, call_, LentRange{outputs, elems.begin_elems * output_elem_bytes_},
             LentRange{inputs, elems.begin_elems * input_elem_bytes_}, elems);
    }
    return phases_.rejoin();
  }

  B& block_;
  const KernelCall& call_;
  const Owner& owner_;
  Phases<B> phases_;
  Chunks<kShape> chunks_;
  std::size_t input_elem_bytes_;
  std::size_t output_elem_bytes_;
  std::size_t num_slices_;
};

template <class Element, ReduceShape kShape, Block B>
RINGCOMM_HD void reduce_gather(B& block, const KernelCall& call) {
  using Stored = typename Element::Stored;
  const PlainOwner<Element> owner;
  run_collective<ReduceGather<kShape, PlainOwner<Element>, B>>(block, call, sizeof(Stored),
                                                               sizeof(Stored), owner);
}

}  // namespace ringcomm::cuda
