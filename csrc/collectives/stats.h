#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "collectives/algorithm.h"
#include "collectives/op_kind.h"
#include "collectives/traffic.h"

namespace ringcomm {

/// Counters of one rank of a group, by collective and algorithm. May be read while other threads
/// count.
class Stats {
 public:
  template <class Number>
  struct CountsOf {
    Number num_calls = 0;
    Number sent_bytes = 0;  ///< as in Traffic
    Number copied_bytes = 0;
  };
  template <class Number>
  using TableOf = std::array<std::array<CountsOf<Number>, kNumAlgorithms>, kNumOpKinds>;
  using Counts = CountsOf<std::uint64_t>;
  using Table = TableOf<std::uint64_t>;  ///< by OpKind and Algorithm

  Stats();
  Stats(const Stats&) = delete;
  Stats& operator=(const Stats&) = delete;
  ~Stats();

  void count(OpKind op, const Traffic& traffic) {
    auto& cell = cells_[static_cast<std::size_t>(op)][static_cast<std::size_t>(traffic.algorithm)];
    cell.num_calls.fetch_add(1, std::memory_order_relaxed);
    cell.sent_bytes.fetch_add(traffic.sent_bytes, std::memory_order_relaxed);
    cell.copied_bytes.fetch_add(traffic.copied_bytes, std::memory_order_relaxed);
  }

  Counts counts(OpKind op, Algorithm algorithm) const {
    const auto& cell = cells_[static_cast<std::size_t>(op)][static_cast<std::size_t>(algorithm)];
    return {cell.num_calls, cell.sent_bytes, cell.copied_bytes};
  }
  void add_to(Table& table) const;

  /// The sums over all groups that this process has made, also those that have ended. A call counts
  /// for its group only: every locked instruction in it delays the ones behind it.
  static Table process_wide();

 private:
  TableOf<std::atomic<std::uint64_t>> cells_;
};

}  // namespace ringcomm
