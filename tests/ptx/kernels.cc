// The kernels of nvcc's PTX in place of those of the host's compiler (tests/emulator/kernels.cc).

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>

#include "cuda/kernels/call.h"
#include "emulator/kernel_registry.h"
#include "kernels/losses/loss_call.h"
#include "ptx/counts.h"
#include "ptx/machine.h"
#include "ptx/weak_memory.h"

namespace ringcomm::emulator {
namespace {

using ptx::Launch;
using ptx::u32;

/// The first thread that the emulator gives to a block runs all of its fibers.
void run(const Kernel& entry, const void* parameter, BlockContext& context) {
  if (context.thread_idx != 0) return;
  const ptx::Kernel& kernel = *static_cast<const ptx::Kernel*>(entry.code);
  if (kernel.static_shared_bytes != 0 && context.shared_bytes != 0) {
    std::fprintf(stderr, "ptx: %s has shared memory of its own and of its launch\n", kernel.name);
    std::abort();
  }
  // The memory of .shared variables, for a launch that brings none: anything is in it.
  ptx::AlignedBytes memory(kernel.static_shared_bytes, std::byte{0xab});
  std::byte* const shared = memory.data();
  Launch launch{.kernel = &kernel,
                .params = parameter,
                .ntid = {context.block_width, context.block_height, 1},
                .ctaid = {context.block_idx, 0, 0},
                .nctaid = {context.num_blocks, 1, 1},
                .cluster_shared = &shared,
                .shared_bytes = kernel.static_shared_bytes};
  // Ranks are on different GPUs: no narrower scope than .sys has two of them.
  static_assert(sizeof(cuda::LossCall) < sizeof(cuda::GroupFrame));
  if (kernel.param_bytes >= sizeof(cuda::GroupFrame))
    launch.gpu = static_cast<u32>(static_cast<const cuda::GroupFrame*>(parameter)->rank);
  // A test that calls a kernel without the driver gives it one part of a block.
  if (context.block_width == 0) launch.ntid = {cuda::kBlockThreads, 1, 1};
  if (kernel.static_shared_bytes == 0) {
    launch.cluster_rank = context.cluster_rank;
    launch.cluster_blocks = context.cluster_blocks;
    launch.cluster_shared = context.cluster_shared;
    launch.shared_bytes = static_cast<u32>(context.shared_bytes);
    launch.meet_cluster = context.meet_cluster;
  }
  ptx::run_block(launch);
}

}  // namespace

const Kernel* find_kernel(std::string_view name) {
  static std::mutex mutex;
  static std::map<const ptx::Kernel*, Kernel> entries;
  const ptx::Kernel* const kernel = ptx::find_translated(name);
  if (kernel == nullptr) return nullptr;
  const std::lock_guard lock(mutex);
  const Kernel entry{kernel->name, kernel->param_bytes, run, kernel, true};
  return &entries.try_emplace(kernel, entry).first->second;
}

}  // namespace ringcomm::emulator

namespace ringcomm::ptx {

std::unique_ptr<Memory> begin_block(const Launch& launch) {
  if (auto counted = begin_counted_block(launch)) return counted;
  if (auto weak = weak::begin_block(launch)) return weak;
  return std::make_unique<Memory>();
}

}  // namespace ringcomm::ptx
