#pragma once

// How long calls of ranks that share one GPU should take: launches, hand-overs, loads that wait for
// others, turns of a block's threads, and bytes, by the plan of a call and a few latencies.
// tests/cpp/test_gpu_latency.cc compares it with the aims, kernel_sweep prints it beside what it
// measures.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "collectives/collective.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/loss_call.h"
#include "cuda/kernels/memory.h"
#include "cuda/kernels/send_recv.h"
#include "cuda/kernels/staging.h"

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
  double num_slices = 1;  // of all blocks of a rank
  double slice_bytes = 0;

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
    const double elems = call.slice_bytes / 2;
    return on_boards_us(
        call, turns(elems, 4) * (kMemoryUs + kUpdateInstructions * kUsPerInstruction), 24 * elems);
  }
  double adamw_floor_us(const PlannedCall& call) const {
    return bytes_us(2 * call.num_bytes, call) + call.num_bytes * 12 / copy_bytes_per_us_;
  }

  /// Of a message of `num_bytes`, while each of `num_ranks` sends one and receives one.
  double message_us(double num_bytes, int num_ranks, const cuda::StagingLayout& layout,
                    unsigned blocks_per_lane) const {
    const cuda::P2pSlices slices(layout, static_cast<std::uint64_t>(num_bytes));
    const double bytes = slices.slice_bytes;
    const double send_us = kSlotUs + copy_turns_us(bytes, kMemoryUs, false) + kReleaseUs;
    const double take_us = kSlotUs + copy_turns_us(bytes, kL2Us, false) + kReleaseUs;
    // A slot is filled, handed over, drained, and handed back; there are two.
    const double period_us =
        slower_ *
        std::max({send_us, take_us,
                  (send_us + take_us + 2 * kHandOverUs) / cuda::StagingLayout::kP2pSlots});
    const double in_turn = std::ceil(1.0 * slices.num_channels / blocks_per_lane);
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
    // The sums of warps, of blocks, and of the cluster wait for each other.
    const double vectors = turns(plan.segment_vectors, cuda::kVectorsPerThread);
    const double row_us =
        slower_ * (kRowInstructions * vectors * kUsPerInstruction + kClusterExchangeUs);
    const double num_turns = std::ceil(num_rows / num_clusters);
    // A row comes before the first turn and goes after the last; a second kernel adds losses up.
    return slower_ * (2 * kLaunchUs + 4 * kMemoryUs) + num_turns * std::max(bytes_each_us, row_us) +
           2 * bytes_each_us + row_us;
  }
  double loss_rows_copy_us(double num_rows, double row_bytes) const {
    return slower_ * (kLaunchUs + kMemoryUs) + 2 * num_rows * row_bytes / copy_bytes_per_us_;
  }

 private:
  // Of an H200 whose ranks are processes under MPS. The hand-over is half of a measured round trip;
  // the others are what is usual for this kind of GPU, +-30 %.
  static constexpr double kLaunchUs = 2.2;  // of a kernel or a copy in a graph
  static constexpr double kHandOverUs = 0.85;
  static constexpr double kReleaseUs = 0.7;  // a fence of the system until all stores are done
  static constexpr double kL2Us = 0.3;
  static constexpr double kMemoryUs = 0.6;
  static constexpr double kShareOfCopy = 0.92;     // of its rate, with reads and writes mixed
  static constexpr double kClusterExchangeUs = 1;  // and two barriers of a block
  static constexpr double kSlotUs = 0.35;          // a look at a cursor that is there, a barrier
  // Estimates of an eager call's host path: Python and c10d, ringcomm, two questions to the driver,
  // and from the call that launches to the kernel's first instruction.
  static constexpr double kPythonUs = 4.5, kOwnHostUs = 1, kQueriesUs = 0.2, kStreamLaunchUs = 3.2;
  // Of a block on a multiprocessor of four schedulers at 1.755 GHz: instructions of 16 warps.
  static constexpr double kUsPerInstruction = 16.0 / 4 / 1755;
  // Counted in SASS for sm_90: of four vectors copied, of a vector loaded, of a vector stored, of
  // AdamW on four elements, of eight vectors of a row of logits.
  static constexpr double kCopyInstructions = 115, kLoadInstructions = 7, kStoreInstructions = 45;
  static constexpr double kUpdateInstructions = 330, kRowInstructions = 860;

  /// Of a block's threads with so many elements each at a time.
  static double turns(double num_elems, double elems_at_once) {
    return std::ceil(num_elems / (cuda::kBlockThreads * elems_at_once));
  }
  double bytes_us(double bytes_of_rank, const PlannedCall& call) const {
    return call.num_ranks * bytes_of_rank / copy_bytes_per_us_;
  }
  /// Of all blocks of all ranks at once.
  double memory_us(double bytes_of_block, const PlannedCall& call) const {
    return bytes_us(bytes_of_block * call.num_blocks, call) / kShareOfCopy;
  }
  static double num_steps(const PlannedCall& call) {
    return std::ceil(call.num_slices / call.num_blocks);
  }
  double hand_over_us() const { return slower_ * (kHandOverUs + kReleaseUs); }
  static double copy_turns_us(double num_bytes, double load_us, bool is_first_loaded) {
    const double num = turns(num_bytes / 16, cuda::kHeldVectors);
    return num * kCopyInstructions * kUsPerInstruction +
           load_us * std::max(0.0, num - (is_first_loaded ? 1 : 0));
  }
  /// A slice from all ranks, in the turns of ExactSums: all ranks' vectors at once where there are
  /// 2, 4 or 8, else four by four.
  static double reduce_us(const PlannedCall& call) {
    const int num = call.num_ranks;
    const bool is_at_once = num == 2 || num == 4 || num == 8;
    const int unroll = is_at_once ? 8 / num : 1;
    const double loads = is_at_once ? 8 : num;
    const double instructions = kLoadInstructions * loads + kStoreInstructions * unroll;
    return turns(call.slice_bytes / 16, unroll) *
           (std::ceil(loads / 8) * kMemoryUs + instructions * kUsPerInstruction);
  }

  /// Number and data are loaded, put, found by a look at four ranks at a time, agreed on, stored.
  double packets_us(const PlannedCall& call) const {
    const double looks = std::ceil(call.num_ranks / 4.0);
    return slower_ * (kLaunchUs + kMemoryUs + kHandOverUs + looks * kL2Us + 0.2 + kL2Us);
  }

  /// Steps that wait, load, and hand over; `own_us` is what the owner does with its slice.
  double on_boards_us(const PlannedCall& call, double own_us, double state_bytes) const {
    const double others = (call.num_ranks - 1) * call.slice_bytes;
    const double step_us =
        hand_over_us() + slower_ * (copy_turns_us(others, kMemoryUs, true) + own_us +
                                    copy_turns_us(others, kL2Us, false));
    // Of every block of every rank: its input and its output, of all ranks' chunks.
    const double each_us = memory_us(2 * call.num_ranks * call.slice_bytes + state_bytes, call);
    // Two more steps drain the pipeline, without memory's part.
    return slower_ * (kLaunchUs + kMemoryUs) + num_steps(call) * std::max(step_us, each_us) +
           2 * step_us;
  }
  double staged_reduction_us(const PlannedCall& call) const {
    if (call.op == OpKind::kAllReduce) return on_boards_us(call, reduce_us(call), 0);
    return staged_shares_us(
        call,
        copy_turns_us((call.num_ranks - 1) * call.slice_bytes, kMemoryUs, true) + reduce_us(call));
  }
  double staged_move_us(const PlannedCall& call) const {
    return staged_shares_us(call,
                            copy_turns_us(call.slice_bytes, kMemoryUs, true) +
                                copy_turns_us(call.num_ranks * call.slice_bytes, kL2Us, false));
  }
  /// Of every block of every rank: a part of all ranks in and one out, or the other way.
  double shares_each_us(const PlannedCall& call) const {
    return memory_us((call.num_ranks + 1) * call.slice_bytes, call);
  }
  double staged_shares_us(const PlannedCall& call, double own_us) const {
    const double step_us = hand_over_us() + slower_ * own_us;
    return slower_ * (kLaunchUs + kMemoryUs) +
           num_steps(call) * std::max(step_us, shares_each_us(call)) + step_us;
  }

  /// Where all ranks' buffers are shared: two hand-overs, and turns of loads and stores.
  double shared_us(const PlannedCall& call, double step_us, double each_us) const {
    return slower_ * (kLaunchUs + 3 * kMemoryUs) + 2 * hand_over_us() +
           num_steps(call) * std::max(slower_ * step_us, each_us);
  }
  double shared_reduction_us(const PlannedCall& call) const {
    if (call.op != OpKind::kAllReduce)
      return shared_us(call, reduce_us(call) + 0.2, shares_each_us(call));
    // It stores to all ranks.
    return shared_us(call, reduce_us(call) + 0.4,
                     memory_us(2 * call.num_ranks * call.slice_bytes, call));
  }
  /// Of the ranks that gather an input one is the first, and brings it into the cache.
  double shared_move_us(const PlannedCall& call) const {
    const double load_us = (kMemoryUs + (call.num_ranks - 1) * kL2Us) / call.num_ranks;
    return shared_us(call, copy_turns_us(call.num_ranks * call.slice_bytes, load_us, false) + 0.2,
                     shares_each_us(call));
  }

  /// Every slice goes around twice but for a step, one slice of a block after the other.
  double ring_us(const PlannedCall& call) const {
    const double step_us =
        hand_over_us() + slower_ * copy_turns_us(call.slice_bytes, kMemoryUs, false);
    const double num = num_steps(call) * 2 * (call.num_ranks - 1) + 1;
    return slower_ * (kLaunchUs + kMemoryUs) + hand_over_us() +
           std::max(num * step_us, bytes_us(2 * call.num_bytes, call) / kShareOfCopy);
  }

  double copy_bytes_per_us_;
  double slower_;
};

}  // namespace ringcomm::benchmarks
