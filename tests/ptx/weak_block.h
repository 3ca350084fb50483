#pragma once

#include <array>
#include <mutex>
#include <span>
#include <vector>

#include "ptx/memory.h"
#include "ptx/view.h"

namespace ringcomm::ptx {

u64 mixed(u64 x);  ///< a hash
inline bool is_strong(Order order) { return order != Order::kWeak; }
inline bool acquires(Order order) {
  return order == Order::kAcquire || order == Order::kAcqRel || order == Order::kSeqCst;
}
inline bool releases(Order order) {
  return order == Order::kRelease || order == Order::kAcqRel || order == Order::kSeqCst;
}
inline std::size_t idx_of(Scope scope) { return static_cast<std::size_t>(scope); }

/// Where a thread runs, for scopes. Ranks are on different GPUs.
struct Place {
  u32 gpu = 0;
  u64 cluster = 0;
  u64 cta = 0;

  /// The narrowest scope that has both.
  Scope scope_with(const Place& other) const {
    if (gpu != other.gpu) return Scope::kSys;
    if (cta == other.cta) return Scope::kCta;
    return cluster == other.cluster ? Scope::kCluster : Scope::kGpu;
  }
};

inline constexpr std::size_t kNumScopes = 4;
/// By scope: what operations of that scope or a wider one have released or may still acquire.
using ScopedViews = std::array<ViewRef, kNumScopes>;

class WeakBlock;

struct WeakThread {
  WeakBlock* block = nullptr;
  u32 idx = 0;
  u32 releases = 0;
  bool has_stored = false;  ///< since its last barrier
  ViewRef view;
  ViewRef async_view;    ///< what bulk copies that it issues know
  ScopedViews fenced;    ///< what its stores release since a fence
  ScopedViews observed;  ///< what an acquiring fence acquires
  /// The same of one cell, which an acquiring load of that acquires.
  u64 observed_cell = 0;
  ScopedViews observed_there;
  u32 block_barriers = 0;  ///< that it has passed
  u32 warp_barriers = 0;
};

/// Cells whose last stores the host and other processes do not see yet.
struct PendingCells {
  std::mutex mutex;
  std::vector<u64> addresses;
};

/// A block of a launch while it runs.
class WeakBlock {
 public:
  /// `before`: the barriers and releases of all blocks that had the slot.
  WeakBlock(const Place& where, u32 in_slot, const Stamp& before, u32 num_threads, u64 seed,
            PendingCells& pending_cells);

  const Place place;
  const u32 slot;
  u32 barriers;  ///< of all blocks that had the slot
  std::vector<WeakThread> threads;
  WeakThread copier;      ///< makes the accesses of the block's bulk copies
  PendingCells& pending;  ///< of its GPU

  /// No barrier of the block's threads covers what its copies store.
  Stamp stamp(const WeakThread& thread) const {
    return {slot, thread.idx, &thread == &copier ? ~u32{0} : barriers, thread.releases};
  }
  u64 random();

  /// Called by each thread that has passed a barrier of all threads of the block, whether it is the
  /// first; of its warp.
  bool pass_barrier(WeakThread& thread);
  void pass_warp_barrier(WeakThread& thread);
  /// A barrier of some threads: what all of them know, with their own stores.
  ViewRef view_after_meeting(std::span<WeakThread* const> meeting);

 private:
  u64 random_state_;
  struct Passed {
    u32 num = 0;
    ViewRef view, async_view;
  };
  Passed block_barrier_;
  std::vector<Passed> warp_barriers_;
};

}  // namespace ringcomm::ptx
