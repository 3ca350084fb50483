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
/// With kIsShared a rank has the same for all who get anything, and stages it once.
template <bool kIsShared, Block B>
class Move {
 public:
  RINGCOMM_HD Move(B& block, const KernelCall& call)
      : block_(block),
        call_(call),
        phases_(block, call),
        part_bytes_(move_part_bytes(call.staging.layout, kIsShared)) {}

  RINGCOMM_HD Stop run() {
    // Where sizes may differ from rank to rank, the first piece of every block tells them.
    const bool is_known = call_.longest_bytes != KernelCall::kUnknown;
    std::size_t num_pieces = is_known ? pieces_of(call_.longest_bytes) : block_.num_blocks();
    std::uint32_t step = 0;
    for (std::size_t piece_idx = block_.block_idx(); piece_idx < num_pieces;
         piece_idx += block_.num_blocks(), ++step) {
      const bool is_first = step == 0;
      if (does(call_, step))
        if (const Stop stop = stage(piece_idx, is_first); stop != Stop::kNone) return stop;
      if (!does(call_, step + 1)) continue;
      if (const Stop stop = phases_.wait_all(is_first); stop != Stop::kNone) return stop;
      if (is_first && !is_known) {
        std::uint64_t longest_bytes = 0;
        if (const Stop stop = compare_sizes(longest_bytes); stop != Stop::kNone) return stop;
        num_pieces = pieces_of(longest_bytes);
      }
      take(piece_idx);
    }
    return Stop::kNone;
  }

 private:
  /// At least one, which has the headers.
  RINGCOMM_HD std::size_t pieces_of(std::uint64_t num_bytes) const {
    return num_bytes == 0 ? 1 : num_slices(num_bytes, part_bytes_);
  }
  RINGCOMM_HD ElemRange piece(std::uint64_t num_bytes, std::size_t piece_idx) const {
    return slice_of({0, num_bytes}, piece_idx, part_bytes_);
  }
  /// Where in `from`'s region the part for `to` lies.
  RINGCOMM_HD std::size_t part_offset(int from, int to) const {
    return kIsShared ? 0 : static_cast<std::size_t>(to < from ? to : to - 1) * part_bytes_;
  }

  RINGCOMM_HD Stop stage(std::size_t piece_idx, bool is_first) {
    std::byte* region = nullptr;
    if (const Stop stop = phases_.open(region, is_first); stop != Stop::kNone) return stop;
    for (int to = 0; to < call_.world_size; ++to) {
      if (to == call_.rank || call_.input_bytes[to] == 0) continue;
      const ElemRange bytes = piece(call_.input_bytes[to], piece_idx);
      block_.copy(region + part_offset(call_.rank, to), call_.inputs[to] + bytes.begin_elems,
                  bytes.num_elems);
      if (kIsShared) break;
    }
    phases_.publish();
    return Stop::kNone;
  }

  RINGCOMM_HD void take(std::size_t piece_idx) {
    for (int distance = 0; distance < call_.world_size; ++distance) {
      const int from = (call_.rank + distance) % call_.world_size;
      const ElemRange bytes = piece(call_.output_bytes[from], piece_idx);
      if (bytes.num_elems == 0) continue;
      std::byte* output = call_.outputs[from] + bytes.begin_elems;
      const std::byte* source = from == call_.rank
                                    ? call_.inputs[from] + bytes.begin_elems
                                    : phases_.region(from) + part_offset(from, call_.rank);
      if (source != output) block_.copy(output, source, bytes.num_elems);
    }
  }

  /// Whether each pair agrees on how much it moves. All ranks look at all pairs, so that all come
  /// to one answer, and to one number of pieces.
  RINGCOMM_HD Stop compare_sizes(std::uint64_t& longest_bytes) {
    for (int from = 0; from < call_.world_size; ++from) {
      for (int to = 0; to < call_.world_size; ++to) {
        const std::uint64_t sent_bytes = phases_.heading(from).input_bytes[to];
        const std::uint64_t wanted_bytes = phases_.heading(to).output_bytes[from];
        if (sent_bytes != wanted_bytes) {
          const std::uint32_t words[kHeaderWords] = {
              static_cast<std::uint32_t>(from),
              static_cast<std::uint32_t>(to),
              static_cast<std::uint32_t>(sent_bytes),
              static_cast<std::uint32_t>(sent_bytes >> 32),
              static_cast<std::uint32_t>(wanted_bytes),
              static_cast<std::uint32_t>(wanted_bytes >> 32)};
          tell(block_, call_, kSizesDiffer, from == call_.rank ? to : from, words);
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
