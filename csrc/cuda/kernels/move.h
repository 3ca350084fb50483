#pragma once

#include "core/chunk_layout.h"
#include "cuda/kernels/memory.h"
#include "cuda/kernels/phases.h"

// Moves data on boards, piece by piece: every rank stages its data for the others and copies
// theirs. all_gather, broadcast, gather, scatter and all_to_all differ in the sizes per pair of
// ranks; a barrier has no data.

namespace ringcomm::cuda {

/// Bytes of a region for each rank that a piece is staged for.
RINGCOMM_HD inline std::size_t move_part_bytes(const StagingLayout& layout, bool is_shared) {
  const std::size_t num_parts = is_shared || layout.world_size == 1 ? 1 : layout.world_size - 1;
  return layout.region_bytes / num_parts / sizeof(Vector) * sizeof(Vector);
}

/// KernelCall's inputs are this rank's data for each rank, outputs the destinations of each rank's.
/// With kIsShared a rank has the same data for all that receive from it, and stages it once.
///
/// In step t a block waits until all ranks have ended step t - 1, stages piece t, copies piece
/// t - 1, which all have staged, and publishes: one round per piece.
template <bool kIsShared, Block B>
class Move {
 public:
  RINGCOMM_HD Move(B& block, const KernelCall& call)
      : block_(block), call_(call), phases_(block, call), part_bytes_(call.part_bytes) {}

  RINGCOMM_HD WaitStatus run() {
    // If sizes may differ between ranks, the first piece of every block contains them.
    num_steps_ = call_.num_slices > 0 ? steps_of_block() : 2;
    std::uint32_t step = call_.first_step;
    phases_.begin_lending();
    prepare(step, phases_.phase());
    block_.sync();
    RINGCOMM_ROLLED
    for (; step < num_steps_ && step <= call_.last_step; ++step) {
      const WaitStatus stop = begin_step(block_, call_, phases_, *this, step);
      if (stop != WaitStatus::kNone) return stop;
      if (phases_.lending() == Lending::kAll) return take_lent();
      if (step >= 1)
        copy_all<Cached::kYes, Cached::kNo>(block_,
                                            list(block_.tables().of(step).taken, call_.world_size));
      if (step + 1 < num_steps_) phases_.publish();
    }
    return WaitStatus::kNone;
  }

  // ---- for begin_step()

  /// As ReduceGather's.
  RINGCOMM_HD void prepare(std::uint32_t step, std::uint64_t phase) {
    StepTables& tables = block_.tables().of(step);
    deal(block_, call_.world_size, [&](int i) {
      if (kIsShared ? i == receiver() : i != call_.rank) {
        const ElemRange bytes = piece(call_.input_bytes[i], step);
        const int k = kIsShared ? 0 : i < call_.rank ? i : i - 1;
        tables.staged[k] = copy_of(phases_.region(call_.rank, phase) + part_offset(call_.rank, i),
                                   call_.inputs[i] + bytes.begin_elems, bytes.num_elems);
      }
      if (step == 0) return;
      const int from = (call_.rank + i) % call_.world_size;
      const ElemRange bytes = piece(call_.output_bytes[from], step - 1);
      prepare_taking(tables, i, bytes,
                     from == call_.rank
                         ? call_.inputs[from] + bytes.begin_elems
                         : phases_.region(from, phase - 1) + part_offset(from, call_.rank));
    });
  }
  RINGCOMM_HD CopyList staged(std::uint32_t step, bool is_lent) const {
    const int num = kIsShared && call_.world_size > 1 ? 1 : call_.world_size - 1;
    return list(block_.tables().of(step).staged, is_lent ? 0 : num);
  }

  RINGCOMM_HD WaitStatus compare() {
    if (const WaitStatus stop = phases_.compare_lent(); stop != WaitStatus::kNone) return stop;
    if (call_.num_slices > 0) return WaitStatus::kNone;
    std::uint64_t longest_bytes = 0;
    const WaitStatus stop = compare_sizes(longest_bytes);
    num_steps_ = steps_of(longest_bytes);
    return stop;
  }

 private:
  /// One more than the block's share of the pieces; 0 where it has none.
  RINGCOMM_HD std::uint32_t steps_of_block() const {
    const std::uint32_t pieces =
        call_.slices_each + (block_.block_idx() < call_.num_longer ? 1 : 0);
    return pieces > 0 ? pieces + 1 : 0;
  }
  /// The same for sizes that the host does not know. There is at least one piece, for the headers.
  RINGCOMM_HD std::uint32_t steps_of(std::uint64_t num_bytes) const {
    const auto pieces =
        static_cast<std::uint32_t>(num_bytes == 0 ? 1 : num_slices(num_bytes, part_bytes_));
    const std::uint32_t block_idx = block_.block_idx();
    if (block_idx >= pieces) return 0;
    return (pieces - block_idx + block_.num_blocks() - 1) / block_.num_blocks() + 1;
  }
  RINGCOMM_HD ElemRange piece(std::uint64_t num_bytes, std::uint32_t step) const {
    return slice_of({0, num_bytes}, block_.block_idx() + std::size_t{step} * block_.num_blocks(),
                    part_bytes_);
  }
  /// The offset in `from`'s region of the part for `to`.
  RINGCOMM_HD std::size_t part_offset(int from, int to) const {
    return kIsShared ? 0 : static_cast<std::size_t>(to < from ? to : to - 1) * part_bytes_;
  }
  RINGCOMM_HD CopyList list(const Copy* copies, int num) const {
    return {copies, num, call_.staged_stride};
  }
  /// If all ranks lend their data: copies it from source to destination.
  RINGCOMM_HD WaitStatus take_lent() {
    RINGCOMM_ROLLED
    for (std::uint32_t step = 1; step < num_steps_; ++step) {
      deal(block_, call_.world_size, [&](int i) {
        const int from = (call_.rank + i) % call_.world_size;
        const ElemRange bytes = piece(call_.output_bytes[from], step - 1);
        const std::byte* const input =
            from == call_.rank ? call_.inputs[from] : block_.tables().lent.inputs[from];
        prepare_taking(block_.tables().of(step), i, bytes, input + bytes.begin_elems);
      });
      // These tables were read two steps ago.
      block_.sync();
      copy_all<Cached::kYes, Cached::kNo>(block_,
                                          list(block_.tables().of(step).taken, call_.world_size));
    }
    return phases_.rejoin();
  }

  /// Copy i of a piece: from the i-th rank, counted from this one.
  RINGCOMM_HD void prepare_taking(StepTables& tables, int i, const ElemRange& bytes,
                                  const std::byte* from) {
    std::byte* const output =
        call_.outputs[(call_.rank + i) % call_.world_size] + bytes.begin_elems;
    tables.taken[i] = copy_of(output, from, from == output ? 0 : bytes.num_elems);
  }
  /// A rank that receives data from this one; any rank if none does.
  RINGCOMM_HD int receiver() const {
    RINGCOMM_ROLLED
    for (int to = 0; to < call_.world_size; ++to)
      if (to != call_.rank && call_.input_bytes[to] != 0) return to;
    return call_.rank == 0 ? 1 : 0;
  }

  /// Whether each pair of ranks agrees on its sizes. All ranks check all pairs, so all get the same
  /// answer and number of pieces.
  RINGCOMM_HD WaitStatus compare_sizes(std::uint64_t& longest_bytes) {
    RINGCOMM_ROLLED
    for (int from = 0; from < call_.world_size; ++from) {
      RINGCOMM_ROLLED
      for (int to = 0; to < call_.world_size; ++to) {
        const std::uint64_t sent_bytes = phases_.header(from).input_bytes[to];
        const std::uint64_t wanted_bytes = phases_.header(to).output_bytes[from];
        if (sent_bytes != wanted_bytes) {
          tell(block_, call_, kSizesDiffer, from == call_.rank ? to : from,
               FewWords{static_cast<std::uint64_t>(to) << 32 | static_cast<std::uint32_t>(from),
                        sent_bytes, wanted_bytes});
          return WaitStatus::kAborted;
        }
        longest_bytes = sent_bytes > longest_bytes ? sent_bytes : longest_bytes;
      }
    }
    return WaitStatus::kNone;
  }

  B& block_;
  const KernelCall& call_;
  Phases<B> phases_;
  std::size_t part_bytes_;
  std::uint32_t num_steps_ = 0;
};

template <bool kIsShared, Block B>
RINGCOMM_HD void move(B& block, const KernelCall& call) {
  run_collective<Move<kIsShared, B>>(block, call);
}

/// A barrier that shows where a GPU places blocks that wait for other ranks: block b writes its
/// multiprocessor to word b of the output, and waits for block b of all ranks.
template <Block B>
class Where {
 public:
  RINGCOMM_HD Where(B& block, const KernelCall& call)
      : block_(block), call_(call), phases_(block, call) {}

  RINGCOMM_HD WaitStatus run() {
    std::uint32_t multiprocessor = 0;  // on a host
#ifdef __CUDA_ARCH__
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
#endif
    if (block_.thread_idx() == 0)
      reinterpret_cast<std::uint32_t*>(call_.outputs[0])[block_.block_idx()] = multiprocessor;
    std::byte* region = nullptr;
    const WaitStatus stop = phases_.open(region, false);
    return stop == WaitStatus::kNone ? phases_.rejoin() : stop;
  }

 private:
  B& block_;
  const KernelCall& call_;
  Phases<B> phases_;
};

template <Block B>
RINGCOMM_HD void where(B& block, const KernelCall& call) {
  run_collective<Where<B>>(block, call);
}

}  // namespace ringcomm::cuda
