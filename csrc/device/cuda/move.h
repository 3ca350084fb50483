#pragma once

#include "core/chunk_layout.h"
#include "device/cuda/memory.h"
#include "device/cuda/phases.h"

// Data that is moved and not looked at, on boards, piece by piece: every rank stages what it has
// for others, and takes what others have for it. all_gather, broadcast, gather, scatter and
// all_to_all differ in who has how much for whom; a barrier has nothing.

namespace ringcomm::cuda {

/// Bytes of a region for each rank that a piece is staged for.
RINGCOMM_HD inline std::size_t move_part_bytes(const StagingLayout& layout, bool is_shared) {
  const std::size_t num_parts = is_shared || layout.world_size == 1 ? 1 : layout.world_size - 1;
  return layout.region_bytes / num_parts / sizeof(Vector) * sizeof(Vector);
}

/// KernelCall's inputs and input_bytes say what this rank has for each rank, outputs and
/// output_bytes where what it gets from each goes; itself included.
///
/// With kIsShared a rank has the same for all who get anything, and stages it once. In step t a
/// block waits until all ranks have ended step t - 1, stages piece t, takes piece t - 1, which all
/// have staged, and publishes: one hand-over for each piece.
template <bool kIsShared, Block B>
class Move {
 public:
  RINGCOMM_HD Move(B& block, const KernelCall& call)
      : block_(block), call_(call), phases_(block, call), part_bytes_(call.part_bytes) {}

  RINGCOMM_HD Stop run() {
    // Where sizes may differ from rank to rank, the first piece of every block tells them.
    bool is_known = call_.longest_bytes != KernelCall::kUnknown;
    std::uint32_t num_steps = 2;
    if (is_known)
      num_steps =
          call_.num_slices > 0 ? steps_of_block() : steps_of(pieces_of(call_.longest_bytes));
    std::uint32_t step = call_.first_step;
    prepare(step, phases_.phase());
    block_.sync();
    RINGCOMM_ROLLED
    for (; step < num_steps && step <= call_.last_step; ++step) {
      HeldVectors<Cached::kNo, Cached::kYes> held;
      const CopyList staged = list(block_.tables().of(step).staged, num_staged());
      held.load(block_, staged, 0);
      std::byte* region = nullptr;
      if (const Stop stop = phases_.open(region, step == 0); stop != Stop::kNone) return stop;
      if (step == 1) {
        if (const Stop stop = phases_.compare_headers(); stop != Stop::kNone) return stop;
        if (!is_known) {
          std::uint64_t longest_bytes = 0;
          if (const Stop stop = compare_sizes(longest_bytes); stop != Stop::kNone) return stop;
          is_known = true;
          num_steps = steps_of(pieces_of(longest_bytes));
        }
      }
      held.store(block_, staged, 0);
      copy_all<Cached::kNo, Cached::kYes>(block_, staged, kHeldVectors * block_.num_threads());
      prepare(step + 1, phases_.phase() + 1);
      if (step >= 1)
        copy_all<Cached::kYes, Cached::kNo>(block_,
                                            list(block_.tables().of(step).taken, call_.world_size));
      if (step + 1 < num_steps) phases_.publish();
    }
    return Stop::kNone;
  }

 private:
  /// At least one, which has the headers. A division, for sizes that the host does not know.
  RINGCOMM_HD std::uint64_t pieces_of(std::uint64_t num_bytes) const {
    return num_bytes == 0 ? 1 : num_slices(num_bytes, part_bytes_);
  }
  /// One more than the block's share of the pieces; 0 where it has none.
  RINGCOMM_HD std::uint32_t steps_of_block() const {
    const std::uint32_t pieces =
        call_.slices_each + (block_.block_idx() < call_.num_longer ? 1 : 0);
    return pieces > 0 ? pieces + 1 : 0;
  }
  RINGCOMM_HD std::uint32_t steps_of(std::uint64_t num_pieces) const {
    const auto pieces = static_cast<std::uint32_t>(num_pieces);
    const std::uint32_t block_idx = block_.block_idx();
    if (block_idx >= pieces) return 0;
    return (pieces - block_idx + block_.num_blocks() - 1) / block_.num_blocks() + 1;
  }
  RINGCOMM_HD ElemRange piece(std::uint64_t num_bytes, std::uint32_t step) const {
    return slice_of({0, num_bytes}, block_.block_idx() + std::size_t{step} * block_.num_blocks(),
                    part_bytes_);
  }
  /// Where in `from`'s region the part for `to` lies.
  RINGCOMM_HD std::size_t part_offset(int from, int to) const {
    return kIsShared ? 0 : static_cast<std::size_t>(to < from ? to : to - 1) * part_bytes_;
  }
  RINGCOMM_HD int num_staged() const {
    return kIsShared && call_.world_size > 1 ? 1 : call_.world_size - 1;
  }
  RINGCOMM_HD CopyList list(const Copy* copies, int num) const {
    return {copies, num, call_.staged_stride};
  }

  /// As ReduceGather's.
  RINGCOMM_HD void prepare(std::uint32_t step, std::uint64_t phase) {
    StepTables& tables = block_.tables().of(step);
    RINGCOMM_ROLLED
    for (auto i = static_cast<int>(block_.thread_idx()); i < call_.world_size;
         i += static_cast<int>(block_.num_threads())) {
      if (kIsShared ? i == receiver() : i != call_.rank) {
        const ElemRange bytes = piece(call_.input_bytes[i], step);
        const int k = kIsShared ? 0 : i < call_.rank ? i : i - 1;
        tables.staged[k] = copy_of(phases_.region(call_.rank, phase) + part_offset(call_.rank, i),
                                   call_.inputs[i] + bytes.begin_elems, bytes.num_elems);
      }
      if (step == 0) continue;
      const int from = (call_.rank + i) % call_.world_size;
      const ElemRange bytes = piece(call_.output_bytes[from], step - 1);
      const std::byte* const own = call_.inputs[from] + bytes.begin_elems;
      std::byte* const output = call_.outputs[from] + bytes.begin_elems;
      const bool is_there = from == call_.rank && own == output;
      tables.taken[i] = copy_of(
          output,
          from == call_.rank ? own
                             : phases_.region(from, phase - 1) + part_offset(from, call_.rank),
          is_there ? 0 : bytes.num_elems);
    }
  }
  /// Of the ranks that get anything of this one's, one; another where none does.
  RINGCOMM_HD int receiver() const {
    RINGCOMM_ROLLED
    for (int to = 0; to < call_.world_size; ++to)
      if (to != call_.rank && call_.input_bytes[to] != 0) return to;
    return call_.rank == 0 ? 1 : 0;
  }

  /// Whether each pair agrees on how much it moves. All ranks look at all pairs, so that all come
  /// to one answer, and to one number of pieces.
  RINGCOMM_HD Stop compare_sizes(std::uint64_t& longest_bytes) {
    RINGCOMM_ROLLED
    for (int from = 0; from < call_.world_size; ++from) {
      RINGCOMM_ROLLED
      for (int to = 0; to < call_.world_size; ++to) {
        const std::uint64_t sent_bytes = phases_.heading(from).input_bytes[to];
        const std::uint64_t wanted_bytes = phases_.heading(to).output_bytes[from];
        if (sent_bytes != wanted_bytes) {
          tell(block_, call_, kSizesDiffer, from == call_.rank ? to : from,
               FewWords{static_cast<std::uint32_t>(from), static_cast<std::uint32_t>(to),
                        static_cast<std::uint32_t>(sent_bytes),
                        static_cast<std::uint32_t>(sent_bytes >> 32),
                        static_cast<std::uint32_t>(wanted_bytes),
                        static_cast<std::uint32_t>(wanted_bytes >> 32)});
          return Stop::kAborted;
        }
        longest_bytes = sent_bytes > longest_bytes ? sent_bytes : longest_bytes;
      }
    }
    return Stop::kNone;
  }

  B& block_;
  const KernelCall& call_;
  Phases<B> phases_;
  std::size_t part_bytes_;
};

template <bool kIsShared, Block B>
RINGCOMM_HD void move(B& block, const KernelCall& call) {
  run_collective<Move<kIsShared, B>>(block, call);
}

}  // namespace ringcomm::cuda
