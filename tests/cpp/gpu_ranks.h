#pragma once

// Kernels of GPUs on threads: ranks, their blocks, and the blocks' threads are threads of one
// process, on one memory, where ThreadSanitizer sees all that nothing orders.

#include <array>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/collectives/staging_plan.h"
#include "cuda/kernels/call.h"
#include "emulator/kernel_registry.h"

namespace ringcomm::testing {

/// Runs a kernel to its end.
inline void run_kernel(const emulator::Kernel& kernel, const cuda::GroupFrame& call,
                       unsigned num_blocks, unsigned num_threads) {
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
        kernel.run(&call, context);
      });
  for (std::thread& thread : threads) thread.join();
}

inline void run_kernel(const std::string& name, const cuda::GroupFrame& call, unsigned num_blocks,
                       unsigned num_threads) {
  const emulator::Kernel* kernel = emulator::find_kernel(name);
  expect(kernel != nullptr, "a kernel " + name);
  run_kernel(*kernel, call, num_blocks, num_threads);
}

/// The shared state of a group and the state of each rank.
class GpuRanks {
 public:
  GpuRanks(int world_size, const cuda::DeviceFacts& facts, unsigned num_threads,
           const CommunicatorOptions& options = {})
      : world_size_(world_size),
        num_threads_(num_threads),
        options_(options),
        layout_(cuda::make_staging_layout(facts)),
        turn_(world_size),
        controls_(static_cast<std::size_t>(world_size)) {
    lent_bases_.resize(static_cast<std::size_t>((world_size + 1) * world_size));
    // So that pieces follow each other in calls of few bytes.
    layout_.region_bytes = 20 << 10;
    layout_.p2p_slot_bytes = 16 << 10;
    layout_.num_p2p_channels = 4;
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
  /// Synchronizations of a rank's first block over all calls: its published phases.
  std::uint64_t num_rounds(int rank) const { return staging_.published(rank, rank, 0).value; }
  std::chrono::nanoseconds timeout = std::chrono::seconds(50);

  cuda::KernelCall kernel_call(int rank) {
    cuda::KernelCall call;
    fill(rank, call);
    return call;
  }

  /// Runs a call on one rank to its end. With `lends`, all its buffers are in memory that peers
  /// have mapped.
  Traffic run(int rank, const Collective& call, bool lends = false) {
    cuda::KernelCall kernel = kernel_call(rank);
    kernel.lent.bases = lent_bases_.data();
    const cuda::LaunchPlan plan = plan_call(call, false, kernel);
    std::uint64_t num_segments = 0;
    cuda::find_lent_buffers(
        call, plan,
        [&](const std::byte* data, std::size_t) -> std::uint64_t {
          if (!lends) return 0;
          const std::uint64_t segment = num_segments++;
          lent_bases_[segment * static_cast<std::size_t>(world_size_) +
                      static_cast<std::size_t>(rank)] = const_cast<std::byte*>(data) - rank;
          return cuda::Lent::place(segment, static_cast<std::uint64_t>(rank));
        },
        kernel);
    run_kernel(plan.kernel, kernel, plan.num_blocks, num_threads_);
    return plan.traffic;
  }
  /// The same as ranks do that take turns: a launch for each step, between which they meet.
  void run_in_turns(int rank, const Collective& call) {
    cuda::KernelCall kernel = kernel_call(rank);
    cuda::LaunchPlan plan = plan_call(call, true, kernel);
    if (kernel.num_slices == 0) {  // ranks may know different sizes
      raise_longest(cuda::longest_shard(kernel));
      turn_.arrive_and_wait();
      cuda::set_longest_shard(kernel, plan, longest_bytes_);
    }
    for (std::uint32_t turn = 0; turn < plan.num_turns; ++turn) {
      kernel.first_step = kernel.last_step = turn;
      run_kernel(plan.kernel, kernel, plan.num_blocks, num_threads_);
      turn_.arrive_and_wait();
    }
  }
  cuda::LaunchPlan plan_call(Collective call, bool takes_turns, cuda::KernelCall& kernel) {
    call.set_number(0, world_size_);
    cuda::plan_algorithm(options_, layout_, takes_turns, call);
    return cuda::plan_launch(call, kernel);
  }
  void exchange(int rank, const std::vector<cuda::P2pMessage>& messages) {
    cuda::P2pCall call;
    fill(rank, call);
    const cuda::LaunchPlan plan = cuda::plan_exchange(messages, 2, call);
    run_kernel(plan.kernel, call, plan.num_blocks, num_threads_);
  }
  void run_case(int rank, const Case& c, bool takes_turns = false, bool lends = false) {
    CaseBuffers buffers(c, rank, world_size_);
    if (takes_turns)
      run_in_turns(rank, buffers.call());
    else
      run(rank, buffers.call(), lends);
    expect(control(rank).stop == 0, "a kernel that does not fail in " + c.to_text());
    buffers.check();
    if (lends) buffers.overwrite();  // a peer that still reads them finds it
  }

 private:
  // For the longest shard of any call; more turns than a call needs are harmless.
  void raise_longest(std::uint64_t num_bytes) {
    std::uint64_t longest = longest_bytes_;
    while (longest < num_bytes && !longest_bytes_.compare_exchange_weak(longest, num_bytes)) {
    }
  }

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
  std::barrier<> turn_;
  std::atomic<std::uint64_t> longest_bytes_ = 0;
  cuda::Staging staging_;
  std::vector<std::byte*> lent_bases_;  // a segment for each buffer of a call; see cuda::Lent
  std::vector<std::vector<std::byte>> memory_;
  std::vector<cuda::Control> controls_;
};

}  // namespace ringcomm::testing
