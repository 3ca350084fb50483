#pragma once

#include <cstdint>

#include "core/arch.h"
#include "cuda/collectives/header_words.h"

namespace ringcomm::cuda {

/// The recent launches of each rank, in host memory that all ranks map. Hosts compare them to find
/// calls whose kernels differ so much that they never exchange headers. One writer per rank;
/// entries are overwritten, and a late reader skips the comparison.
class CallBoard {
 public:
  static constexpr std::uint64_t kNumEntries = 64;

  static std::size_t num_bytes(int world_size) {
    return static_cast<std::size_t>(world_size) * sizeof(RankCalls);
  }

  CallBoard(std::byte* memory, int rank)
      : calls_(reinterpret_cast<RankCalls*>(memory)), rank_(rank) {}

  /// Records call `number`, counted from 0.
  void note(std::uint64_t number, const HeaderWords& header);
  /// How many a rank has noted.
  std::uint64_t num_noted(int rank) const;
  /// False where it is no longer, or not yet, there.
  bool read(int rank, std::uint64_t number, HeaderWords& header) const;

  /// For ranks that must not wait for each other in kernels: the number of turns that this rank has
  /// recorded, and a value that belongs to the last one.
  void finish_turn(std::uint64_t num_turns, std::uint64_t value);
  std::uint64_t num_turns(int rank) const;
  std::uint64_t turn_value(int rank, std::uint64_t turn) const;

 private:
  struct Entry {
    std::uint64_t number_and_state;  ///< 2 * (number + 1), odd while it is written
    HeaderWords header;
  };
  struct alignas(kLineBytes) RankCalls {
    std::uint64_t num_noted;
    alignas(kLineBytes) std::uint64_t num_turns;
    std::uint64_t turn_values[2];
    alignas(kLineBytes) Entry entries[kNumEntries];
  };

  RankCalls& of(int rank) const { return calls_[rank]; }

  RankCalls* calls_;
  int rank_;
};

}  // namespace ringcomm::cuda
