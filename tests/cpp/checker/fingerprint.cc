#include <bit>
#include <cstdio>
#include <cstdlib>

#include "memory.h"

namespace ringcomm::checker {
namespace {

// Clocks differ between interleavings long after the difference matters, and would separate
// equivalent states. A clock is only compared with the epochs in the payload's cells. So a rank's
// epoch is relevant only if it is in a cell and not yet known to all ranks that may access the cell
// (knowledge only grows). Of a clock's entry only the number of relevant epochs that it covers
// counts. Later epochs are larger than all these, and known to no rank yet, in both of two merged
// states.

using Epochs = std::array<std::uint64_t, kMaxRanks>;  // per rank a set of epochs below 64

std::uint64_t bit_of(std::uint64_t epoch) {
  if (epoch < 64) return std::uint64_t{1} << epoch;
  std::fprintf(stderr, "checker: a rank published more often than fingerprints can tell\n");
  std::abort();
}

std::uint64_t num_covered(std::uint64_t epochs, std::uint64_t up_to) {
  return static_cast<std::uint64_t>(std::popcount(epochs & (2 * bit_of(up_to) - 1)));
}

std::uint64_t pack(const Clock& clock, const Epochs& relevant) {
  std::uint64_t packed = 0;
  for (int rank = 0; rank < kMaxRanks; ++rank)
    packed = packed << 8 | num_covered(relevant[rank], clock[rank]);
  return packed;
}

}  // namespace

bool Memory::is_known(const CellInfo& info, int rank, std::uint64_t epoch) const {
  for (int other = 0; other < num_ranks_; ++other) {
    if (may_touch(info, other) && state.clocks[other][rank] < epoch) return false;
  }
  return true;
}

std::array<std::uint64_t, kMaxRanks> Memory::relevant_epochs() const {
  Epochs relevant{};
  for (int i = 0; i < num_cells_; ++i) {
    if (is_private(i)) continue;
    const auto& cell = state.cells[i];
    const auto writer = static_cast<int>(cell.writer);
    if (!is_known(cell_infos_[i], writer, cell.write_epoch))
      relevant[writer] |= bit_of(cell.write_epoch);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const std::uint64_t epoch = cell.read_epochs[rank];
      if (epoch != 0 && !is_known(cell_infos_[i], rank, epoch)) relevant[rank] |= bit_of(epoch);
    }
  }
  return relevant;
}

std::uint64_t Memory::hash_cell(std::uint64_t hash, int cell_idx, const Epochs& relevant) const {
  const auto& cell = state.cells[cell_idx];
  hash = mix(hash, cell.value);
  if (is_private(cell_idx)) return hash;
  const CellInfo& info = cell_infos_[cell_idx];
  const auto writer = static_cast<int>(cell.writer);
  std::uint64_t packed = cell.write_epoch == 0 ? 0 : 1;
  if (!is_known(info, writer, cell.write_epoch)) {
    packed = 2 + static_cast<std::uint64_t>(writer) +
             (num_covered(relevant[writer], cell.write_epoch) << 4);
  }
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const std::uint64_t epoch = cell.read_epochs[rank];
    const bool matters = epoch != 0 && !is_known(info, rank, epoch);
    packed = packed << 8 | (matters ? num_covered(relevant[rank], epoch) : 0);
  }
  return mix(hash, packed);
}

std::uint64_t Memory::hash(std::uint64_t hash) const {
  const Epochs relevant = relevant_epochs();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    // A rank knows all its own epochs; only whether the current one is already used matters.
    const bool is_used = (relevant[rank] & bit_of(state.clocks[rank][rank])) != 0;
    hash = mix(hash, pack(state.clocks[rank], relevant) << 1 | (is_used ? 1 : 0));
    const auto& buffer = state.buffers[rank];
    hash = mix(hash, buffer.num_stores);
    for (std::uint64_t i = 0; i < buffer.num_stores; ++i) {
      hash = mix(mix(hash, buffer.stores[i].word_idx), buffer.stores[i].value);
      hash = mix(hash, pack(buffer.stores[i].clock, relevant));
    }
  }
  for (int i = 0; i < num_words_; ++i) {
    hash = mix(hash, state.words[i].value);
    if (i % 2 == 0) hash = mix(hash, pack(state.words[i].clock, relevant));
  }
  for (int i = 0; i < num_cells_; ++i) hash = hash_cell(hash, i, relevant);
  return hash;
}

}  // namespace ringcomm::checker
