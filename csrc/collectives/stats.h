#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "collectives/algorithm.h"
#include "collectives/op_kind.h"
#include "collectives/traffic.h"

namespace ringcomm {

/// Counters of one rank, by collective and algorithm. May be read while other threads count.
class Stats {
 public:
  template <class Number>
  struct CountsOf {
    Number num_calls = 0;
    Number sent_bytes = 0;  ///< as in Traffic
    Number copied_bytes = 0;
  };
  using Counts = CountsOf<std::uint64_t>;

  /// Adds a call to these counters and to those of all groups.
  void count(OpKind op, const Traffic& traffic) {
    for (Stats* stats : {this, &process_wide()}) {
      auto& cell =
          stats->cells_[static_cast<std::size_t>(op)][static_cast<std::size_t>(traffic.algorithm)];
      cell.num_calls.fetch_add(1, std::memory_order_relaxed);
      cell.sent_bytes.fetch_add(traffic.sent_bytes, std::memory_order_relaxed);
      cell.copied_bytes.fetch_add(traffic.copied_bytes, std::memory_order_relaxed);
    }
  }

  Counts counts(OpKind op, Algorithm algorithm) const {
    const auto& cell = cells_[static_cast<std::size_t>(op)][static_cast<std::size_t>(algorithm)];
    return {cell.num_calls, cell.sent_bytes, cell.copied_bytes};
  }

  static Stats& process_wide() {
    static Stats stats;
    return stats;
  }

 private:
  std::array<std::array<CountsOf<std::atomic<std::uint64_t>>, kNumAlgorithms>, kNumOpKinds> cells_;
};

}  // namespace ringcomm
