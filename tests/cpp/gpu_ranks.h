#pragma once

// Kernels of GPUs on threads: ranks, their blocks, and the blocks' threads are threads of one
// process, on one memory, where ThreadSanitizer sees all that nothing orders.

#include <array>
#include <barrier>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "collectives/cuda/header_words.h"
#include "collectives/cuda/launch_plan.h"
#include "device/cuda/call.h"
#include "emulator/kernel_registry.h"

namespace ringcomm::testing {

/// Runs a kernel to its end.
inline void run_kernel(const std::string& name, const cuda::GroupFrame& call, unsigned num_blocks,
                       unsigned num_threads) {
  const emulator::Kernel* kernel = emulator::find_kernel(name);
  expect(kernel != nullptr, "a kernel " + name);
  std::vector<std::thread> threads;
  struct Block {
    explicit Block(unsigned size) : barrier(static_cast<std::ptrdiff_t>(size)) {}
    std::barrier<> barrier;
    alignas(16) std::array<std::byte, emulator::BlockContext::kSharedBytes> shared = {};
  };
  std::vector<std::unique_ptr<Block>> blocks;
  for (unsigned block = 0; block < num_blocks; ++block)
    blocks.push_back(std::make_unique<Block>(num_threads));
  for (unsigned block = 0; block < num_blocks; ++block)
    for (unsigned thread = 0; thread < num_threads; ++thread)
      threads.emplace_back([&, block, thread] {
        Block& mine = *blocks[block];
        emulator::BlockContext context{.thread_idx = thread,
                                       .num_threads = num_threads,
                                       .block_idx = block,
                                       .num_blocks = num_blocks,
                                       .sync = [&mine] { mine.barrier.arrive_and_wait(); },
                                       .shared = mine.shared.data()};
        kernel->run(&call, context);
      });
  for (std::thread& thread : threads) thread.join();
}

/// What the ranks of a group share, and each has.
class GpuRanks {
 public:
  GpuRanks(int world_size, const cuda::DeviceFacts& facts, unsigned num_threads,
           const CommunicatorOptions& options = {})
      : world_size_(world_size),
        num_threads_(num_threads),
        options_(options),
        layout_(cuda::make_staging_layout(facts)),
        controls_(static_cast<std::size_t>(world_size)) {
    for (int rank = 0; rank < world_size; ++rank) {
      const std::size_t bytes = layout_.num_bytes();
      memory_.emplace_back(bytes + kLineBytes);
      void* begin = memory_.back().data();
      std::size_t space = bytes + kLineBytes;
      staging_.of[rank] = static_cast<std::byte*>(std::align(kLineBytes, bytes, begin, space));
    }
    staging_.layout = layout_;
  }

  const cuda::StagingLayout& layout() const { return layout_; }
  cuda::Control& control(int rank) { return controls_[static_cast<std::size_t>(rank)]; }
  std::chrono::nanoseconds timeout = std::chrono::seconds(50);

  cuda::KernelCall kernel_call(int rank) {
    cuda::KernelCall call;
    fill(rank, call);
    return call;
  }

  /// Memory that ranks may lend each other: one segment, of which each has a part.
  void lend(std::byte* const* bases) { lent_.bases = bases; }

  /// Runs a call on one rank, to its end. Its buffers lie where they lie in lent memory, or
  /// nowhere.
  Traffic run(int rank, const Collective& call, std::uint64_t lent_input = 0,
              std::uint64_t lent_output = 0) {
    CallHeader header{.num_elems = call.num_elems,
                      .root = call.root,
                      .op = call.op,
                      .dtype = call.dtype,
                      .reduction = call.reduction,
                      .is_uneven = call.is_uneven(world_size_),
                      .has_update = call.update != nullptr,
                      .update = call.update != nullptr ? call.update->spec : UpdateSpec{}};
    cuda::plan_header(call, options_, layout_, false, header);
    cuda::KernelCall kernel = kernel_call(rank);
    kernel.lent = lent_;
    kernel.lent_input = lent_input;
    kernel.lent_output = lent_output;
    const cuda::LaunchPlan plan = cuda::plan_launch(call, header, kernel);
    run_kernel(plan.kernel, kernel, plan.num_blocks, num_threads_);
    return plan.traffic;
  }
  void exchange(int rank, const std::vector<cuda::Mail>& messages) {
    cuda::MailCall call;
    fill(rank, call);
    const cuda::LaunchPlan plan = cuda::plan_exchange(messages, 2, call);
    run_kernel(plan.kernel, call, plan.num_blocks, num_threads_);
  }
  void run_case(int rank, const Case& c) {
    CaseBuffers buffers(c, rank, world_size_);
    run(rank, buffers.call());
    expect(control(rank).stop == 0, "a kernel that does not give up in " + c.to_text());
    buffers.check();
  }

 private:
  void fill(int rank, cuda::GroupFrame& call) {
    call.staging = staging_;
    call.control = &control(rank);
    call.timeout_ns = static_cast<std::uint64_t>(timeout.count());
    call.rank = rank;
    call.world_size = world_size_;
  }

  int world_size_;
  unsigned num_threads_;
  CommunicatorOptions options_;
  cuda::StagingLayout layout_;
  cuda::Staging staging_;
  cuda::Lent lent_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<cuda::Control> controls_;
};

}  // namespace ringcomm::testing
