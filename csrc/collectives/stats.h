#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "collectives/collective.h"

namespace ringcomm {

/// Counters of one rank, by collective and algorithm. May be read while other threads count.
class Stats {
 public:
  struct Counts {
    std::uint64_t num_calls = 0;
    std::uint64_t sent_bytes = 0;  ///< bytes that peers consume from this rank
    /// Bytes that this rank wrote where its peers read them, and that it copied from there or from
    /// its own input into its results. What a reduction writes straight into a result is no copy.
    std::uint64_t copied_bytes = 0;
  };

  void count(OpKind op, Algorithm algorithm, std::uint64_t sent_bytes,
             std::uint64_t copied_bytes = 0) {
    Cell& cell = cell_of(op, algorithm);
    cell.num_calls.fetch_add(1, std::memory_order_relaxed);
    cell.sent_bytes.fetch_add(sent_bytes, std::memory_order_relaxed);
    cell.copied_bytes.fetch_add(copied_bytes, std::memory_order_relaxed);
  }

  Counts counts(OpKind op, Algorithm algorithm) const {
    const Cell& cell = cells_[static_cast<std::size_t>(op)][static_cast<std::size_t>(algorithm)];
    return {cell.num_calls.load(std::memory_order_relaxed),
            cell.sent_bytes.load(std::memory_order_relaxed),
            cell.copied_bytes.load(std::memory_order_relaxed)};
  }

  /// The counters of all groups of this process.
  static Stats& process_wide() {
    static Stats stats;
    return stats;
  }

 private:
  struct Cell {
    std::atomic<std::uint64_t> num_calls = 0;
    std::atomic<std::uint64_t> sent_bytes = 0;
    std::atomic<std::uint64_t> copied_bytes = 0;
  };

  Cell& cell_of(OpKind op, Algorithm algorithm) {
    return cells_[static_cast<std::size_t>(op)][static_cast<std::size_t>(algorithm)];
  }

  std::array<std::array<Cell, kNumAlgorithms>, kNumOpKinds> cells_;
};

}  // namespace ringcomm
