#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/annotations.h"
#include "core/arch.h"
#include "core/wait_policy.h"
#include "host/thread_pool.h"
#include "host/ticks.h"
#include "host/wait.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ringcomm::host {

/// Cores and a futex: runs the protocols of core between processes (or threads) that share memory.
class HostArch {
 public:
  /// For `rank` of a group, whose waits end by `guard` and are recorded there. With `thread_pool`,
  /// these copy.
  HostArch(WaitGuard& guard, int rank, ThreadPool* thread_pool = nullptr)
      : guard_(&guard), rank_(rank), thread_pool_(thread_pool) {}

  std::uint64_t load_acquire(const std::uint64_t& word) const {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
  }
  std::uint64_t load_seq_cst(const std::uint64_t& word) const {
    return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
  }
  std::uint32_t load_seq_cst(const std::uint32_t& word) const {
    return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
  }
  void store_seq_cst(std::uint64_t& word, std::uint64_t value) const {
    RINGCOMM_STEP("before a cursor advances");
    __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
    RINGCOMM_STEP("after a cursor advanced, before sleepers wake");
  }
  void add_seq_cst(std::uint32_t& word, std::int32_t delta) const {
    __atomic_fetch_add(&word, static_cast<std::uint32_t>(delta), __ATOMIC_SEQ_CST);
  }

  // Not of every Arch: for SurvivorProtocol.
  void set_first(std::uint64_t& word, std::uint64_t value) const {
    RINGCOMM_STEP("before a choice");
    std::uint64_t none = 0;
    __atomic_compare_exchange_n(&word, &none, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  }
  std::uint64_t read_once(const std::uint64_t& word) const { return load_acquire(word); }

  void copy(void* to, const void* from, std::size_t num_bytes) const {
    const auto part = [&](std::size_t begin, std::size_t end) {
      std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                  end - begin);
    };
    if (num_bytes == 0) return;
    if (thread_pool_ != nullptr)
      thread_pool_->split(num_bytes, 1, part);
    else
      part(0, num_bytes);
  }

  template <class F>
  WaitStatus once(const F& function) const {
    return function();
  }
  template <class F>
  WaitStatus each(int num, const F& function) const {
    WaitStatus stop = WaitStatus::kNone;
    for (int i = 0; i < num && stop == WaitStatus::kNone; ++i) stop = function(i);
    return stop;
  }

  /// Shared by all waits of a rank, since whether spinning pays is the same for all.
  SpinBudget& budget() { return budget_; }
  void pause() {
    if (++num_pauses_ == kPausesWithoutClock) begin_ticks_ = ticks();
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");  // a few tens of cycles, where `yield` is one
#endif
  }
  Yielded yield();

  /// Sleeps while the low half of `word` is that of `expected`, 20 ms at most.
  void park(std::uint64_t& word, std::uint64_t expected) const;
  void wake(std::uint64_t& word) const;

  void record_core(std::uint32_t& core) const;
  /// Does nothing if ranks share cores, or if no core was recorded.
  void leave_core(const std::uint32_t& core) const;

  WaitStatus stopped(int peer) {
    start_clock();
    guard_->record(peer, begin_ticks_, 0);
    return guard_->check(peer);
  }

  /// A wait that does not end at once. It reads the clock only after some pauses: one that ends
  /// before is not recorded.
  class Wait {
   public:
    Wait(HostArch& arch, int peer) : arch_(arch), peer_(peer) {
      arch.num_pauses_ = 0;
      arch.begin_ticks_ = 0;
    }
    ~Wait() {
      if (arch_.begin_ticks_ != 0) [[unlikely]]
        arch_.guard_->record(peer_, arch_.begin_ticks_, ticks());
    }

   private:
    HostArch& arch_;
    int peer_;
  };
  Wait record_wait(int peer) { return {*this, peer}; }

 private:
  static constexpr std::uint32_t kPausesWithoutClock = 64;  // 2 us

  void start_clock() {
    if (begin_ticks_ == 0) begin_ticks_ = ticks();
  }

  WaitGuard* guard_;
  int rank_;
  ThreadPool* thread_pool_;
  SpinBudget budget_;
  // Of the wait.
  std::uint32_t num_pauses_ = 0;
  std::uint64_t begin_ticks_ = 0;  // 0 until the clock is read
};
static_assert(Arch<HostArch>);

}  // namespace ringcomm::host
