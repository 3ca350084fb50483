#pragma once

#include <array>
#include <barrier>
#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

namespace ringcomm::emulator {

/// The interface between a kernel and the thread that runs it. Threads of a block are threads of
/// this process; sync() is their barrier, which returns at once in a block of one thread.
struct BlockContext {
  unsigned thread_idx = 0;
  unsigned num_threads = 1;
  unsigned block_idx = 0;
  unsigned num_blocks = 1;
  std::function<void()> sync;
  /// Shared memory of the block: zeros when it starts.
  void* shared = nullptr;
  static constexpr std::size_t kSharedBytes = 8 << 10;
  /// For a launch with clusters: this block's rank in its cluster, and the shared memory of each
  /// block of the cluster. meet_cluster is a barrier of all threads of the cluster.
  unsigned cluster_rank = 0;
  unsigned cluster_blocks = 1;
  std::byte* const* cluster_shared = nullptr;
  std::function<void()> meet_cluster = {};
  /// Of the launch; a width of 0: a test calls the kernel without one.
  unsigned block_width = 0;
  unsigned block_height = 1;
  std::size_t shared_bytes = 0;  ///< of each block in cluster_shared
};

/// The state that the threads of a cluster of blocks share; without clusters, the threads of one
/// block.
class ClusterState {
 public:
  ClusterState(unsigned num_blocks, unsigned num_threads, std::size_t shared_bytes)
      : num_threads_(num_threads),
        shared_bytes_(shared_bytes),
        all_(static_cast<std::ptrdiff_t>(num_blocks * num_threads)) {
    for (unsigned rank = 0; rank < num_blocks; ++rank) {
      blocks_.push_back(std::make_unique<Block>(num_threads, shared_bytes));
      shared_.push_back(blocks_.back()->launch_memory.get());
    }
  }
  unsigned num_blocks() const { return static_cast<unsigned>(blocks_.size()); }

  /// The context of a thread of the cluster's block `rank`, in a grid of `num_clusters` clusters.
  BlockContext context(unsigned cluster, unsigned num_clusters, unsigned rank, unsigned thread) {
    Block& block = *blocks_[rank];
    return {.thread_idx = thread,
            .num_threads = num_threads_,
            .block_idx = cluster * num_blocks() + rank,
            .num_blocks = num_clusters * num_blocks(),
            .sync = [&block] { block.barrier.arrive_and_wait(); },
            .shared = block.memory.data(),
            .cluster_rank = rank,
            .cluster_blocks = num_blocks(),
            .cluster_shared = shared_.data(),
            .meet_cluster = [this] { all_.arrive_and_wait(); },
            .shared_bytes = shared_bytes_};
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete[](memory, kAlignment); }
  };
  static constexpr std::align_val_t kAlignment{128};
  struct Block {
    Block(unsigned num_threads, std::size_t shared_bytes)
        : barrier(static_cast<std::ptrdiff_t>(num_threads)),
          launch_memory(new (kAlignment) std::byte[shared_bytes]) {}
    std::barrier<> barrier;
    alignas(16) std::array<std::byte, BlockContext::kSharedBytes> memory = {};
    std::unique_ptr<std::byte[], Free> launch_memory;
  };

  unsigned num_threads_;
  std::size_t shared_bytes_;
  std::barrier<> all_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::byte*> shared_;
};

/// A kernel of csrc/cuda/kernels, compiled by the host's compiler or, for tests/ptx, by nvcc. It
/// takes one parameter, a struct of `param_bytes`, which each of its threads reads where the launch
/// has copied it to.
struct Kernel {
  const char* name;
  std::size_t param_bytes;
  void (*body)(const Kernel& kernel, const void* parameter, BlockContext& context);
  const void* code = nullptr;  ///< for a body that several kernels share
  /// One thread runs all threads of a block, of every threadIdx.y.
  bool runs_whole_blocks = false;

  void run(const void* parameter, BlockContext& context) const { body(*this, parameter, context); }
};

/// The parameter of a kernel that every image has: calls a function of the host.
struct FunctionCall {
  static constexpr const char* kName = "emulator_function";
  void (*function)(void*);
  void* data;
};

/// Null if there is no kernel of this name.
const Kernel* find_kernel(std::string_view name);
/// The same for the kernels of benchmarks/gpu/probe, which are no part of ringcomm.
const Kernel* find_probe_kernel(std::string_view name);

}  // namespace ringcomm::emulator
