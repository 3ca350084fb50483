#pragma once

// How long calls of ranks should take that share one GPU, or have one each: launches, rounds,
// loads that wait for others, turns of a block's threads, and bytes, by the plan of a call, the
// instructions of loops (loop_counts.h) and a few latencies. tests/cpp/test_gpu_latency.cc compares
// it with the aims, tests/ptx/test_counts.cc its steps with what nvcc's code does, and kernel_sweep
// prints it beside what it measures.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "collectives/call.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/memory.h"
#include "cuda/kernels/send_recv.h"
#include "cuda/kernels/staging.h"
#include "gpu/loop_counts.h"
#include "kernels/losses/loss_call.h"

namespace ringcomm::benchmarks {

enum class Path { kCopy, kPackets, kStaged, kShared, kRing };
inline constexpr const char* kPathNames[] = {"copy", "packets", "staged", "shared", "ring"};

/// What the model needs of a call and of its plan.
struct PlannedCall {
  OpKind op = OpKind::kAllReduce;
  Path path = Path::kStaged;
  int num_ranks = 2;
  double num_bytes = 0;  // of the longer buffer of a rank
  double num_blocks = 1;
  double blocks_per_place = 1;
  double num_slices = 1;  // of all blocks of a rank
  double slice_bytes = 0;
  bool has_own_gpus = false;  // a rank alone on its GPU, all of them connected by NVLink

  /// What all ranks must read and write at least, in copies of num_bytes by all of them: calls with
  /// shares have a shorter buffer, too.
  double copies() const {
    return op == OpKind::kAllReduce || path == Path::kCopy ? 1 : (1 + 1.0 / num_ranks) / 2;
  }
};

inline PlannedCall planned_call(const Collective& call, Path path, std::size_t num_bytes,
                                const cuda::KernelCall& kernel, const cuda::LaunchPlan& plan) {
  PlannedCall planned{.op = call.op,
                      .path = path,
                      .num_ranks = kernel.world_size,
                      .num_bytes = static_cast<double>(num_bytes),
                      .num_blocks = static_cast<double>(plan.num_blocks),
                      .blocks_per_place = static_cast<double>(plan.blocks_per_place),
                      .num_slices = static_cast<double>(kernel.num_slices)};
  planned.slice_bytes = static_cast<double>(
      is_reduction(call.op) ? kernel.slice_elems * element_bytes(call.dtype) : kernel.part_bytes);
  if (path == Path::kRing) {
    const double chunk_bytes = planned.num_bytes / kernel.world_size;
    planned.slice_bytes = std::min<double>(kernel.staging.layout.ring_slot_bytes(), chunk_bytes);
    planned.num_slices = std::ceil(chunk_bytes / planned.slice_bytes);
  }
  return planned;
}

/// What a block does in a step: slices that go through to memory at least, and all that its threads
/// load and store; barriers, and publications to other ranks or its own. tests/ptx/test_counts.cc
/// counts all but the first in nvcc's code.
struct StepCounts {
  double memory_slices = 0, moved_slices = 0;
  double barriers = 0, publications = 0;
};

inline StepCounts count_step(OpKind op, Path path, int num_ranks) {
  const double num = num_ranks;
  const bool is_shared = path == Path::kShared;
  const double barriers = is_shared ? 1 : 2, publications = is_shared ? 0 : num;
  // A step passes a slice on twice, and reads those results again that it does not send first.
  if (path == Path::kRing) return {2 * num / (num - 1), (7 * num - 6) / (num - 1), 8, 4};
  switch (op) {
    case OpKind::kAllReduce:
    case OpKind::kReduceUpdateGather:
      return {2 * num, is_shared ? 2 * num : 5 * num - 2, barriers, publications};
    case OpKind::kReduceScatter:
      return {num + 1, is_shared ? num + 1 : 3 * num - 1, barriers, publications};
    default:  // all ranks read a part, from memory once; its owner reads it twice if it stages it
      return {num + 1, is_shared ? 2 * num : 2 * num + 2, barriers, publications};
  }
}

class LatencyModel {
 public:
  /// By default of an H200, whose copies were measured; latencies are times `slower`.
  explicit LatencyModel(double copy_bytes_per_us = 4.28e6, double slower = 1)
      : copy_bytes_per_us_(copy_bytes_per_us), slower_(slower) {}

  /// Of a GPU on which this copy of all ranks took so long.
  static LatencyModel of_copy(const PlannedCall& copy, double us) {
    const double bytes_us = std::max(us - kLaunchUs - kMemoryUs, us / 2);
    return LatencyModel(2 * copy.num_bytes * copy.num_ranks / bytes_us);
  }

  /// Of one call in a graph.
  double us(const PlannedCall& call) const {
    switch (call.path) {
      case Path::kCopy:
        return copy_us(call);
      case Path::kPackets:
        return packets_us(call);
      case Path::kRing:
        return ring_us(call);
      case Path::kShared:
        return is_reduction(call.op) ? shared_reduction_us(call) : shared_move_us(call);
      default:
        return is_reduction(call.op) ? staged_reduction_us(call) : staged_move_us(call);
    }
  }
  /// Of a copy of what the call must read and write at least, all ranks at once.
  double copy_us(const PlannedCall& call) const {
    return call.copies() * (slower_ * (kLaunchUs + kMemoryUs) + bytes_us(2 * call.num_bytes, call));
  }
  /// The time of that copy over the call's.
  double share_of_copy(const PlannedCall& call) const { return copy_us(call) / us(call); }
  /// The same without launch and latency of the copy.
  double share_of_bytes(const PlannedCall& call) const {
    return call.copies() * bytes_us(2 * call.num_bytes, call) / us(call);
  }

  /// Of one call by packets that Python makes, alone, until its result is there.
  double eager_us(const PlannedCall& call) const {
    return slower_ * (kPythonUs + kOwnHostUs + kQueriesUs + kStreamLaunchUs - kLaunchUs) + us(call);
  }

  /// The fused AdamW step of bfloat16 parameters with a master and two states in fp32; and what its
  /// memory traffic takes at least.
  double adamw_us(const PlannedCall& call) const {
    const double elems = call.slice_bytes / 2, num = turns(elems, 4);
    return on_boards_us(call, {.instructions = num * loops::kAdamW, .loads = num}, 24 * elems);
  }
  double adamw_floor_us(const PlannedCall& call) const {
    return bytes_us(2 * call.num_bytes, call) + call.num_bytes * 12 / copy_bytes_per_us_;
  }

  /// The same call over NCCL with GPUs of their own, which sends what a ring sends, or with NVLS
  /// what the switches do not add up and copy: at the bus bandwidth that NVIDIA states.
  double nccl_on_own_gpus_us(const PlannedCall& call, bool has_nvls) const {
    const double bytes = 2 * (call.num_ranks - 1.0) / call.num_ranks * call.num_bytes;
    return kNcclStartUs + bytes / (has_nvls ? kNvlsBytesPerUs : kRingBytesPerUs);
  }

  /// Of a message of `num_bytes`, while each of `num_ranks` sends one and receives one.
  double message_us(double num_bytes, int num_ranks, const cuda::StagingLayout& layout,
                    unsigned places_per_lane) const {
    const cuda::P2pSlices slices(layout, static_cast<std::uint64_t>(num_bytes));
    const double bytes = slices.slice_bytes;
    const PlannedCall pair{.blocks_per_place = cuda::kBlocksPerPlace};
    const double send_us =
        kSlotUs + step_us(pair, 0, copies(bytes, false, false), 0) / slower_ + kReleaseUs;
    const double take_us =
        kSlotUs + step_us(pair, 0, copies(bytes, true, false), 0) / slower_ + kReleaseUs;
    // A slot is filled, handed over, drained, and handed back; there are two.
    const double period_us =
        slower_ *
        std::max({send_us, take_us,
                  (send_us + take_us + 2 * kHandOverUs) / cuda::StagingLayout::kP2pSlots});
    const double in_turn =
        std::ceil(1.0 * slices.num_channels / (places_per_lane * cuda::kBlocksPerPlace));
    const double num = std::ceil(1.0 * slices.num / slices.num_channels) * in_turn;
    const double all_us = 2 * num_bytes * num_ranks / (copy_bytes_per_us_ * kShareOfCopy);
    return slower_ * (kLaunchUs + kMemoryUs + kHandOverUs + take_us) +
           std::max(num * period_us, all_us);
  }

  /// Of cross_entropy_and_grad_ on rows of 16-bit logits, in clusters (cuda/kernels/loss_rows.h): a
  /// row is loaded, one is computed with, and one is stored at a time.
  double loss_rows_us(double num_rows, double row_bytes, const cuda::LossPlan& plan,
                      int num_clusters) const {
    const double bytes_each_us = 2 * row_bytes * num_clusters / (copy_bytes_per_us_ * kShareOfCopy);
    // The sums of warps, of blocks, and of the cluster wait for each other; parts of them are
    // counted, but not done by all warps.
    const double vectors =
        std::ceil(1.0 * plan.segment_vectors / (cuda::kLossThreads * cuda::kVectorsPerThread));
    const double row_us =
        slower_ * (loops::kLossRow * vectors * kUsPerInstruction + kClusterExchangeUs);
    const double num_turns = std::ceil(num_rows / num_clusters);
    // A row comes before the first turn and goes after the last; a second kernel adds losses up.
    return slower_ * (2 * kLaunchUs + 4 * kMemoryUs) + num_turns * std::max(bytes_each_us, row_us) +
           2 * bytes_each_us + row_us;
  }
  double loss_rows_copy_us(double num_rows, double row_bytes) const {
    return slower_ * (kLaunchUs + kMemoryUs) + 2 * num_rows * row_bytes / copy_bytes_per_us_;
  }
  /// Of the same over shards of the vocabulary: the rows are read for their statistics, which are
  /// exchanged, then read and written. `num_bytes` of the shards of all ranks on a GPU.
  double loss_shards_us(double num_bytes) const {
    return 3 * slower_ * (kLaunchUs + kMemoryUs) + 2 * round_us({}) +
           3 * num_bytes / (copy_bytes_per_us_ * kShareOfCopy);
  }
  /// Of linear_cross_entropy with its gradients, in blocks of tokens, of 16-bit elements; and of
  /// its three products alone. A block reads the sum of the weight's gradient and writes it, half
  /// of that beside the product, and its products begin and end once more.
  double linear_loss_us(double num_tokens, double hidden, double num_classes,
                        double block_tokens) const {
    const double num_blocks = std::ceil(num_tokens / block_tokens);
    const double sum_us = 4 * hidden * num_classes / copy_bytes_per_us_ / 2;
    const double loss_us = 4 * num_tokens * num_classes / (copy_bytes_per_us_ * kShareOfCopy);
    return products_us(num_tokens, hidden, num_classes) + loss_us +
           num_blocks * (sum_us + 5 * slower_ * kLaunchUs + 3 * kProductEndUs);
  }
  double products_us(double num_tokens, double hidden, double num_classes) const {
    return 6 * num_tokens * hidden * num_classes / kProductFlopsPerUs;
  }

 private:
  // Of an H200 whose ranks are processes under MPS. A round is half of a measured round trip;
  // the others are what is usual for this kind of GPU, +-30 %.
  static constexpr double kLaunchUs = 2.2;  // of a kernel or a copy in a graph
  static constexpr double kHandOverUs = 0.85;
  static constexpr double kReleaseUs = 0.7;  // a fence of the system until all stores are done
  static constexpr double kL2Us = 0.3;
  static constexpr double kMemoryUs = 0.6;
  static constexpr double kLatencyGrowth = 0.5;  // while all of the memory's bandwidth is in use
  static constexpr double kShareOfCopy = 0.92;   // of its rate, with reads and writes mixed
  // Between L2 and multiprocessors: a staged all_reduce of 256 MiB of two ranks moved 2.15 GB in
  // 488 us (benchmarks/results/2026-11-27-kernels.jsonl). Calls without staging moved 5.2 TB/s.
  static constexpr double kStagingBytesPerUs = 4.4e6;
  static constexpr double kClusterExchangeUs = 1;  // and two barriers of a block
  static constexpr double kSlotUs = 0.35;          // a look at a cursor that is there, a barrier
  // Between GPUs of their own: what reads reach of NVLink's 450 GB/s, round and fence.
  static constexpr double kLinkBytesPerUs = 0.385e6;
  static constexpr double kLinkHandOverUs = 1.2, kLinkReleaseUs = 1;
  // Bus bandwidth of NCCL on eight such GPUs, and what a call takes besides.
  static constexpr double kRingBytesPerUs = 0.36e6, kNvlsBytesPerUs = 0.48e6, kNcclStartUs = 15;
  // Products of 16-bit elements at 80 % of the tensor cores' peak, and the end of a product.
  static constexpr double kProductFlopsPerUs = 0.79e9, kProductEndUs = 8;
  // An eager call's host path: Python with c10d, and ringcomm, by a profile over the emulator (2.7
  // and 0.5 us); estimates of two questions to the driver, and from the call that launches to the
  // kernel's first instruction.
  static constexpr double kPythonUs = 3, kOwnHostUs = 0.5, kQueriesUs = 0.2, kStreamLaunchUs = 3.2;
  // Of two blocks at a place, on a multiprocessor of four schedulers at 1.755 GHz: instructions of
  // 16 warps. A block alone has two warps for each scheduler, which they do not keep busy.
  static constexpr double kUsPerInstruction = 16.0 / 4 / 1755;
  static constexpr double kShareAlone = 0.75;

  /// What a block does in a step besides waiting for others: instructions, and loads from memory
  /// and from L2 that all of its threads wait for.
  struct Work {
    double instructions = 0, loads = 0, l2_loads = 0;

    friend Work operator+(const Work& a, const Work& b) {
      return {a.instructions + b.instructions, a.loads + b.loads, a.l2_loads + b.l2_loads};
    }
  };

  /// Of a block's threads with so many elements each at a time.
  static double turns(double num_elems, double elems_at_once) {
    return std::ceil(num_elems / (cuda::kBlockThreads * elems_at_once));
  }
  double bytes_us(double bytes_of_rank, const PlannedCall& call) const {
    return (call.has_own_gpus ? 1 : call.num_ranks) * bytes_of_rank / copy_bytes_per_us_;
  }
  /// Of a step of all blocks of all ranks at once, of which so many slices come from other ranks.
  double traffic_us(const PlannedCall& call, double others_slices, double state_bytes = 0) const {
    const StepCounts step = count_step(call.op, call.path, call.num_ranks);
    const auto bytes = [&](double num_slices) {
      return (num_slices * call.slice_bytes + state_bytes) * call.num_blocks;
    };
    const double memory_us = bytes_us(bytes(step.memory_slices), call) / kShareOfCopy;
    if (call.has_own_gpus)
      return std::max(memory_us,
                      others_slices * call.slice_bytes * call.num_blocks / kLinkBytesPerUs);
    if (call.path == Path::kShared) return memory_us;
    return std::max(memory_us, call.num_ranks * bytes(step.moved_slices) / kStagingBytesPerUs);
  }
  static double num_steps(const PlannedCall& call) {
    return std::ceil(call.num_slices / call.num_blocks);
  }
  double round_us(const PlannedCall& call) const {
    return slower_ *
           (call.has_own_gpus ? kLinkHandOverUs + kLinkReleaseUs : kHandOverUs + kReleaseUs);
  }
  /// Of a step of a block, which waits for `wait_us` and then works beside traffic of all blocks
  /// that takes `each_us`: the longer one. Of two blocks at a place, one works while the other
  /// waits.
  double step_us(const PlannedCall& call, double wait_us, const Work& work, double each_us) const {
    const bool is_alone = call.blocks_per_place == 1;
    const double latency_us = work.loads * kMemoryUs + work.l2_loads * kL2Us;
    const double issue_us = work.instructions * kUsPerInstruction * (is_alone ? kShareAlone : 1);
    const double idle_us = slower_ * (issue_us + latency_us) + (is_alone ? 0 : wait_us);
    const double use = each_us > 0 ? each_us / std::max(idle_us, each_us) : 0;
    return (is_alone ? wait_us : 0) +
           std::max(idle_us + slower_ * latency_us * kLatencyGrowth * use, each_us);
  }
  /// With the first turn's loads before the step's wait they cost no time, but its instructions are
  /// as many again.
  static Work copies(double num_bytes, bool is_from_l2, bool is_first_loaded) {
    const double num = turns(num_bytes / 16, cuda::kHeldVectors);
    const double waits = std::max(0.0, num - (is_first_loaded ? 1 : 0));
    Work work{.instructions = (num + (is_first_loaded ? 1 : 0)) * loops::kCopy};
    (is_from_l2 ? work.l2_loads : work.loads) = waits;
    return work;
  }
  /// A slice from all ranks, stored in so many places, in the turns of ExactSums: all ranks'
  /// vectors at once where there are 2, 4 or 8, else four by four.
  static Work sums(const PlannedCall& call, double num_outputs) {
    const int num = call.num_ranks;
    const bool is_at_once = num == 2 || num == 4 || num == 8;
    const int unroll = is_at_once ? 8 / num : 1;
    const double loads = is_at_once ? 1 : std::ceil(num / 4.0);
    const double instructions = num == 2   ? loops::kSumOfTwo
                                : num == 4 ? loops::kSumOfFour
                                : num == 8 ? loops::kSumOfEight
                                           : loads * loops::kSumOfFew + loops::kStoreSum;
    const double also = (num_outputs - 1) * unroll * loops::kAlsoStore;
    const double num_turns = turns(call.slice_bytes / 16, unroll);
    return {.instructions = num_turns * (instructions + also), .loads = num_turns * loads};
  }

  /// Number and data are loaded, put, found by a look at four ranks at a time, agreed on, stored.
  double packets_us(const PlannedCall& call) const {
    const double looks = std::ceil(call.num_ranks / 4.0);
    const double put_us = call.has_own_gpus ? kLinkHandOverUs : kHandOverUs;
    return slower_ * (kLaunchUs + kMemoryUs + put_us + looks * kL2Us + 0.2 + kL2Us);
  }

  /// Steps that wait, load, and hand over; `owned` is what the owner does with its slice.
  double on_boards_us(const PlannedCall& call, const Work& owned, double state_bytes) const {
    const double others = (call.num_ranks - 1) * call.slice_bytes;
    const Work work = copies(others, false, true) + owned + copies(others, true, false);
    const double each_us = traffic_us(call, 2 * (call.num_ranks - 1), state_bytes);
    // Two more steps drain the pipeline, without memory's part.
    return slower_ * (kLaunchUs + kMemoryUs) +
           num_steps(call) * step_us(call, round_us(call), work, each_us) +
           2 * step_us(call, round_us(call), work, 0);
  }
  double staged_reduction_us(const PlannedCall& call) const {
    if (call.op == OpKind::kAllReduce) return on_boards_us(call, sums(call, 2), 0);
    return staged_shares_us(
        call, copies((call.num_ranks - 1) * call.slice_bytes, false, true) + sums(call, 1));
  }
  double staged_move_us(const PlannedCall& call) const {
    return staged_shares_us(call, copies(call.slice_bytes, false, true) +
                                      copies(call.num_ranks * call.slice_bytes, true, false));
  }
  double staged_shares_us(const PlannedCall& call, const Work& work) const {
    return slower_ * (kLaunchUs + kMemoryUs) +
           num_steps(call) *
               step_us(call, round_us(call), work, traffic_us(call, call.num_ranks - 1)) +
           step_us(call, round_us(call), work, 0);
  }

  /// Where all ranks' buffers are shared: two rounds, and turns of loads and stores, with
  /// barriers between slices.
  double shared_us(const PlannedCall& call, const Work& work, double others_slices) const {
    const double barriers_us =
        slower_ * kBarrierUs * count_step(call.op, call.path, call.num_ranks).barriers;
    return slower_ * (kLaunchUs + 3 * kMemoryUs) + 2 * round_us(call) +
           num_steps(call) * step_us(call, barriers_us, work, traffic_us(call, others_slices));
  }
  double shared_reduction_us(const PlannedCall& call) const {
    // An all_reduce stores to all ranks.
    const bool is_all = call.op == OpKind::kAllReduce;
    return shared_us(call, sums(call, is_all ? call.num_ranks : 1),
                     (is_all ? 2 : 1) * (call.num_ranks - 1));
  }
  /// Of the ranks that gather an input one is the first, and brings it into the cache.
  double shared_move_us(const PlannedCall& call) const {
    Work work = copies(call.num_ranks * call.slice_bytes, false, false);
    work.l2_loads = work.loads * (call.num_ranks - 1) / call.num_ranks;
    work.loads /= call.num_ranks;
    return shared_us(call, work, call.num_ranks - 1);
  }

  /// Every slice goes around twice but for a step, one slice of a block after the other: half of
  /// the steps add.
  double ring_us(const PlannedCall& call) const {
    const double num_vectors = call.slice_bytes / 16;
    const Work added{.instructions = turns(num_vectors, 2) * loops::kRingSum,
                     .loads = turns(num_vectors, 2)};
    const Work both = added + copies(call.slice_bytes, false, false);
    const double num = num_steps(call) * (call.num_ranks - 1);
    return slower_ * (kLaunchUs + kMemoryUs) + 2 * round_us(call) +
           num * step_us(call, 2 * round_us(call), both, traffic_us(call, 2));
  }

  static constexpr double kBarrierUs = 0.2;

  double copy_bytes_per_us_;
  double slower_;
};

}  // namespace ringcomm::benchmarks
