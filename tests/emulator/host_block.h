#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>

#include "core/wait_policy.h"
#include "device/cuda/block.h"
#include "device/cuda/call.h"
#include "device/cuda/memory.h"
#include "emulator/kernel_registry.h"

namespace ringcomm::emulator {

/// A block of a GPU on threads of the host: gpu_block.cuh in terms of this machine. What a GPU
/// orders by its barriers and by acquire and release, this does with a barrier of threads and the
/// host's atomics, so that ThreadSanitizer sees what is ordered by nothing.
class HostBlock {
 public:
  /// `answers` is of the whole block.
  struct Shared {
    std::uint32_t answers[2] = {};
    std::uint32_t any[2] = {};
  };

  HostBlock(const cuda::GroupFrame& call, BlockContext& context, Shared& shared)
      : call_(call), context_(context), shared_(shared) {}

  unsigned thread_idx() const { return context_.thread_idx; }
  unsigned num_threads() const { return context_.num_threads; }
  unsigned block_idx() const { return context_.block_idx; }
  unsigned num_blocks() const { return context_.num_blocks; }
  void sync() const { context_.sync(); }

  bool any(bool value) {
    any_turn_ ^= 1;
    std::uint32_t& answer = shared_.any[any_turn_];
    if (value) __atomic_store_n(&answer, 1u, __ATOMIC_RELAXED);
    context_.sync();
    const bool result = __atomic_load_n(&answer, __ATOMIC_RELAXED) != 0;
    context_.sync();
    if (context_.thread_idx == 0) __atomic_store_n(&answer, 0u, __ATOMIC_RELAXED);
    return result;
  }

  template <class F>
  Stop once(const F& function) {
    turn_ ^= 1;
    if (context_.thread_idx == 0) shared_.answers[turn_] = static_cast<std::uint32_t>(function());
    context_.sync();
    return static_cast<Stop>(shared_.answers[turn_]);
  }

  std::uint64_t load_acquire(const std::uint64_t& word) const {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
  }
  std::uint64_t load_seq_cst(const std::uint64_t& word) const { return load_acquire(word); }
  std::uint32_t load_seq_cst(const std::uint32_t&) const { return 0; }
  void add_seq_cst(std::uint32_t&, std::int32_t) const {}
  void store_seq_cst(std::uint64_t& word, std::uint64_t value) const {
    context_.sync();
    if (context_.thread_idx == 0) __atomic_store_n(&word, value, __ATOMIC_RELEASE);
  }

  void store_packet(Packet& packet, std::uint64_t low, std::uint64_t high) const {
    __atomic_store_n(&packet.low, low, __ATOMIC_RELAXED);
    __atomic_store_n(&packet.high, high, __ATOMIC_RELAXED);
  }
  void load_packet(const Packet& packet, std::uint64_t& low, std::uint64_t& high) const {
    low = __atomic_load_n(&packet.low, __ATOMIC_RELAXED);
    high = __atomic_load_n(&packet.high, __ATOMIC_RELAXED);
  }

  void copy(void* to, const void* from, std::size_t num_bytes) const {
    cuda::copy_by_block(*this, to, from, num_bytes);
  }

  SpinBudget budget() const { return {}; }
  void pause() const { sched_yield(); }
  Yielded yield() const {
    sched_yield();
    return Yielded::kBriefly;
  }
  void park(const std::uint64_t&, std::uint64_t) const { sched_yield(); }
  void wake(const std::uint64_t&) const {}
  void note_core(std::uint32_t&) const {}
  void leave_core(const std::uint32_t&) const {}

  Stop stopped(int peer) {
    using Clock = std::chrono::steady_clock;
    awaited_peer_ = peer;
    call_.control->note_wait(peer);
    if (__atomic_load_n(&call_.control->abort, __ATOMIC_ACQUIRE) != 0) return Stop::kAborted;
    if (began_ == Clock::time_point{}) began_ = Clock::now();
    return Clock::now() - began_ > std::chrono::nanoseconds(call_.timeout_ns) ? Stop::kTimeout
                                                                              : Stop::kNone;
  }
  int awaited_peer() const { return awaited_peer_; }
  void note_awaited(int peer) { awaited_peer_ = peer; }

  bool claim(std::uint32_t& word) const {
    return __atomic_exchange_n(&word, 1u, __ATOMIC_ACQ_REL) == 0;
  }
  void unclaim(std::uint32_t& word) const { __atomic_store_n(&word, 0u, __ATOMIC_RELEASE); }
  void publish_word(std::uint32_t& word, std::uint32_t value) const {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
  }

 private:
  const cuda::GroupFrame& call_;
  BlockContext& context_;
  Shared& shared_;
  unsigned turn_ = 0;
  unsigned any_turn_ = 0;
  std::chrono::steady_clock::time_point began_;
  int awaited_peer_ = -1;
};

static_assert(cuda::Block<HostBlock>);

}  // namespace ringcomm::emulator
