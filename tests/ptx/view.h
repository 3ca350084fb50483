#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ptx/memory.h"

namespace ringcomm::ptx {

/// Who made a store, and when by its own clocks.
struct Stamp {
  u32 slot = kEveryone;  ///< of the block, among those that run
  u32 thread = 0;
  u32 barriers = 0;                          ///< that the block had passed
  u32 releases = 0;                          ///< that the thread had made
  static constexpr u32 kEveryone = ~u32{0};  ///< the host: known to all
};

/// The stores that precede what a thread does next in PTX's causality order: a vector clock with an
/// entry for each block, and for each thread that has released since its block's last barrier.
struct View {
  std::vector<u32> barriers;                  ///< by slot: all stores before that many barriers
  std::vector<std::pair<u64, u32>> releases;  ///< by slot and thread, sorted: those before so many
  /// What strong loads have seen, by cell, sorted: coherence forbids older stores to the cell.
  std::vector<std::pair<u64, u64>> seen;

  static u64 thread_key(u32 slot, u32 thread) { return u64{slot} << 32 | thread; }
  bool knows(const Stamp& stamp) const;
  u64 seen_at(u64 cell) const;
};

using ViewRef = std::shared_ptr<const View>;

/// What either knows. Null knows nothing.
ViewRef join(const ViewRef& a, const ViewRef& b);
ViewRef join_all(std::span<const ViewRef> views);
/// `view` and all stores of a thread before its release with this number.
ViewRef with_release(const ViewRef& view, const Stamp& stamp);
/// `view` and all stores of a block before this many barriers.
ViewRef with_barrier(const ViewRef& view, u32 slot, u32 barriers);
ViewRef with_seen(const ViewRef& view, u64 cell, u64 time);

}  // namespace ringcomm::ptx
