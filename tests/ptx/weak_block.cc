// Blocks of the weak memory and their barriers, its fences, barriers of clusters, and mbarriers.
#include "ptx/weak_block.h"

#include "ptx/weak_memory.h"

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

// ---- fences

void WeakMemory::fence(WeakThread& thread, Order order, Scope scope) {
  if (order == Order::kSeqCst) {
    const std::lock_guard lock(fences_mutex_);
    const ViewRef own = with_release(thread.view, thread.block->stamp(thread));
    ++thread.releases;
    thread.view = fences_ = join(fences_, own);
  }
  for (std::size_t s = 0; s <= idx_of(scope) && acquires(order); ++s)
    thread.view = join(thread.view, thread.observed[s]);
  if (!releases(order)) return;
  if (scope == Scope::kSys) write_back_pending(thread.block->pending);
  const ViewRef view = with_release(thread.view, thread.block->stamp(thread));
  ++thread.releases;
  for (std::size_t s = 0; s <= idx_of(scope); ++s) thread.fenced[s] = view;
}

void WeakMemory::fence_proxy(WeakThread& thread) {
  thread.async_view =
      join(thread.async_view, with_release(thread.view, thread.block->stamp(thread)));
  ++thread.releases;
}

// ---- clusters and mbarriers

void WeakMemory::arrive_at_cluster(WeakThread& thread, Order order) {
  const std::lock_guard lock(barriers_mutex_);
  ViewRef& view = clusters_[thread.block->place.cluster];
  view = join(view, thread.fenced[idx_of(Scope::kCluster)]);
  if (!releases(order)) return;
  view = join(view, with_release(thread.view, thread.block->stamp(thread)));
  ++thread.releases;
}

void WeakMemory::pass_cluster(WeakThread& thread, Order order) {
  const std::lock_guard lock(barriers_mutex_);
  if (acquires(order)) thread.view = join(thread.view, clusters_[thread.block->place.cluster]);
}

void WeakMemory::init_mbarrier(WeakThread& thread, u64 address) {
  const std::lock_guard lock(barriers_mutex_);
  const WeakBlock& block = *thread.block;
  mbarriers_[address] = {block.stamp(thread), block.place, nullptr, nullptr};
  thread.has_stored = true;
}

bool WeakMemory::knows_mbarrier(const WeakThread& thread, u64 address) {
  const std::lock_guard lock(barriers_mutex_);
  const Stamp& init = mbarriers_.at(address).init;
  const bool is_own = init.slot == thread.block->slot && init.thread == thread.idx;
  return is_own || (thread.view != nullptr && thread.view->knows(init));
}

void WeakMemory::arrive_at_mbarrier(WeakThread& thread, u64 address, Order order, Scope scope) {
  const std::lock_guard lock(barriers_mutex_);
  Mbarrier& barrier = mbarriers_.at(address);
  const WeakBlock& block = *thread.block;
  const Scope needed = block.place.scope_with(barrier.place);
  if (!releases(order) || scope < needed) return;
  // Copies release what they have stored, not what their thread knows.
  const bool is_copier = &thread == &block.copier;
  const ViewRef view = with_release(is_copier ? nullptr : thread.view, block.stamp(thread));
  ++thread.releases;
  ViewRef& known = needed == Scope::kCta ? barrier.from_block : barrier.from_cluster;
  known = join(known, view);
}

void WeakMemory::pass_mbarrier(WeakThread& thread, u64 address, Order order, Scope scope) {
  const std::lock_guard lock(barriers_mutex_);
  const Mbarrier& barrier = mbarriers_.at(address);
  if (!acquires(order)) return;
  thread.view = join(thread.view, barrier.from_block);
  if (scope >= Scope::kCluster) thread.view = join(thread.view, barrier.from_cluster);
}

}  // namespace ringcomm::ptx
