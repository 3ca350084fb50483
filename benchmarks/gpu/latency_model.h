#pragma once

// How long calls of ranks should take that share one GPU, or have one each: launches, rounds,
// loads that wait for others, and bytes, by the plan of a call and a few latencies.
// tests/cpp/test_gpu_latency.cc compares it with the aims, tests/ptx/test_counts.cc its bytes with
// what nvcc's code moves, and kernel_sweep prints it beside what it measures.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "collectives/call.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/kernels/call.h"
#include "gpu/loop_counts.h"
#include "kernels/losses/loss_call.h"

namespace ringcomm::benchmarks {

enum class Path { kCopy, kOneRound, kTwoRounds, kInPlace, kStaged, kRing };
inline constexpr const char* kPathNames[] = {"copy",     "one_round", "two_rounds",
                                             "in_place", "staged",    "ring"};

/// What the model needs of a call and of its plan.
struct PlannedCall {
  OpKind op = OpKind::kAllReduce;
  Path path = Path::kCopy;
  int num_ranks = 2;
  double num_bytes = 0;  // of the longer buffer of a rank
  double num_pieces = 1;
  double words_of_thread = 1;             // of packets
  double num_blocks = 1, slot_bytes = 0;  // of a ring
  bool has_own_gpus = false;  // a rank alone on its GPU, all of them connected by NVLink

  /// What all ranks must read and write at least, in copies of num_bytes by all of them: calls with
  /// shares have a shorter buffer, too.
  double copies() const {
    return op == OpKind::kAllReduce || path == Path::kCopy ? 1 : (1 + 1.0 / num_ranks) / 2;
  }
};

inline PlannedCall planned_call(const Collective& call, bool is_staged, std::size_t num_bytes,
                                const cuda::KernelCall& kernel, const cuda::LaunchPlan& plan) {
  const bool is_packets = plan.kind == cuda::LaunchKind::kPackets;
  const bool has_two =
      is_packets && call.op == OpKind::kAllReduce && plan.traffic.algorithm == Algorithm::kTwoShot;
  return {.op = call.op,
          .path = has_two                                ? Path::kTwoRounds
                  : is_packets                           ? Path::kOneRound
                  : plan.kind == cuda::LaunchKind::kRing ? Path::kRing
                  : is_staged                            ? Path::kStaged
                                                         : Path::kInPlace,
          .num_ranks = kernel.world_size,
          .num_bytes = static_cast<double>(num_bytes),
          .num_pieces = static_cast<double>(plan.num_pieces),
          .words_of_thread = std::ceil(1.0 * kernel.words_per_block / cuda::kBlockThreads),
          .num_blocks = static_cast<double>(plan.num_blocks),
          .slot_bytes = static_cast<double>(kernel.staging.layout.ring_slot_bytes)};
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
      case Path::kOneRound:
        return packets_us(call, 1);
      case Path::kTwoRounds:
        return packets_us(call, 2);
      case Path::kRing:
        return ring_us(call);
      default:
        return in_place_us(call, traffic_us(call));
    }
  }
  /// Of a copy of what the call must read and write at least, all ranks at once.
  double copy_us(const PlannedCall& call) const {
    return call.copies() * (slower_ * (kLaunchUs + kMemoryUs) + bytes_us(2 * call.num_bytes, call));
  }
  /// The time of that copy over the call's.
  double share_of_copy(const PlannedCall& call) const { return copy_us(call) / us(call); }

  /// Of one call by packets that Python makes, alone, until its result is there.
  double eager_us(const PlannedCall& call) const {
    return slower_ * (kPythonUs + kOwnHostUs + kQueriesUs + kStreamLaunchUs - kLaunchUs) + us(call);
  }

  /// The fused AdamW step of bfloat16 parameters with a master and two states in fp32, and LOMO's;
  /// and what their memory traffic takes at least.
  double update_us(const PlannedCall& call, bool has_states) const {
    return in_place_us(call, update_floor_us(call, has_states) / kShareOfCopy);
  }
  double update_floor_us(const PlannedCall& call, bool has_states) const {
    // Of an element two bytes of the gradient are read and of the parameter written, by all ranks;
    // the owner reads and writes three arrays in fp32, or the parameter.
    return bytes_us(2 * call.num_bytes, call) +
           (has_states ? 12 : 1) * call.num_bytes / copy_bytes_per_us_;
  }

  /// The same call over NCCL with GPUs of their own, which sends what a ring sends, or with NVLS
  /// what the switches do not add up and copy: at the bus bandwidth that NVIDIA states.
  double nccl_on_own_gpus_us(const PlannedCall& call, bool has_nvls) const {
    const double bytes = 2 * (call.num_ranks - 1.0) / call.num_ranks * call.num_bytes;
    return kNcclStartUs + bytes / (has_nvls ? kNvlsBytesPerUs : kRingBytesPerUs);
  }

  /// Of a message that is read where it is, while each of `num_ranks` sends one and receives one.
  double message_us(double num_bytes, int num_ranks) const {
    return slower_ * (kLaunchUs + 2 * kNextUs + 2 * kRendezvousUs + kMemoryUs) +
           2 * num_bytes * num_ranks / (copy_bytes_per_us_ * kShareOfCopy);
  }

  /// Of cross_entropy_and_grad_ on rows of 16-bit logits, in clusters
  /// (kernels/losses/loss_kernels.cu): a row is loaded, one is computed with, and one is stored at
  /// a time.
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
    return 3 * slower_ * (kLaunchUs + kMemoryUs) + 2 * kRendezvousUs * slower_ +
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
  static constexpr double kNextUs = 1.2;    // of one that follows another of its graph
  static constexpr double kHandOverUs = 0.85;
  // A fence of the system until all stores are done, the hand-over, the headers' load, two votes.
  static constexpr double kRendezvousUs = 0.7 + kHandOverUs + 0.8;
  static constexpr double kL2Us = 0.3;
  static constexpr double kMemoryUs = 0.6;
  static constexpr double kShareOfCopy = 0.92;  // of its rate, with reads and writes mixed
  // Between L2 and multiprocessors (benchmarks/results/2026-11-27-kernels.jsonl).
  static constexpr double kCachedBytesPerUs = 4.4e6;
  static constexpr double kClusterExchangeUs = 1;  // and two barriers of a block
  // Between GPUs of their own: what reads reach of NVLink's 450 GB/s, and a round.
  static constexpr double kLinkBytesPerUs = 0.385e6, kLinkHandOverUs = 1.2;
  // Bus bandwidth of NCCL on eight such GPUs, and what a call takes besides.
  static constexpr double kRingBytesPerUs = 0.36e6, kNvlsBytesPerUs = 0.48e6, kNcclStartUs = 15;
  // Products of 16-bit elements at 80 % of the tensor cores' peak, and the end of a product.
  static constexpr double kProductFlopsPerUs = 0.79e9, kProductEndUs = 8;
  // An eager call's host path: Python with c10d, and ringcomm, by a profile over the emulator (2.7
  // and 0.5 us); estimates of two questions to the driver, and from the call that launches to the
  // kernel's first instruction.
  static constexpr double kPythonUs = 3, kOwnHostUs = 0.5, kQueriesUs = 0.2, kStreamLaunchUs = 3.2;
  // Of the warps of a multiprocessor of four schedulers at 1.755 GHz.
  static constexpr double kUsPerInstruction = 16.0 / 4 / 1755;

  double bytes_us(double bytes_of_rank, const PlannedCall& call) const {
    return (call.has_own_gpus ? 1 : call.num_ranks) * bytes_of_rank / copy_bytes_per_us_;
  }

  /// Each packet is twice its data, and is written and read. A thread has some packets under way.
  double packets_us(const PlannedCall& call, int num_rounds) const {
    const double others = call.num_ranks - 1;
    const double sent = call.op == OpKind::kAllReduce && num_rounds == 1
                            ? others * call.num_bytes
                            : num_rounds * others / call.num_ranks * call.num_bytes;
    const double all = 4 * sent * (call.has_own_gpus ? 1 : call.num_ranks);
    const double at_once = call.num_ranks == 2 ? 4 : 1;
    const double looks =
        num_rounds * std::ceil(call.words_of_thread / at_once) * std::ceil(call.num_ranks / 8.0);
    const double hand_over_us = call.has_own_gpus ? kLinkHandOverUs : kHandOverUs;
    return slower_ * (kLaunchUs + kMemoryUs + num_rounds * hand_over_us + looks * kL2Us + 0.5) +
           all / (call.has_own_gpus ? kLinkBytesPerUs * 2 : kCachedBytesPerUs);
  }

  /// Three launches, two rendezvous, and what goes between them, for each piece if ranks stage.
  double in_place_us(const PlannedCall& call, double traffic) const {
    const bool is_staged = call.path == Path::kStaged;
    const double launches = kLaunchUs + (3 * call.num_pieces - 1) * kNextUs;
    const double rendezvous =
        2 * (is_staged ? call.num_pieces : 1) * (kRendezvousUs + (call.has_own_gpus ? 0.35 : 0));
    return slower_ * (launches + rendezvous + kMemoryUs) + traffic;
  }
  double traffic_us(const PlannedCall& call) const {
    const double copies = call.path == Path::kStaged ? 3 : 1;  // to and from scratch memory
    const double memory_us =
        copies * call.copies() * bytes_us(2 * call.num_bytes, call) / kShareOfCopy;
    if (!call.has_own_gpus) return memory_us;
    const double rounds = call.op == OpKind::kAllReduce ? 2 : 1;
    return std::max(memory_us, rounds * (call.num_ranks - 1.0) / call.num_ranks * call.num_bytes /
                                   kLinkBytesPerUs);
  }

  /// Every slice goes around twice but for a step, one slot of a block after the other.
  double ring_us(const PlannedCall& call) const {
    const double chunk = call.num_bytes / call.num_ranks;
    const double turns = std::ceil(chunk / (call.slot_bytes * call.num_blocks));
    const double steps = 2 * (call.num_ranks - 1.0);
    const double bytes = 7 * chunk * steps * (call.has_own_gpus ? 1 : call.num_ranks);
    return in_place_us(call, 0) + slower_ * turns * steps * (kHandOverUs + kRendezvousUs) +
           bytes / (call.has_own_gpus ? kLinkBytesPerUs * 7 : kCachedBytesPerUs);
  }

  double copy_bytes_per_us_;
  double slower_;
};

}  // namespace ringcomm::benchmarks
