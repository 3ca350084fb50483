#pragma once

#include <cstdint>

#include "core/wait_policy.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/call.h"

namespace ringcomm::cuda {

/// The threads of a block of CUDA. What a thread has acquired is ordered
/// before what the others do after a barrier, and what they did before it before what one releases
/// after it (docs/design/gpu.md).
class GpuBlock {
 public:
  // In memory that the threads of a block share.
  struct Shared {
    volatile std::uint32_t began;  ///< to wait; 0: not yet
    volatile std::uint32_t asked;
    volatile std::uint32_t stop;  ///< the value that a thread received
    std::uint32_t answers[2];     ///< in turn: a thread that has not read one never sees the next
    std::uint32_t agreed;
    volatile std::int32_t awaited_peer;
    Tables tables;
  };

  __device__ GpuBlock(const GroupFrame& call, Shared& shared) : call_(call), shared_(shared) {
    if (threadIdx.x == 0) {
      shared.began = 0;
      shared.asked = 0;
      shared.stop = 0;
      shared.awaited_peer = -1;
    }
    sync();
  }

  __device__ unsigned thread_idx() const { return threadIdx.x; }
  __device__ unsigned num_threads() const { return kBlockThreads; }
  __device__ unsigned block_idx() const { return blockIdx.x; }
  __device__ unsigned num_blocks() const { return gridDim.x; }
  __device__ void sync() const { __syncthreads(); }
  __device__ Tables& tables() const { return shared_.tables; }

  template <class F>
  __device__ WaitStatus once(const F& function) {
    turn_ ^= 1;
    if (threadIdx.x == 0) shared_.answers[turn_] = static_cast<std::uint32_t>(function());
    sync();
    return static_cast<WaitStatus>(shared_.answers[turn_]);
  }
  /// For `num` up to the threads of a block.
  template <class F>
  __device__ WaitStatus each(int num, const F& function) {
    WaitStatus stop = WaitStatus::kNone;
    if (static_cast<int>(threadIdx.x) < num) stop = function(static_cast<int>(threadIdx.x));
    return agree(stop);
  }
  __device__ WaitStatus agree(WaitStatus stop) {
    if (__syncthreads_or(static_cast<int>(stop)) == 0) return WaitStatus::kNone;
    // If several threads write, the last one wins.
    if (stop != WaitStatus::kNone) shared_.agreed = static_cast<std::uint32_t>(stop);
    sync();
    const std::uint32_t agreed = shared_.agreed;
    sync();
    return static_cast<WaitStatus>(agreed);
  }

  __device__ WaitStatus look_until(const Cursor& cursor, std::uint64_t target, int peer) {
    return look_until_at_least(*this, cursor, target, peer);
  }
  __device__ std::uint64_t load_relaxed(const std::uint64_t& word) const {
    std::uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");
    return value;
  }
  __device__ std::uint64_t load_acquire(const std::uint64_t& word) const {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");
    return value;
  }
  /// Threads of a GPU do not sleep, so no store needs an order with a later load.
  __device__ std::uint64_t load_seq_cst(const std::uint64_t& word) const {
    return load_relaxed(word);
  }
  __device__ std::uint32_t load_seq_cst(const std::uint32_t&) const { return 0; }
  __device__ void add_seq_cst(std::uint32_t&, std::int32_t) const {}
  __device__ void store_seq_cst(std::uint64_t& word, std::uint64_t value) const {
    store_seq_cst_each(1, [&](int) -> std::uint64_t& { return word; }, value);
  }
  /// A thread for each: one fence of their warp, and all stores after it.
  template <class WordOf>
  __device__ void store_seq_cst_each(int num, const WordOf& word_of, std::uint64_t value) const {
    sync();
    if (static_cast<int>(threadIdx.x) < num)
      store_release(word_of(static_cast<int>(threadIdx.x)), value);
  }

  __device__ void store_packet(Packet& packet, std::uint64_t low, std::uint64_t high) const {
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(&packet), "l"(low), "l"(high)
                 : "memory");
  }
  __device__ void load_packet(const Packet& packet, std::uint64_t& low, std::uint64_t& high) const {
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(low), "=l"(high)
                 : "l"(&packet)
                 : "memory");
  }

  __device__ void copy(void* to, const void* from, std::size_t num_bytes) const {
    copy_by_threads(*this, static_cast<std::byte*>(to), static_cast<const std::byte*>(from),
                    static_cast<std::uint32_t>(num_bytes));
  }

  __device__ SpinBudget budget() const { return {}; }
  __device__ void pause() const {}
  __device__ Yielded yield() const { return Yielded::kCoreIdle; }
  __device__ void park(const std::uint64_t&, std::uint64_t) const {}
  __device__ void wake(const std::uint64_t&) const {}
  __device__ void record_core(std::uint32_t&) const {}
  __device__ void leave_core(const std::uint32_t&) const {}

  /// Asks now and then whether to go on. The answer to one thread is valid for all of the block.
  __device__ WaitStatus stopped(int peer) {
    if (shared_.stop != 0) return static_cast<WaitStatus>(shared_.stop);
    std::uint64_t now_ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns));
    const std::uint32_t now = static_cast<std::uint32_t>(now_ns >> kTickBits) | 1;
    if (shared_.began == 0) shared_.began = shared_.asked = now;
    if (now - shared_.asked < kAskEveryTicks) return WaitStatus::kNone;
    shared_.asked = now;
    WaitStatus stop = WaitStatus::kNone;
    if (ask(peer, now))
      stop = WaitStatus::kAborted;
    else if (std::uint64_t{now - shared_.began} << kTickBits > call_.timeout_ns)
      stop = WaitStatus::kTimeout;
    if (stop != WaitStatus::kNone) {
      shared_.stop = static_cast<std::uint32_t>(stop);
      record_awaited(peer);
    }
    return stop;
  }
  __device__ int awaited_peer() const { return shared_.awaited_peer; }
  __device__ void record_awaited(int peer) { shared_.awaited_peer = peer; }

  __device__ bool claim(std::uint32_t& word) const { return atomicExch_system(&word, 1u) == 0; }
  __device__ void unclaim(std::uint32_t& word) const {
    *static_cast<volatile std::uint32_t*>(&word) = 0;
  }
  __device__ void publish_word(std::uint32_t& word, std::uint32_t value) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&word), "r"(value) : "memory");
  }

 private:
  // Times are in ticks of 65.5 us; a register holds three days.
  static constexpr int kTickBits = 16;
  static constexpr std::uint32_t kAskEveryTicks = 8;

  /// Whether the host ends all waits. One block of the rank at a time asks, over PCIe, and tells
  /// the others: on an H200 the questions of all blocks, each for itself, were most of a long
  /// call's time (docs/decisions.md).
  __device__ bool ask(int peer, std::uint32_t now) const {
    RankWords& words = call_.staging.words(call_.rank);
    if (load_relaxed(words.is_aborted) != 0) return true;
    const std::uint32_t last = load_relaxed(words.asked_at);
    const bool is_recent = now - last < kAskEveryTicks || last - now < kAskEveryTicks;
    if (is_recent || atomicCAS(&words.asked_at, last, now) != last) return false;
    call_.control->record_wait(peer, now);
    if (load_relaxed(call_.control->abort) == 0) return false;
    *static_cast<volatile std::uint32_t*>(&words.is_aborted) = 1;
    return true;
  }
  __device__ static std::uint32_t load_relaxed(const std::uint32_t& word) {
    std::uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(&word));
    return value;
  }

  __device__ static void store_release(std::uint64_t& word, std::uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&word), "l"(value) : "memory");
  }

  const GroupFrame& call_;
  Shared& shared_;
  unsigned turn_ = 0;
};

static_assert(Block<GpuBlock>);

}  // namespace ringcomm::cuda

/// (body) without its parentheses, which keep commas of template arguments together.
#define RINGCOMM_BARE(...) __VA_ARGS__

/// The parameter stays in constant memory: indexed at run time, a copy would go to local memory.
/// `min_blocks` of a multiprocessor limit the registers: 64 of a kernel with 4, 128 with 2.
#define RINGCOMM_GPU_KERNEL_OF(min_blocks, name, Call, body)                                \
  extern "C" __global__ void __launch_bounds__(::ringcomm::cuda::kBlockThreads, min_blocks) \
      name(const __grid_constant__::ringcomm::cuda::Call call) {                            \
    __shared__::ringcomm::cuda::GpuBlock::Shared shared;                                    \
    ::ringcomm::cuda::GpuBlock block(call, shared);                                         \
    RINGCOMM_BARE body(block, call);                                                        \
  }
#define RINGCOMM_GPU_KERNEL(name, Call, body) RINGCOMM_GPU_KERNEL_OF(4, name, Call, body)
#define RINGCOMM_WIDE_GPU_KERNEL(name, Call, body) RINGCOMM_GPU_KERNEL_OF(2, name, Call, body)
