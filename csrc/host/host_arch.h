#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/annotations.h"
#include "core/arch.h"
#include "core/wait_policy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ringcomm::host {

/// Tells a waiting rank whether to go on.
class StopSource {
 public:
  virtual ~StopSource() = default;
  /// Called before every slice of sleep, without locks held, by the one thread that waits.
  virtual WaitStatus stopped(int peer) = 0;
};

/// Cores and a futex: runs the protocols of core between processes (or threads) that share memory.
class HostArch {
 public:
  /// For `rank` of a group.
  HostArch(StopSource& source, int rank) : source_(&source), rank_(rank) {}

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
    if (num_bytes > 0) std::memcpy(to, from, num_bytes);
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
  void pause() const {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");  // a few tens of cycles, where `yield` is one
#endif
  }
  Yielded yield() const;

  /// Sleeps while the low half of `word` is that of `expected`, 20 ms at most.
  void park(std::uint64_t& word, std::uint64_t expected) const;
  void wake(std::uint64_t& word) const;

  void record_core(std::uint32_t& core) const;
  /// Does nothing if ranks share cores, or if no core was recorded.
  void leave_core(const std::uint32_t& core) const;

  WaitStatus stopped(int peer) const { return source_->stopped(peer); }

 private:
  StopSource* source_;
  int rank_;
  SpinBudget budget_;
};
static_assert(Arch<HostArch>);

}  // namespace ringcomm::host
