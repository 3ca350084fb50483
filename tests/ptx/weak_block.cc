#include "ptx/weak_block.h"

#include <algorithm>

namespace ringcomm::ptx {
namespace {

constexpr u32 kWarpThreads = 32;

}  // namespace

u64 mixed(u64 x) {
  x ^= x >> 31, x *= 0x7fb5d329728ea185u;
  x ^= x >> 27, x *= 0x81dadef4bc2dd44du;
  return x ^ x >> 33;
}

WeakBlock::WeakBlock(const Place& where, u32 in_slot, const Stamp& before, u32 num_threads,
                     u64 seed, PendingCells& pending_cells)
    : place(where),
      slot(in_slot),
      barriers(before.barriers),
      threads(num_threads),
      pending(pending_cells),
      random_state_(mixed(seed) | 1),
      warp_barriers_((num_threads + kWarpThreads - 1) / kWarpThreads) {
  for (u32 i = 0; i <= num_threads; ++i) {
    WeakThread& thread = i < num_threads ? threads[i] : copier;
    thread.block = this;
    thread.idx = i;
    thread.releases = before.releases;
  }
}

u64 WeakBlock::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_ >> 11;
}

// The first thread to pass finds all others as they were when they arrived.
bool WeakBlock::pass_barrier(WeakThread& thread) {
  const bool is_first = thread.block_barriers++ == block_barrier_.num;
  if (is_first) {
    ++block_barrier_.num;
    std::vector<ViewRef> views, async_views;
    for (WeakThread& each : threads) {
      views.push_back(each.view);
      async_views.push_back(each.async_view);
      each.has_stored = false;
    }
    block_barrier_.view = with_barrier(join_all(views), slot, ++barriers);
    block_barrier_.async_view = join_all(async_views);
  }
  thread.view = block_barrier_.view;
  thread.async_view = block_barrier_.async_view;
  return is_first;
}

void WeakBlock::pass_warp_barrier(WeakThread& thread) {
  Passed& barrier = warp_barriers_[thread.idx / kWarpThreads];
  if (thread.warp_barriers++ == barrier.num) {
    ++barrier.num;
    std::vector<WeakThread*> warp;
    const u32 first = thread.idx / kWarpThreads * kWarpThreads;
    for (u32 i = first; i < first + kWarpThreads && i < threads.size(); ++i)
      warp.push_back(&threads[i]);
    barrier.view = view_after_meeting(warp);
    std::vector<ViewRef> async_views;
    for (const WeakThread* each : warp) async_views.push_back(each->async_view);
    barrier.async_view = join_all(async_views);
  }
  thread.view = barrier.view;
  thread.async_view = barrier.async_view;
}

ViewRef WeakBlock::view_after_meeting(std::span<WeakThread* const> meeting) {
  std::vector<ViewRef> views;
  for (const WeakThread* thread : meeting) views.push_back(thread->view);
  ViewRef view = join_all(views);
  for (WeakThread* thread : meeting) {
    if (!thread->has_stored) continue;
    view = with_release(view, stamp(*thread));
    ++thread->releases;
    thread->has_stored = false;
  }
  return view;
}

}  // namespace ringcomm::ptx
