#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "ptx/weak_block.h"

// Memory as weak as PTX's model allows, but for loads whose values depend on later stores. Every
// store to a cell of 8 bytes stays in its history. A load may take any of them that causality and
// coherence do not forbid: no older one than the newest that the thread's view knows. Release and
// acquire, fences, barriers and the ends of kernels pass views on (docs/design/ptx.md).

namespace ringcomm::ptx {

/// Ends the process: a store that was made early (weak_accesses.cc) should not have been.
[[noreturn]] void end_without_result();

class WeakMemory {
 public:
  explicit WeakMemory(u64 seed) : seed_(seed) { forget(); }

  /// While no kernel runs: what is in memory now is known to all.
  void forget();

  std::unique_ptr<WeakBlock> begin_block(const Place& place, u32 num_threads);
  void end_block(WeakBlock& block);

  /// Of one element, which is within 8 aligned bytes.
  u64 load(WeakThread& thread, u64 address, u32 num_bytes, Order order, Scope scope);
  /// A relaxed store. If it `releases`, no load may acquire it before release_early().
  void store_early(WeakThread& thread, u64 address, u64 value, bool releases);
  void release_early(WeakThread& thread, u64 address, Order order, Scope scope);
  /// `is_shared`: neither the host nor another process will look.
  void store(WeakThread& thread, u64 address, u64 value, u32 num_bytes, Order order, Scope scope,
             bool is_shared = false);
  u64 update(WeakThread& thread, u64 address, u32 num_bytes, Order order, Scope scope,
             const std::function<u64(u64)>& function);
  void fence(WeakThread& thread, Order order, Scope scope);
  void fence_proxy(WeakThread& thread);

  void arrive_at_cluster(WeakThread& thread, Order order);
  void pass_cluster(WeakThread& thread, Order order);

  void init_mbarrier(WeakThread& thread, u64 address);
  bool knows_mbarrier(const WeakThread& thread, u64 address);
  void arrive_at_mbarrier(WeakThread& thread, u64 address, Order order, Scope scope);
  void pass_mbarrier(WeakThread& thread, u64 address, Order order, Scope scope);

 private:
  struct Store {
    u64 time;
    u64 value;  ///< of the whole cell after it
    Stamp by;
    Place place;
    bool is_strong;
    Scope scope;
    std::shared_ptr<const ScopedViews> released;
    bool is_early = false;
  };
  struct Cell {
    std::vector<Store> stores;  ///< the last ones, in coherence order
    u64 in_memory = 0;          ///< what the host and other processes see
    u8 dirty_bytes = 0;         ///< that they do not see yet
  };
  static constexpr u64 kPageBytes = 4096, kCellBytes = 8;
  struct Page {
    std::mutex mutex;
    std::array<std::unique_ptr<Cell>, kPageBytes / kCellBytes> cells;
  };
  Page& page_of(u64 address);
  Cell& cell_for_store(Page& page, u64 address);
  /// Waits while the cell has a store that is early.
  void await_release(u64 address);
  /// Makes a store of the host or another process, if there was one, part of the history.
  void notice_others(Cell& cell, u64 address);
  void write_back(Cell& cell, u64 address);
  void write_back_pending(PendingCells& pending);
  std::size_t choose(WeakThread& thread, const Cell& cell, u64 address, Order order, Scope scope);
  void observe(WeakThread& thread, const Store& store, u64 address, Order order, Scope scope);
  std::shared_ptr<const ScopedViews> released_by(WeakThread& thread, const Cell& cell, Order order,
                                                 Scope scope);
  void append(WeakThread& thread, Cell& cell, u64 address, u64 value, u32 num_bytes, Order order,
              Scope scope, std::shared_ptr<const ScopedViews> released);

  const u64 seed_;
  std::mutex pages_mutex_;
  std::unordered_map<u64, std::unique_ptr<Page>> pages_;
  std::atomic<u64> generation_ = 0;  ///< of the pages

  std::mutex blocks_mutex_;
  struct Slot {
    u32 gpu;
    bool is_in_use;
    Stamp last;  ///< its barriers and releases until now
  };
  std::vector<Slot> slots_;
  u32 num_running_ = 0;
  u64 num_begun_ = 0;
  std::unordered_map<u32, ViewRef> ended_;  ///< by GPU: what its kernels knew that have ended
  std::unordered_map<u32, std::unique_ptr<PendingCells>> pending_;
  /// An mbarrier, which only threads of its own block wait for.
  struct Mbarrier {
    Stamp init;
    Place place;
    ViewRef from_block, from_cluster;
  };
  std::mutex barriers_mutex_;
  std::unordered_map<u64, Mbarrier> mbarriers_;
  std::unordered_map<u64, ViewRef> clusters_;
  std::mutex fences_mutex_;
  ViewRef fences_;  ///< fence.sc are in one order
};

}  // namespace ringcomm::ptx

/// A block's accesses to the weak memory, where RINGCOMM_TEST_PTX_MEMORY has its
/// seed; else null. It is of one process: what another process has stored is seen at once, and what
/// this one stores is seen there late.
///
/// RINGCOMM_TEST_PTX_MUTANT=KERNEL:LINE=CHANGE,... makes instructions in these lines of a kernel's
/// PTX weaker: "weak", "relaxed", "cta", "cluster" or "gpu" in place of their order or scope.
/// "none" is a fence that orders nothing, and a barrier at which threads meet without order; "skip"
/// a barrier that is not there. RINGCOMM_TEST_PTX_LINES=FILE gets the kernel and line of every
/// instruction that could be weakened and was executed.
namespace ringcomm::ptx::weak {

std::unique_ptr<Memory> begin_block(const Launch& launch);
/// Between two groups of ranks, whose memory may be the same.
void forget_stores();

}  // namespace ringcomm::ptx::weak
