#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "core/wait_policy.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/memory.h"
#include "emulator/kernel_registry.h"

namespace ringcomm::emulator {

/// A block of a GPU on threads of the host: gpu_block.cuh in terms of this machine. What a GPU
/// orders by its barriers and by acquire and release, this does with a barrier of threads and the
/// host's atomics, so that ThreadSanitizer sees what is ordered by nothing.
class HostBlock {
 public:
  /// `answers` belongs to the whole block.
  struct Shared {
    std::uint32_t answers[2];
    std::uint32_t agreed;
    cuda::Tables tables;
  };

  HostBlock(const cuda::GroupFrame& call, BlockContext& context, Shared& shared)
      : call_(call), context_(context), shared_(shared) {}
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  unsigned thread_idx() const { return context_.thread_idx; }
  unsigned num_threads() const { return context_.num_threads; }
  unsigned block_idx() const { return context_.block_idx; }
  unsigned num_blocks() const { return context_.num_blocks; }
  void sync() const { context_.sync(); }

  cuda::Tables& tables() const { return shared_.tables; }

  template <class F>
  WaitStatus once(const F& function) {
    turn_ ^= 1;
    if (context_.thread_idx == 0) shared_.answers[turn_] = static_cast<std::uint32_t>(function());
    context_.sync();
    return static_cast<WaitStatus>(shared_.answers[turn_]);
  }
  template <class F>
  WaitStatus each(int num, const F& function) {
    WaitStatus stop = WaitStatus::kNone;
    for (auto i = static_cast<int>(thread_idx()); i < num && stop == WaitStatus::kNone;
         i += static_cast<int>(num_threads()))
      stop = function(i);
    return agree(stop);
  }
  WaitStatus agree(WaitStatus stop) {
    if (stop != WaitStatus::kNone)
      __atomic_store_n(
          &shared_.agreed,
          static_cast<std::uint32_t>(stop) | static_cast<std::uint32_t>(awaited_peer_ + 1) << 8,
          __ATOMIC_RELAXED);
    context_.sync();
    const std::uint32_t agreed = __atomic_load_n(&shared_.agreed, __ATOMIC_RELAXED);
    context_.sync();
    if (agreed == 0) return WaitStatus::kNone;
    if (thread_idx() == 0) __atomic_store_n(&shared_.agreed, 0u, __ATOMIC_RELAXED);
    context_.sync();
    awaited_peer_ = static_cast<int>(agreed >> 8) - 1;
    return static_cast<WaitStatus>(agreed & 0xff);
  }

  WaitStatus look_until(const Cursor& cursor, std::uint64_t target, int peer) {
    return cuda::look_until_at_least(*this, cursor, target, peer);
  }
  std::uint64_t load_relaxed(const std::uint64_t& word) const {
    return __atomic_load_n(&word, __ATOMIC_RELAXED);
  }
  std::uint64_t load_acquire(const std::uint64_t& word) const {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
  }
  std::uint64_t load_seq_cst(const std::uint64_t& word) const { return load_relaxed(word); }
  std::uint32_t load_seq_cst(const std::uint32_t&) const { return 0; }
  void add_seq_cst(std::uint32_t&, std::int32_t) const {}
  void store_seq_cst(std::uint64_t& word, std::uint64_t value) const {
    context_.sync();
    if (context_.thread_idx == 0) store_release(word, value);
  }
  template <class WordOf>
  void store_seq_cst_each(int num, const WordOf& word_of, std::uint64_t value) const {
    context_.sync();
    for (auto i = static_cast<int>(thread_idx()); i < num; i += static_cast<int>(num_threads()))
      store_release(word_of(i), value);
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
    cuda::copy_by_threads(*this, static_cast<std::byte*>(to), static_cast<const std::byte*>(from),
                          static_cast<std::uint32_t>(num_bytes));
  }

  SpinBudget budget() const { return {}; }
  /// Yields, and now and then sleeps. If waiting threads only yielded, Linux 6.18 sometimes ran
  /// nothing else on the machine, not even the rank that they waited for, until they timed out
  /// (docs/decisions.md).
  void pause() {
    if (++num_pauses_ % kYieldsASleep != 0) return static_cast<void>(sched_yield());
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  Yielded yield() const { return Yielded::kShort; }
  void park(const std::uint64_t&, std::uint64_t) const {}
  void wake(const std::uint64_t&) const {}
  void record_core(std::uint32_t&) const {}
  void leave_core(const std::uint32_t&) const {}

  WaitStatus stopped(int peer) {
    using Clock = std::chrono::steady_clock;
    awaited_peer_ = peer;
    const auto now_ns = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
    call_.control->record_wait(peer, static_cast<std::uint32_t>(now_ns >> 10) | 1);
    if (__atomic_load_n(&call_.control->abort, __ATOMIC_RELAXED) != 0) return WaitStatus::kAborted;
    if (began_ == Clock::time_point{}) began_ = Clock::now();
    return Clock::now() - began_ > std::chrono::nanoseconds(call_.timeout_ns) ? WaitStatus::kTimeout
                                                                              : WaitStatus::kNone;
  }
  int awaited_peer() const { return awaited_peer_; }
  void record_awaited(int peer) { awaited_peer_ = peer; }

  // Not stronger than on a GPU, so that ThreadSanitizer detects code that relies on more.
  bool claim(std::uint32_t& word) const {
    return __atomic_exchange_n(&word, 1u, __ATOMIC_RELAXED) == 0;
  }
  void unclaim(std::uint32_t& word) const { __atomic_store_n(&word, 0u, __ATOMIC_RELAXED); }
  void publish_word(std::uint32_t& word, std::uint32_t value) const { store_release(word, value); }

 private:
  template <class Word>
  void store_release(Word& word, Word value) const {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
  }

  const cuda::GroupFrame& call_;
  BlockContext& context_;
  Shared& shared_;
  unsigned turn_ = 0;
  static constexpr unsigned kYieldsASleep = 100;

  std::chrono::steady_clock::time_point began_;
  unsigned num_pauses_ = 0;
  int awaited_peer_ = -1;
};

static_assert(cuda::Block<HostBlock>);

}  // namespace ringcomm::emulator
