#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "emulator/block_cache.h"

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
  BlockCache* cache = nullptr;  ///< the block's; null: plain accesses take effect at once
};

/// While it is there, plain accesses of this thread are those of its block. Its end is the block's.
class PlainAccesses {
 public:
  explicit PlainAccesses(BlockContext& context) : context_(context) {
    BlockCache::current = context.cache;
  }
  ~PlainAccesses() {
    BlockCache::current = nullptr;
    if (context_.cache == nullptr) return;
    context_.sync();
    context_.cache->write_back();
  }
  PlainAccesses(const PlainAccesses&) = delete;
  PlainAccesses& operator=(const PlainAccesses&) = delete;

  void release() const {
    if (context_.cache != nullptr) context_.cache->write_back();
  }
  void acquire() const {
    if (context_.cache != nullptr) context_.cache->acquire();
  }

 private:
  BlockContext& context_;
};

/// A kernel of csrc/cuda/kernels, compiled by the host's compiler. It takes one parameter, a struct
/// of `param_bytes`, which each of its threads reads where the launch has copied it to.
struct Kernel {
  const char* name;
  std::size_t param_bytes;
  void (*run)(const void* parameter, BlockContext& context);
};

/// The parameter of a kernel that every image has: calls a function of the host.
struct FunctionCall {
  static constexpr const char* kName = "emulator_function";
  void (*function)(void*);
  void* data;
};

/// Null if there is no kernel of this name.
const Kernel* find_kernel(std::string_view name);

}  // namespace ringcomm::emulator
