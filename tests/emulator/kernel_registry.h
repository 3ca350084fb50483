#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

namespace ringcomm::emulator {

/// What a kernel may ask of the thread that runs it. Threads of a block are threads of this
/// process; sync() is their barrier, which a block of one thread passes at once.
struct BlockContext {
  unsigned thread_idx = 0;
  unsigned num_threads = 1;
  unsigned block_idx = 0;
  unsigned num_blocks = 1;
  std::function<void()> sync;
  /// Shared memory of the block: zeros when it starts.
  void* shared = nullptr;
  static constexpr std::size_t kSharedBytes = 8 << 10;
  /// Of a launch with clusters: this block's place in its cluster, and what each block of it has of
  /// the shared memory that the launch asked for. meet_cluster is a barrier of all its threads.
  unsigned cluster_rank = 0;
  unsigned cluster_blocks = 1;
  std::byte* const* cluster_shared = nullptr;
  std::function<void()> meet_cluster = {};
};

/// A kernel of csrc/device/cuda, compiled by the host's compiler. It takes one parameter, a struct
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

/// Null where there is none of this name.
const Kernel* find_kernel(std::string_view name);

}  // namespace ringcomm::emulator
