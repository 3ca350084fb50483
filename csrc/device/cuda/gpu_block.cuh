#pragma once

#include <cstdint>

#include "core/wait_policy.h"
#include "device/cuda/block.h"
#include "device/cuda/call.h"
#include "device/cuda/memory.h"

namespace ringcomm::cuda {

/// A block of threads of a GPU. Thread 0 waits and publishes for all: what it has acquired is
/// ordered before what the others do after the barrier, and what they did before the barrier is
/// ordered before what it releases.
class GpuBlock {
 public:
  /// `answers` is shared memory of the block, for two answers in turn: the threads that have not
  /// read one yet and the one that writes the next never meet.
  __device__ GpuBlock(const GroupFrame& call, volatile std::uint32_t* answers)
      : call_(call), answers_(answers) {}

  __device__ unsigned thread_idx() const { return threadIdx.x; }
  __device__ unsigned num_threads() const { return blockDim.x; }
  __device__ unsigned block_idx() const { return blockIdx.x; }
  __device__ unsigned num_blocks() const { return gridDim.x; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool any(bool value) const { return __syncthreads_or(value) != 0; }

  template <class F>
  __device__ Stop once(const F& function) {
    turn_ ^= 1;
    if (threadIdx.x == 0) answers_[turn_] = static_cast<std::uint32_t>(function());
    __syncthreads();
    return static_cast<Stop>(answers_[turn_]);
  }

  __device__ std::uint64_t load_acquire(const std::uint64_t& word) const {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");
    return value;
  }
  /// Nobody sleeps on a GPU, so no store needs an order with a later load.
  __device__ std::uint64_t load_seq_cst(const std::uint64_t& word) const {
    return load_acquire(word);
  }
  __device__ std::uint32_t load_seq_cst(const std::uint32_t&) const { return 0; }
  __device__ void add_seq_cst(std::uint32_t&, std::int32_t) const {}
  __device__ void store_seq_cst(std::uint64_t& word, std::uint64_t value) const {
    __syncthreads();
    if (threadIdx.x == 0)
      asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&word), "l"(value) : "memory");
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
    copy_by_block(*this, to, from, num_bytes);
  }

  __device__ SpinBudget budget() const { return {}; }
  __device__ void pause() const {}
  __device__ Yielded yield() const {
    __nanosleep(20);
    return Yielded::kToNobody;
  }
  __device__ void park(const std::uint64_t&, std::uint64_t) const { __nanosleep(100); }
  __device__ void wake(const std::uint64_t&) const {}
  __device__ void note_core(std::uint32_t&) const {}
  __device__ void leave_core(const std::uint32_t&) const {}

  __device__ Stop stopped(int peer) {
    awaited_peer_ = peer;
    call_.control->note_wait(peer);
    std::uint32_t abort;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(abort) : "l"(&call_.control->abort));
    if (abort != 0) return Stop::kAborted;
    std::uint64_t now_ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns));
    if (began_ns_ == 0) began_ns_ = now_ns;
    return now_ns - began_ns_ > call_.timeout_ns ? Stop::kTimeout : Stop::kNone;
  }
  __device__ int awaited_peer() const { return awaited_peer_; }
  __device__ void note_awaited(int peer) { awaited_peer_ = peer; }

  __device__ bool claim(std::uint32_t& word) const { return atomicExch_system(&word, 1u) == 0; }
  __device__ void unclaim(std::uint32_t& word) const {
    *static_cast<volatile std::uint32_t*>(&word) = 0;
  }
  __device__ void publish_word(std::uint32_t& word, std::uint32_t value) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&word), "r"(value) : "memory");
  }

 private:
  const GroupFrame& call_;
  volatile std::uint32_t* answers_;
  unsigned turn_ = 0;
  std::uint64_t began_ns_ = 0;
  int awaited_peer_ = -1;
};

}  // namespace ringcomm::cuda
