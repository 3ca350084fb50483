#pragma once

#include <cstdint>

#include "collectives/cuda/header_words.h"
#include "core/cursor.h"

namespace ringcomm::cuda {

/// What each rank has launched of late, in memory of the host that all have mapped: the hosts find
/// calls that differ so much that their kernels never meet. One writer per rank; entries are
/// overwritten, and a reader who comes late does not compare.
class CallBoard {
 public:
  static constexpr std::uint64_t kNumEntries = 64;

  static std::size_t num_bytes(int world_size) {
    return static_cast<std::size_t>(world_size) * sizeof(RankCalls);
  }

  CallBoard(std::byte* memory, int rank)
      : calls_(reinterpret_cast<RankCalls*>(memory)), rank_(rank) {}

  /// Notes call `number`, from 0 on.
  void note(std::uint64_t number, const HeaderWords& header);
  /// How many a rank has noted.
  std::uint64_t num_noted(int rank) const;
  /// False where it is no longer, or not yet, there.
  bool read(int rank, std::uint64_t number, HeaderWords& header) const;

  /// Turns of ranks that must not wait for each other in kernels: how many this rank has recorded,
  /// and a value that goes with the last.
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
