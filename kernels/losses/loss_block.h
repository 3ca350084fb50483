#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/elements.h"
#include "kernels/losses/loss_call.h"

namespace ringcomm::cuda {

inline constexpr unsigned kWarpThreads = 32, kLossWarps = kLossThreads / kWarpThreads;
static_assert(kLossWarps <= kWarpThreads);

/// A block of kLossThreads threads of a cluster. Its shared memory begins with LossShared.
///
/// - start() is a barrier of all threads of the cluster, sync() one of the block's.
/// - warp_max() and warp_sum() are over a warp, and all of its threads get the result.
/// - send() stores a part at the same place of a block of the cluster, of one of kNumExchanges;
///   await_parts() returns to all threads when every block of the cluster has sent a part.
/// - load() and store() start a copy, by thread 0 only. await_load() returns when the load of that
///   slot and turn is complete; all threads call it for every load in turn (0, 1, 0, 1 for each
///   slot), as await_parts() for each exchange. seal() goes between the threads' writes to shared
///   memory and a store of them. await_stores() returns when all but the newest kNumLeft stores
///   have read their source, and drain_stores() when all are complete.
class GpuRowBlock {
 public:
  __device__ GpuRowBlock() {
    // Logits are read once, so they are evicted first from L2.
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(read_once_));
  }

  __device__ unsigned thread_idx() const { return threadIdx.x; }
#define RINGCOMM_SPECIAL_REGISTER(function, name) \
  __device__ unsigned function() const {          \
    unsigned value;                               \
    asm("mov.u32 %0, %%" name ";" : "=r"(value)); \
    return value;                                 \
  }
  RINGCOMM_SPECIAL_REGISTER(cluster_rank, "cluster_ctarank")
  RINGCOMM_SPECIAL_REGISTER(cluster_blocks, "cluster_nctarank")
  RINGCOMM_SPECIAL_REGISTER(cluster_idx, "clusterid.x")
  RINGCOMM_SPECIAL_REGISTER(num_clusters, "nclusterid.x")
  __device__ static std::byte* shared() {
    extern __shared__ __align__(128) unsigned char memory[];
    return reinterpret_cast<std::byte*>(memory);
  }
  __device__ static LossShared& shared_words() { return *reinterpret_cast<LossShared*>(shared()); }

  __device__ void start() const {
    if (threadIdx.x == 0) {
      for (std::uint64_t& barrier : shared_words().loaded) make_barrier(barrier);
      for (std::uint64_t& barrier : shared_words().exchanged) make_barrier(barrier);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  __device__ void sync() const { __syncthreads(); }

  __device__ float warp_max(float value) const {
    for (int offset = 16; offset > 0; offset /= 2)
      value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
  }
  template <class Number>
  __device__ Number warp_sum(Number value) const {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
  }

  /// The part and its bytes' arrival at the receiver's barrier are one operation.
  __device__ void send(unsigned rank, unsigned exchange, const LossPart& place,
                       const LossPart& part) const {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address_at(rank, &place)),
        "f"(part.max), "f"(part.sum), "f"(part.total), "f"(part.unused),
        "r"(address_at(rank, &shared_words().exchanged[exchange]))
        : "memory");
  }
  __device__ void await_parts(unsigned exchange, unsigned turn) const {
    std::uint64_t& barrier = shared_words().exchanged[exchange];
    if (threadIdx.x == 0) arrive(barrier, cluster_blocks() * unsigned{sizeof(LossPart)});
    // Data from another block is ordered with cluster scope.
    std::uint32_t is_over;
    do {
      asm volatile(
          "{\n.reg .pred over;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%1], %2;\n"
          "selp.u32 %0, 1, 0, over;\n}"
          : "=r"(is_over)
          : "r"(address_of(&barrier)), "r"(turn)
          : "memory");
    } while (is_over == 0);
  }

  __device__ void load(unsigned slot, std::byte* to, const std::byte* from,
                       unsigned num_bytes) const {
    arrive(shared_words().loaded[slot], num_bytes);
    if (num_bytes != 0)
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
          "[%0], [%1], %2, [%3], %4;" ::"r"(address_of(to)),
          "l"(from), "r"(num_bytes), "r"(address_of(&shared_words().loaded[slot])), "l"(read_once_)
          : "memory");
  }
  __device__ void await_load(unsigned slot, unsigned turn) const {
    std::uint32_t is_over;
    do {
      asm volatile(
          "{\n.reg .pred over;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
          "selp.u32 %0, 1, 0, over;\n}"
          : "=r"(is_over)
          : "r"(address_of(&shared_words().loaded[slot])), "r"(turn)
          : "memory");
    } while (is_over == 0);
  }

  /// Makes the threads' writes visible to the copies of the async proxy.
  __device__ void seal() const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
  }
  __device__ void store(std::byte* to, const std::byte* from, unsigned num_bytes) const {
    if (num_bytes != 0)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                   "r"(address_of(from)), "r"(num_bytes)
                   : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  template <int kNumLeft>
  __device__ void await_stores() const {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNumLeft) : "memory");
  }
  __device__ void drain_stores() const {
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

 private:
  __device__ static std::uint32_t address_of(const void* shared) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  }
  /// The address of the same place in another block of the cluster, or in this one.
  __device__ static std::uint32_t address_at(unsigned rank, const void* shared) {
    std::uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address_of(shared)), "r"(rank));
    return there;
  }

  // Each turn of a barrier ends when one thread and the bytes that it announced have arrived.
  __device__ static void make_barrier(std::uint64_t& barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(&barrier)) : "memory");
  }
  __device__ static void arrive(std::uint64_t& barrier, unsigned num_bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(&barrier)),
        "r"(num_bytes)
        : "memory");
  }

  std::uint64_t read_once_ = 0;
};

/// 2^x; 0 where that is less than the smallest normal number.
__device__ inline float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

/// Logits of a type. no_logits is a vector of -infinity.
struct BFloat16Logits : BFloat16Element {
  static constexpr int kPerVector = 8;

  __device__ static Vector no_logits() {
    return {{0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u}};
  }
  __device__ static float get(const Vector& vector, int i) {
    const std::uint32_t word = vector.words[i / 2];
    return bits_as<float>(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
  /// NaN counts for nothing.
  __device__ static float largest(const Vector& vector) {
    std::uint32_t most, other;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(vector.words[0]), "r"(vector.words[1]));
    asm("max.bf16x2 %0, %1, %2;" : "=r"(other) : "r"(vector.words[2]), "r"(vector.words[3]));
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(other));
    return fmaxf(bits_as<float>(most << 16), bits_as<float>(most & 0xffff0000u));
  }
  /// A vector of kPerVector numbers, to nearest even.
  __device__ static Vector vector_of(const float* values) {
    Vector vector;
    RINGCOMM_UNROLL
    for (int i = 0; i < 4; ++i) vector.words[i] = word_of(values[2 * i], values[2 * i + 1]);
    return vector;
  }
  __device__ static std::uint32_t word_of(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

struct FloatLogits {
  using Stored = float;
  static constexpr int kPerVector = 4;

  __device__ static Vector no_logits() {
    return {{0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u}};
  }
  __device__ static float get(const Vector& vector, int i) {
    return bits_as<float>(vector.words[i]);
  }
  __device__ static float largest(const Vector& vector) {
    return fmaxf(fmaxf(get(vector, 0), get(vector, 1)), fmaxf(get(vector, 2), get(vector, 3)));
  }
  __device__ static Vector vector_of(const float* values) {
    Vector vector;
    RINGCOMM_UNROLL
    for (int i = 0; i < 4; ++i) vector.words[i] = bits_as<std::uint32_t>(values[i]);
    return vector;
  }
  __device__ static float load(Stored value) { return value; }
  __device__ static Stored store(float value) { return value; }
};

}  // namespace ringcomm::cuda
