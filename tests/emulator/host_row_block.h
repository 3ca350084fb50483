#pragma once

#include <sched.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "cuda/kernels/loss_call.h"
#include "emulator/kernel_registry.h"

namespace ringcomm::emulator {

/// A block of a cluster on threads of the host: gpu_row_block.cuh in terms of this machine. A load
/// writes its slot as early as a GPU may, when it begins; a store reads its slot as late as may be,
/// when it is waited for. The words that are barriers on a GPU count here.
template <unsigned kVectors>
class HostRowBlock {
 public:
  static constexpr unsigned kWarpThreads = 1;
  static constexpr unsigned kVectorsPerThread = kVectors;

  explicit HostRowBlock(BlockContext& context) : context_(context) {}

  unsigned thread_idx() const { return context_.thread_idx; }
  unsigned num_threads() const { return context_.num_threads; }
  unsigned cluster_rank() const { return context_.cluster_rank; }
  unsigned cluster_blocks() const { return context_.cluster_blocks; }
  unsigned cluster_idx() const { return context_.block_idx / context_.cluster_blocks; }
  unsigned num_clusters() const { return context_.num_blocks / context_.cluster_blocks; }
  std::byte* shared() const { return context_.cluster_shared[context_.cluster_rank]; }

  void start() const {
    if (context_.thread_idx == 0) {
      for (std::uint64_t& count : shared_words(cluster_rank()).loaded) count = 0;
      for (std::uint64_t& count : shared_words(cluster_rank()).exchanged) count = 0;
    }
    context_.meet_cluster();
  }
  void sync() const { context_.sync(); }
  float warp_max(float value) const { return value; }
  template <class Number>
  Number warp_sum(Number value) const {
    return value;
  }

  void send(unsigned rank, unsigned exchange, cuda::LossPart& place,
            const cuda::LossPart& part) const {
    const auto offset = reinterpret_cast<std::byte*>(&place) - shared();
    std::memcpy(context_.cluster_shared[rank] + offset, &part, sizeof part);
    __atomic_fetch_add(&shared_words(rank).exchanged[exchange], 1, __ATOMIC_RELEASE);
  }
  void await_parts(unsigned exchange, unsigned turn) {
    await(shared_words(cluster_rank()).exchanged[exchange], parts_awaited_[exchange], turn,
          cluster_blocks());
  }

  void load(unsigned slot, std::byte* to, const std::byte* from, unsigned num_bytes) const {
    std::vector<std::byte> loaded(num_bytes);
    read_with_neighbours(loaded.data(), from, num_bytes);
    std::memcpy(to, loaded.data(), num_bytes);
    __atomic_fetch_add(&shared_words(cluster_rank()).loaded[slot], 1, __ATOMIC_RELEASE);
  }
  void await_load(unsigned slot, unsigned turn) {
    await(shared_words(cluster_rank()).loaded[slot], loads_awaited_[slot], turn, 1);
  }

  void seal() const { context_.sync(); }
  void store(std::byte* to, const std::byte* from, unsigned num_bytes) {
    stores_.push_back({to, from, num_bytes});
  }
  template <int kNumLeft>
  void await_stores() {
    while (stores_.size() > kNumLeft) {
      std::memcpy(stores_.front().to, stores_.front().from, stores_.front().num_bytes);
      stores_.pop_front();
    }
  }
  void drain_stores() { await_stores<0>(); }

 private:
  struct Store {
    std::byte* to;
    const std::byte* from;
    unsigned num_bytes;
  };

  /// The first and last vector of a row have neighbours' elements, which another block may be
  /// writing. What is read of them is used for nothing, so ThreadSanitizer need not see it.
  [[gnu::no_sanitize("thread")]] static void read_with_neighbours(std::byte* to,
                                                                  const std::byte* from,
                                                                  unsigned num_bytes) {
    const volatile std::byte* bytes = from;
    for (unsigned i = 0; i < num_bytes; ++i) to[i] = bytes[i];
  }

  cuda::LossShared& shared_words(unsigned rank) const {
    return *reinterpret_cast<cuda::LossShared*>(context_.cluster_shared[rank]);
  }
  /// A GPU's barrier knows the last turn and the present one only: a wait for another is an error.
  static void await(const std::uint64_t& count, std::uint64_t& num_awaited, unsigned turn,
                    std::uint64_t counts_per_turn) {
    if (turn != num_awaited++ % 2) std::abort();
    while (__atomic_load_n(&count, __ATOMIC_ACQUIRE) < num_awaited * counts_per_turn) sched_yield();
  }

  BlockContext& context_;
  std::array<std::uint64_t, cuda::kNumRowSlots> loads_awaited_ = {};
  std::array<std::uint64_t, cuda::kNumExchanges> parts_awaited_ = {};
  std::deque<Store> stores_;  // of thread 0
};


}  // namespace ringcomm::emulator
