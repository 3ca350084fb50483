// Fences of the weak memory, the barriers of clusters, and mbarriers.
#include "ptx/weak_memory.h"

namespace ringcomm::ptx {

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
