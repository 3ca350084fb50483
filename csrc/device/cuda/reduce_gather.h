#pragma once

#include "device/cuda/chunks.h"
#include "device/cuda/combine.h"
#include "device/cuda/phases.h"

// Reductions on boards, slice by slice: every rank stages what others own, each owner reduces its
// slice of what all have staged, and, where all want it, stages the result for the others.
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

/// What the owner of elements does with them: reduces them into the outputs.
template <class Element>
struct PlainOwner {
  template <class B, class To, class Sources>
  RINGCOMM_HD void operator()(B& block, const KernelCall& call, const To& outputs,
                              const Sources& sources, const ElemRange& elems) const {
    combine<Element>(block, outputs, sources, elems.num_elems, call.reduction, call.divisor);
  }
};

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
        output_elem_bytes_(output_elem_bytes) {}

  RINGCOMM_HD Stop run() {
    const std::size_t slices = chunks_.max_slices();
    std::uint32_t step = 0;
    for (std::size_t slice_idx = block_.block_idx(); slice_idx < slices;
         slice_idx += block_.num_blocks(), step += kStepsPerSlice) {
      const bool is_first = step == 0;
      if (does(call_, step))
        if (const Stop stop = stage(slice_idx, is_first); stop != Stop::kNone) return stop;
      if (does(call_, step + 1))
        if (const Stop stop = reduce(slice_idx, is_first); stop != Stop::kNone) return stop;
      if (kGathers && does(call_, step + 2))
        if (const Stop stop = gather(slice_idx); stop != Stop::kNone) return stop;
    }
    return Stop::kNone;
  }

 private:
  static constexpr bool kGathers =
      kShape == ReduceShape::kAllReduce || kShape == ReduceShape::kUpdate;
  // Steps end where peers must have come as far: a launch that does one at a time waits for
  // nothing. What a gather reads stays until the second stage after it, so it shares a launch with
  // the next.
  static constexpr std::uint32_t kStepsPerSlice = 2;

  RINGCOMM_HD Stop stage(std::size_t slice_idx, bool is_first) {
    std::byte* region = nullptr;
    if (const Stop stop = phases_.open(region, is_first); stop != Stop::kNone) return stop;
    for (int rank = 0; rank < call_.world_size; ++rank) {
      if (rank == call_.rank) continue;
      const ElemRange slice = chunks_.slice(rank, slice_idx);
      block_.copy(region + chunks_.part_offset(call_.rank, rank), chunks_.input(rank, slice),
                  slice.num_elems * input_elem_bytes_);
    }
    phases_.publish();
    return Stop::kNone;
  }

  RINGCOMM_HD Stop reduce(std::size_t slice_idx, bool is_first) {
    if (const Stop stop = phases_.wait_all(is_first); stop != Stop::kNone) return stop;
    const ElemRange slice = chunks_.slice(call_.rank, slice_idx);
    const SliceSources sources{call_, chunks_.input(call_.rank, slice), block_.block_idx(),
                               phases_.phase() - 1, chunks_.part_bytes()};
    std::byte* region = nullptr;
    if (kGathers)
      if (const Stop stop = phases_.open(region, false); stop != Stop::kNone) return stop;
    if (slice.num_elems > 0)
      owner_(block_, call_, Outputs{chunks_.output(slice), region}, sources, slice);
    if (kGathers) phases_.publish();
    return Stop::kNone;
  }

  RINGCOMM_HD Stop gather(std::size_t slice_idx) {
    if (const Stop stop = phases_.wait_all(false); stop != Stop::kNone) return stop;
    for (int distance = 1; distance < call_.world_size; ++distance) {
      const int peer = (call_.rank + distance) % call_.world_size;
      const ElemRange slice = chunks_.slice(peer, slice_idx);
      block_.copy(chunks_.output(slice), phases_.region(peer),
                  slice.num_elems * output_elem_bytes_);
    }
    return Stop::kNone;
  }

  B& block_;
  const KernelCall& call_;
  const Owner& owner_;
  Phases<B> phases_;
  Chunks<kShape> chunks_;
  std::size_t input_elem_bytes_;
  std::size_t output_elem_bytes_;
};

template <class Element, ReduceShape kShape, Block B>
RINGCOMM_HD void reduce_gather(B& block, const KernelCall& call) {
  using Stored = typename Element::Stored;
  const PlainOwner<Element> owner;
  ReduceGather<kShape, PlainOwner<Element>, B> run(block, call, sizeof(Stored), sizeof(Stored),
                                                   owner);
  finish(block, call, run.run());
}

}  // namespace ringcomm::cuda
