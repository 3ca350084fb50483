#pragma once

// Kernels of GPUs on threads: ranks, their blocks, and the blocks' threads are threads of one
// process, on one memory, where ThreadSanitizer sees all that nothing orders.

#include <algorithm>
#include <array>
#include <barrier>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "cuda/collectives/launches.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/packets.h"
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
           const CommunicatorOptions& options = {}, std::uint32_t link_slot_bytes = 4 << 10)
      : world_size_(world_size),
        num_multiprocessors_(facts.min_multiprocessors),
        num_threads_(num_threads),
        options_(options),
        layout_(cuda::make_staging_layout(facts)),
        controls_(static_cast<std::size_t>(world_size)) {
    bases_.resize(static_cast<std::size_t>(kMostBuffers * world_size));
    // So that calls of few bytes have several words a thread, slots and pieces.
    layout_.packets_per_block = cuda::kHeaderPackets + 2 * 140;
    layout_.scratch_bytes = 40 << 10;
    layout_.link_slot_bytes = link_slot_bytes;
    layout_.ring_slot_bytes = 16 << 10;
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
  /// Rendezvous of a rank over all calls: its published phases.
  std::uint64_t num_rounds(int rank) const { return staging_.published(rank, rank).value; }
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
    const cuda::LaunchPlan plan = plan_call(call, kernel);
    switch (plan.kind) {
      case cuda::LaunchKind::kPackets:
        run_kernel(plan.kernel, kernel, plan.num_blocks, num_threads_);
        break;
      case cuda::LaunchKind::kShards:
        run_shards(call, kernel, lends);
        break;
      default:
        run_in_place(call, plan, kernel, lends);
    }
    return plan.traffic;
  }
  cuda::LaunchPlan plan_call(Collective call, cuda::KernelCall& kernel) {
    call.set_number(0, world_size_);
    cuda::plan_algorithm(options_, layout_, call);
    return cuda::plan_launch(call, num_multiprocessors_, kernel);
  }
  void exchange(int rank, std::vector<cuda::P2pMessage> messages, bool lends = false) {
    cuda::P2pCall call;
    fill(rank, call);
    run_messages(std::move(messages), call, lends);
  }
  void run_case(int rank, const Case& c, bool lends = false) {
    CaseBuffers buffers(c, rank, world_size_);
    run(rank, buffers.call(), lends);
    expect(control(rank).stop == 0, "a kernel that does not fail in " + c.to_text());
    buffers.check();
    if (lends) buffers.overwrite();  // a peer that still reads them finds it
  }

 private:
  static constexpr int kMostBuffers = 200;

  void fill(int rank, cuda::GroupFrame& call) {
    call.staging = staging_;
    call.control = &control(rank);
    call.bases = bases_.data();
    call.timeout_ns = static_cast<std::uint64_t>(timeout.count());
    call.rank = rank;
    call.world_size = world_size_;
  }

  /// As if a buffer were in an allocation of its own, in row `row`, that begins `rank` bytes
  /// before.
  cuda::Place map(int rank, std::uint64_t row, const std::byte* data) {
    const auto idx = row * static_cast<std::size_t>(world_size_) + static_cast<std::size_t>(rank);
    bases_[idx] = const_cast<std::byte*>(data) - rank;
    return cuda::place_in(row, static_cast<std::uint64_t>(rank));
  }

  void run_in_place(const Collective& call, const cuda::LaunchPlan& plan, cuda::KernelCall& kernel,
                    bool lends) {
    cuda::InPlaceLaunch launch(call, plan, kernel);
    std::uint64_t row = 0;
    for (cuda::PeerBuffer& buffer : launch.buffers())
      if (lends && buffer.num_bytes > 0) buffer.place = map(kernel.rank, row++, buffer.data);
    launch.run([&](std::string_view name, unsigned num_blocks, const cuda::KernelCall& piece) {
      run_kernel(std::string(name), piece, name == plan.kernel ? std::min(num_blocks, 3u) : 1,
                 num_threads_);
    });
  }

  void run_shards(const Collective& call, const cuda::KernelCall& kernel, bool lends) {
    cuda::P2pCall messages;
    fill(kernel.rank, messages);
    messages.use = cuda::LinkUse::kShards;
    messages.is_in_place = cuda::writes_inputs(call, kernel);
    const int own = kernel.rank;
    if (kernel.output_bytes[own] > 0 && kernel.outputs[own] != kernel.inputs[own])
      std::memcpy(kernel.outputs[own], kernel.inputs[own], kernel.output_bytes[own]);
    run_messages(cuda::shards_of(call, kernel), messages, lends && !messages.is_in_place);
  }
  void run_messages(std::vector<cuda::P2pMessage> messages, cuda::P2pCall& call, bool lends) {
    std::uint64_t row = 0;
    for (cuda::P2pMessage& message : messages)
      if (lends && message.is_send && call.is_long(message))
        message.place = map(call.rank, row++, message.data);
    while (cuda::take_launch(messages, call)) {
      run_kernel("ringcomm_open_messages", call, 2, num_threads_);
      if (!call.has_long) continue;
      run_kernel("ringcomm_copy_messages", call, 2, num_threads_);
      run_kernel("ringcomm_close_messages", call, 2, num_threads_);
    }
  }

  int world_size_;
  int num_multiprocessors_;
  unsigned num_threads_;
  CommunicatorOptions options_;
  cuda::StagingLayout layout_;
  cuda::Staging staging_;
  std::vector<std::byte*> bases_;  // a row for each buffer of a call
  std::vector<std::vector<std::byte>> memory_;
  std::vector<cuda::Control> controls_;
};

}  // namespace ringcomm::testing
