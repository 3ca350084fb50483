#include "ptx/weak_memory.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace ringcomm::ptx {
namespace {

constexpr std::size_t kMaxStores = 8;  // of a cell's history

u64 physical(u64 cell) {
  return __atomic_load_n(reinterpret_cast<const u64*>(cell), __ATOMIC_ACQUIRE);
}

/// The bytes of `value`, `num_bytes` at `offset`, in place of those of `cell`.
u64 composed(u64 cell, u64 value, u32 offset, u32 num_bytes) {
  std::memcpy(reinterpret_cast<char*>(&cell) + offset, &value, num_bytes);
  return cell;
}
u64 extracted(u64 cell, u32 offset, u32 num_bytes) {
  u64 value = 0;
  std::memcpy(&value, reinterpret_cast<const char*>(&cell) + offset, num_bytes);
  return value;
}

}  // namespace

// ---- blocks

std::unique_ptr<WeakBlock> WeakMemory::begin_block(const Place& place, u32 num_threads) {
  const std::lock_guard lock(blocks_mutex_);
  if (num_running_++ == 0) {
    mbarriers_.clear();
    clusters_.clear();
  }
  // A view of a slot's last block is one of all before, which the stream of their GPU orders.
  auto free = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& each) {
    return !each.is_in_use && each.gpu == place.gpu;
  });
  if (free == slots_.end())
    free = slots_.insert(free, {place.gpu, false, {static_cast<u32>(slots_.size()), 0, 0, 0}});
  free->is_in_use = true;
  std::unique_ptr<PendingCells>& pending = pending_[place.gpu];
  if (pending == nullptr) pending = std::make_unique<PendingCells>();
  auto block = std::make_unique<WeakBlock>(place, free->last.slot, free->last, num_threads,
                                           seed_ * 1'000'003 + ++num_begun_, *pending);
  const ViewRef& ended = ended_[place.gpu];
  for (WeakThread& thread : block->threads) thread.view = thread.async_view = ended;
  block->copier.view = ended;
  return block;
}

void WeakMemory::end_block(WeakBlock& block) {
  write_back_pending(block.pending);
  const std::lock_guard lock(blocks_mutex_);
  const WeakThread& copier = block.copier;
  ViewRef& ended = ended_[block.place.gpu];
  std::vector<ViewRef> views{ended};
  Stamp& last = slots_[block.slot].last;
  for (const WeakThread& thread : block.threads) {
    views.push_back(thread.view);
    last.releases = std::max(last.releases, thread.releases);
  }
  last.releases = std::max(last.releases, copier.releases) + 1;
  last.barriers = ++block.barriers;
  ended =
      with_release(with_barrier(join_all(views), block.slot, block.barriers), block.stamp(copier));
  slots_[block.slot].is_in_use = false;
  --num_running_;
}

void WeakMemory::forget() {
  static std::atomic<u64> last_generation = 0;  // of all memories: threads keep pages
  const std::scoped_lock lock(blocks_mutex_, pages_mutex_);
  pages_.clear();
  ended_.clear();
  generation_ = ++last_generation;
}

// ---- cells

WeakMemory::Page& WeakMemory::page_of(u64 address) {
  struct Known {
    u64 generation = 0;
    u64 number = 0;
    Page* page = nullptr;
  };
  static thread_local std::array<Known, 64> known;
  const u64 number = address / kPageBytes;
  Known& entry = known[number % known.size()];
  const u64 generation = generation_.load(std::memory_order_acquire);
  if (entry.generation == generation && entry.number == number) return *entry.page;
  const std::lock_guard lock(pages_mutex_);
  std::unique_ptr<Page>& page = pages_[number];
  if (page == nullptr) page = std::make_unique<Page>();
  entry = {generation, number, page.get()};
  return *page;
}

WeakMemory::Cell& WeakMemory::cell_for_store(Page& page, u64 address) {
  std::unique_ptr<Cell>& cell = page.cells[address % kPageBytes / kCellBytes];
  if (cell == nullptr) {
    cell = std::make_unique<Cell>();
    cell->in_memory = physical(address);
    cell->stores.push_back({0, cell->in_memory, {}, {}, false, Scope::kSys, nullptr});
  }
  notice_others(*cell, address);
  return *cell;
}

void WeakMemory::notice_others(Cell& cell, u64 address) {
  const u64 now = physical(address);
  if (now == cell.in_memory) return;
  u64 value = cell.stores.back().value;
  for (u32 i = 0; i < kCellBytes; ++i) {
    if (extracted(now, i, 1) == extracted(cell.in_memory, i, 1)) continue;
    value = composed(value, extracted(now, i, 1), i, 1);
    cell.dirty_bytes &= static_cast<u8>(~(1u << i));
  }
  cell.in_memory = now;
  cell.stores.push_back({cell.stores.back().time + 1, value, {}, {}, false, Scope::kSys, nullptr});
}

void WeakMemory::write_back(Cell& cell, u64 address) {
  notice_others(cell, address);
  const u64 value = cell.stores.back().value;
  const auto put = [&]<class Word>(u32 offset, Word) {
    const auto word = static_cast<Word>(extracted(value, offset, sizeof(Word)));
    __atomic_store_n(reinterpret_cast<Word*>(address + offset), word, __ATOMIC_RELEASE);
    cell.in_memory = composed(cell.in_memory, word, offset, sizeof word);
  };
  // As wide as they were stored, so that no atomic word tears.
  if (cell.dirty_bytes == 0xff) {
    put(0, u64{});
  } else {
    for (const u32 half : {0u, 4u}) {
      const u32 dirty = cell.dirty_bytes >> half & 0xf;
      if (dirty == 0xf) put(half, u32{});
      for (u32 i = 0; i < 4 && dirty != 0xf; ++i)
        if (dirty >> i & 1) put(half + i, u8{});
    }
  }
  cell.dirty_bytes = 0;
}

void WeakMemory::write_back_pending(PendingCells& pending) {
  std::vector<u64> addresses;
  {
    const std::lock_guard lock(pending.mutex);
    addresses.swap(pending.addresses);
  }
  for (const u64 address : addresses) {
    Page& page = page_of(address);
    const std::lock_guard lock(page.mutex);
    write_back(*page.cells[address % kPageBytes / kCellBytes], address);
  }
}

// ---- accesses

std::size_t WeakMemory::choose(WeakThread& thread, const Cell& cell, u64 address, Order order,
                               Scope scope) {
  WeakBlock& block = *thread.block;
  const auto& stores = cell.stores;
  const u64 seen = thread.view == nullptr ? 0 : thread.view->seen_at(address);
  const auto is_known = [&](const Store& store) {
    return store.time <= seen || store.by.slot == Stamp::kEveryone ||
           (store.by.slot == block.slot && store.by.thread == thread.idx) ||
           (thread.view != nullptr && thread.view->knows(store.by));
  };
  const std::size_t newest = stores.size() - 1;
  std::size_t oldest = newest;
  while (oldest > 0 && !is_known(stores[oldest])) --oldest;
  if (oldest == newest) return newest;
  // What strong loads see in the end: morally strong stores. Others may stay hidden for ever.
  std::size_t promised = oldest;
  for (std::size_t i = newest; i > oldest && is_strong(order); --i) {
    const Scope needed = block.place.scope_with(stores[i].place);
    if (!stores[i].is_strong || stores[i].scope < needed || scope < needed) continue;
    promised = i;
    break;
  }
  const u64 line = address / 32;
  const bool is_hidden =
      mixed(seed_ + mixed(line * 64 + block.slot) + stores[oldest].time) % 4 == 0;
  const std::size_t last = is_hidden ? promised : newest;
  return block.random() % 2 == 0 ? last : oldest + block.random() % (last - oldest + 1);
}

void WeakMemory::observe(WeakThread& thread, const Store& store, u64 address, Order order,
                         Scope scope) {
  if (!is_strong(order) || store.by.slot == Stamp::kEveryone) return;
  const WeakBlock& block = *thread.block;
  const Scope needed = block.place.scope_with(store.place);
  if (!store.is_strong || store.scope < needed || scope < needed) return;
  const bool is_own = store.by.slot == block.slot && store.by.thread == thread.idx;
  if (!is_own && (thread.view == nullptr || !thread.view->knows(store.by)))
    thread.view = with_seen(thread.view, address, store.time);
  if (thread.observed_cell != address) {
    thread.observed_cell = address;
    thread.observed_there = {};
  }
  if (store.released != nullptr)
    for (ScopedViews* views : {&thread.observed, &thread.observed_there}) {
      ViewRef& view = (*views)[idx_of(needed)];
      view = join(view, (*store.released)[idx_of(needed)]);
    }
  if (!acquires(order)) return;
  if (store.is_early) end_without_result();
  for (std::size_t s = 0; s <= idx_of(scope); ++s)
    thread.view = join(thread.view, thread.observed_there[s]);
}

std::shared_ptr<const ScopedViews> WeakMemory::released_by(WeakThread& thread, const Cell& cell,
                                                           Order order, Scope scope) {
  if (!is_strong(order)) return nullptr;
  const WeakBlock& block = *thread.block;
  ScopedViews views = thread.fenced;
  const auto add = [&](const ScopedViews& more) {
    for (std::size_t s = 0; s < kNumScopes; ++s) views[s] = join(views[s], more[s]);
  };
  // A thread's strong stores after a release of the same word release that too.
  for (const Store& store : cell.stores)
    if (store.by.slot == block.slot && store.by.thread == thread.idx && store.released != nullptr)
      add(*store.released);
  if (releases(order)) {
    ScopedViews own;
    const ViewRef view = with_release(thread.view, block.stamp(thread));
    for (std::size_t s = 0; s <= idx_of(scope); ++s) own[s] = view;
    add(own);
  }
  if (views[0] == nullptr) return nullptr;
  return std::make_shared<ScopedViews>(std::move(views));
}

void WeakMemory::append(WeakThread& thread, Cell& cell, u64 address, u64 value, u32 num_bytes,
                        Order order, Scope scope, std::shared_ptr<const ScopedViews> released) {
  const u32 offset = address % kCellBytes;
  const Store& before = cell.stores.back();
  cell.stores.push_back({before.time + 1, composed(before.value, value, offset, num_bytes),
                         thread.block->stamp(thread), thread.block->place, is_strong(order), scope,
                         std::move(released)});
  if (cell.stores.size() > kMaxStores) cell.stores.erase(cell.stores.begin());
  cell.dirty_bytes |= static_cast<u8>(((1u << num_bytes) - 1) << offset);
  thread.has_stored = true;
  if (releases(order)) ++thread.releases;
}

u64 WeakMemory::load(WeakThread& thread, u64 address, u32 num_bytes, Order order, Scope scope) {
  const u32 offset = address % kCellBytes;
  const u64 begin = address - offset;
  if (acquires(order) && scope == Scope::kSys) await_release(begin);
  Page& page = page_of(begin);
  const std::lock_guard lock(page.mutex);
  Cell* const cell = page.cells[begin % kPageBytes / kCellBytes].get();
  if (cell == nullptr) return extracted(physical(begin), offset, num_bytes);
  notice_others(*cell, begin);
  const Store& store = cell->stores[choose(thread, *cell, begin, order, scope)];
  const u64 value = extracted(store.value, offset, num_bytes);
  observe(thread, store, begin, order, scope);
  return value;
}

void WeakMemory::store(WeakThread& thread, u64 address, u64 value, u32 num_bytes, Order order,
                       Scope scope, bool is_shared) {
  const u64 begin = address / kCellBytes * kCellBytes;
  if (releases(order) && scope == Scope::kSys) write_back_pending(thread.block->pending);
  {
    Page& page = page_of(begin);
    const std::lock_guard lock(page.mutex);
    Cell& cell = cell_for_store(page, begin);
    append(thread, cell, address, value, num_bytes, order, scope,
           released_by(thread, cell, order, scope));
    if (is_shared || (is_strong(order) && scope == Scope::kSys)) return write_back(cell, begin);
  }
  const std::lock_guard lock(thread.block->pending.mutex);
  thread.block->pending.addresses.push_back(begin);
}

void WeakMemory::store_early(WeakThread& thread, u64 address, u64 value, bool releases) {
  Page& page = page_of(address);
  const std::lock_guard lock(page.mutex);
  Cell& cell = cell_for_store(page, address);
  append(thread, cell, address, value, sizeof value, Order::kRelaxed, Scope::kSys, nullptr);
  cell.stores.back().is_early = releases;
  write_back(cell, address);
}

void WeakMemory::release_early(WeakThread& thread, u64 address, Order order, Scope scope) {
  if (releases(order) && scope == Scope::kSys) write_back_pending(thread.block->pending);
  Page& page = page_of(address);
  const std::lock_guard lock(page.mutex);
  Cell& cell = cell_for_store(page, address);
  auto released = released_by(thread, cell, order, scope);
  ++thread.releases;
  for (Store& store : cell.stores) {
    if (!store.is_early) continue;
    store.is_early = false;
    store.released = released;
  }
}

void WeakMemory::await_release(u64 address) {
  constexpr int kMostLooks = 2000;
  for (int i = 0; i < kMostLooks; ++i) {
    {
      Page& page = page_of(address);
      const std::lock_guard lock(page.mutex);
      const Cell* const cell = page.cells[address % kPageBytes / kCellBytes].get();
      if (cell == nullptr || std::none_of(cell->stores.begin(), cell->stores.end(),
                                          [](const Store& store) { return store.is_early; }))
        return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  end_without_result();
}

void end_without_result() {
  std::fputs("ptx: a store was made early and could not have been\n", stderr);
  std::_Exit(77);
}

u64 WeakMemory::update(WeakThread& thread, u64 address, u32 num_bytes, Order order, Scope scope,
                       const std::function<u64(u64)>& function) {
  const u32 offset = address % kCellBytes;
  const u64 begin = address - offset;
  if (releases(order) && scope == Scope::kSys) write_back_pending(thread.block->pending);
  Page& page = page_of(begin);
  const std::lock_guard lock(page.mutex);
  Cell& cell = cell_for_store(page, begin);
  write_back(cell, begin);
  u64 before = cell.in_memory;
  // Other processes change the word too.
  for (;;) {
    const u64 after =
        composed(before, function(extracted(before, offset, num_bytes)), offset, num_bytes);
    if (__atomic_compare_exchange_n(reinterpret_cast<u64*>(begin), &before, after, false,
                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
      break;
    notice_others(cell, begin);
  }
  const Store last = cell.stores.back();
  const u64 value = extracted(before, offset, num_bytes);
  observe(thread, last, begin, order, scope);
  // A chain of updates keeps what the first one released.
  auto released = released_by(thread, cell, order, scope);
  if (last.released != nullptr && last.is_strong) {
    auto both = std::make_shared<ScopedViews>(*last.released);
    for (std::size_t s = 0; released != nullptr && s < kNumScopes; ++s)
      (*both)[s] = join((*both)[s], (*released)[s]);
    released = both;
  }
  append(thread, cell, address, function(value), num_bytes, order, scope, std::move(released));
  cell.in_memory = cell.stores.back().value;
  cell.dirty_bytes = 0;
  return value;
}

}  // namespace ringcomm::ptx
