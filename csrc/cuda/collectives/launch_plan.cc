#include "cuda/collectives/launch_plan.h"

#include <algorithm>
#include <stdexcept>

#include "collectives/reduction.h"
#include "core/chunk_layout.h"
#include "core/ring_schedule.h"
#include "cuda/collectives/header_words.h"
#include "cuda/kernels/chunks.h"
#include "cuda/kernels/mail.h"
#include "cuda/kernels/move.h"
#include "cuda/kernels/one_shot.h"
#include "reduce/update_op.h"

namespace ringcomm::cuda {
namespace {

// For an update without a collective: several loads per thread, and several blocks per slot of the
// device.
constexpr std::size_t kOwnUpdateElems = 8 << 10;
constexpr std::size_t kMaxOwnUpdateBlocks = 1024;

const char* optimizer_name(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::kSgd:
      return "sgd";
    case Optimizer::kAdamW:
      return "adamw";
    default:
      return "lomo";
  }
}

// The suffix of the names of kernels that reduce a type.
std::string kernel_suffix(DType dtype) {
  const bool has_own = dtype == DType::kFloat16 || dtype == DType::kBFloat16 ||
                       dtype == DType::kFloat32 || dtype == DType::kSoftmaxStats;
  return has_own ? name_of(dtype) : "any";
}

std::size_t packet_data_bytes(const StagingLayout& layout) {
  return std::size_t{layout.num_packet_blocks} * (layout.packets_per_block - kHeaderPackets) *
         kWordBytes;
}

unsigned blocks_for(std::size_t num_pieces, const StagingLayout& layout) {
  return static_cast<unsigned>(
      std::clamp<std::size_t>(num_pieces, 1, std::size_t{layout.num_blocks}));
}

// The turns of the first block, which has the most pieces of a round-robin distribution, plus a
// last turn that reads the last staged piece.
std::uint32_t turns_for(std::size_t num_pieces, unsigned num_blocks) {
  const std::size_t most = std::max<std::size_t>(1, (num_pieces + num_blocks - 1) / num_blocks);
  return static_cast<std::uint32_t>(most) + 1;
}

void deal_slices(KernelCall& call, LaunchPlan& plan) {
  plan.num_blocks = blocks_for(call.num_slices, call.staging.layout);
  plan.num_turns = turns_for(call.num_slices, plan.num_blocks);
  call.slices_each = static_cast<std::uint32_t>(call.num_slices / plan.num_blocks);
  call.num_longer = static_cast<std::uint32_t>(call.num_slices % plan.num_blocks);
}

template <ReduceShape kShape>
void plan_reduction(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  const std::size_t input_bytes = element_bytes(call.dtype);
  const std::size_t output_bytes =
      call.update != nullptr ? element_bytes(call.update->spec.param_dtype) : input_bytes;
  Chunks<kShape>::cut(kernel_call, input_bytes, output_bytes);
  const Chunks<kShape> chunks(kernel_call, input_bytes, output_bytes);
  deal_slices(kernel_call, plan);
  plan.num_turns += gathers(kShape) ? 1 : 0;
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    const std::size_t elems = chunks.chunk(rank).num_elems;
    if (rank != kernel_call.rank) plan.traffic.sent_bytes += elems * input_bytes;
    if (rank == kernel_call.rank && gathers(kShape))
      plan.traffic.sent_bytes +=
          elems * output_bytes * static_cast<std::size_t>(kernel_call.world_size - 1);
  }
}

void plan_ring(const Collective& call, const CallHeader& header, KernelCall& kernel_call,
               LaunchPlan& plan) {
  const std::size_t elem_bytes = element_bytes(call.dtype);
  const ChunkLayout layout(call.num_elems, kernel_call.world_size);
  plan.num_blocks =
      blocks_for(num_slices(layout.max_chunk_elems(), header.ring_slot_bytes / elem_bytes),
                 kernel_call.staging.layout);
  const RingSchedule schedule(kernel_call.rank, kernel_call.world_size);
  for (int step = 0; step < schedule.num_steps(); ++step)
    plan.traffic.sent_bytes += (layout.chunk(schedule.reduce_scatter_send_chunk(step)).num_elems +
                                layout.chunk(schedule.all_gather_send_chunk(step)).num_elems) *
                               elem_bytes;
}

void plan_one_shot(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  const std::size_t most =
      (kernel_call.staging.layout.packets_per_block - kHeaderPackets) * kWordBytes;
  plan.num_blocks =
      static_cast<unsigned>(std::max<std::size_t>(1, num_slices(call.num_bytes(), most)));
  plan.traffic.sent_bytes = static_cast<std::size_t>(kernel_call.world_size - 1) * call.num_bytes();
}

// ---- moves: sizes by pair of ranks

struct Shares {
  KernelCall& to;
  std::size_t elem_bytes;

  void send(int rank, const void* data, std::size_t num_elems) const {
    to.inputs[rank] = static_cast<const std::byte*>(data);
    to.input_bytes[rank] = num_elems * elem_bytes;
  }
  void receive(int rank, void* data, std::size_t num_elems) const {
    to.outputs[rank] = static_cast<std::byte*>(data);
    to.output_bytes[rank] = num_elems * elem_bytes;
  }
};

void fill_shares(const Collective& call, KernelCall& kernel_call) {
  const Shares shares{kernel_call, element_bytes(call.dtype)};
  const bool is_root = call.root == kernel_call.rank;
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    const auto idx = static_cast<std::size_t>(rank);
    switch (call.op) {
      case OpKind::kAllGather:
        shares.send(rank, call.inputs[0], call.output_share(kernel_call.rank));
        shares.receive(rank, call.outputs[rank], call.output_share(rank));
        break;
      case OpKind::kBroadcast:
        if (is_root) shares.send(rank, call.inputs[0], call.num_elems);
        if (rank == call.root && !is_root) shares.receive(rank, call.outputs[0], call.num_elems);
        break;
      case OpKind::kGather:
        if (rank == call.root)
          shares.send(rank, call.inputs[0], is_root ? call.output_share(rank) : call.num_elems);
        if (is_root) shares.receive(rank, call.outputs[idx], call.output_share(rank));
        break;
      case OpKind::kScatter:
        if (is_root) shares.send(rank, call.inputs[idx], call.input_share(rank));
        if (rank == call.root)
          shares.receive(rank, call.outputs[0], is_root ? call.input_share(rank) : call.num_elems);
        break;
      case OpKind::kAllToAll:
        shares.send(rank, call.inputs[idx], call.input_share(rank));
        shares.receive(rank, call.outputs[idx], call.output_share(rank));
        break;
      default:
        break;
    }
  }
}

void plan_move(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  fill_shares(call, kernel_call);
  const bool is_shared = call.op == OpKind::kAllGather || call.op == OpKind::kBroadcast ||
                         call.op == OpKind::kGather || call.op == OpKind::kBarrier;
  plan.kernel = is_shared ? "ringcomm_move_same" : "ringcomm_move";
  std::uint64_t longest_bytes = 0;
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    longest_bytes =
        std::max({longest_bytes, kernel_call.input_bytes[rank], kernel_call.output_bytes[rank]});
    if (rank != kernel_call.rank) plan.traffic.sent_bytes += kernel_call.input_bytes[rank];
  }
  const StagingLayout& layout = kernel_call.staging.layout;
  kernel_call.part_bytes = static_cast<std::uint32_t>(move_part_bytes(layout, is_shared));
  kernel_call.staged_stride = CopyList::stride_of(kernel_call.part_bytes);
  if (has_private_sizes(call.op)) {
    kernel_call.longest_bytes = KernelCall::kUnknown;
    plan.num_blocks = layout.num_blocks;
    return;
  }
  kernel_call.longest_bytes = longest_bytes;
  kernel_call.num_slices =
      std::max<std::uint64_t>(num_slices(longest_bytes, kernel_call.part_bytes), 1);
  deal_slices(kernel_call, plan);
}

void fill_update(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  const ShardUpdate& update = *call.update;
  plan.kernel = std::string("ringcomm_update_") + optimizer_name(update.spec.optimizer) + "_" +
                name_of(call.dtype) + "_" + name_of(update.spec.param_dtype);
  kernel_call.update = make_update_op(update.spec, call.dtype).scalars;
  kernel_call.master = update.master;
  kernel_call.states[0] = update.states[0];
  kernel_call.states[1] = update.states[1];
}

// One word more of a digest: any difference in a word changes about half of the bits.
std::uint64_t digest_with(std::uint64_t digest, std::uint64_t word) {
  digest = (digest ^ word) * 0x9e3779b97f4a7c15u;
  return digest ^ digest >> 29;
}

// The digest of size lists that must be equal on all ranks; the header has no room for the lists.
std::uint64_t digest_of_shares(const Collective& call, int world_size) {
  std::uint64_t digest = 1;
  for (int rank = 0; rank < world_size; ++rank)
    digest = digest_with(
        digest, call.op == OpKind::kAllGather ? call.output_share(rank) : call.input_share(rank));
  return digest;
}

// The lane of messages to one rank, or from one.
int lane_of(const Mail& mail) { return 2 * mail.peer + (mail.is_send ? 1 : 0); }

}  // namespace

void plan_header(const Collective& call, const CommunicatorOptions& options,
                 const StagingLayout& layout, bool takes_turns, CallHeader& header) {
  header.algorithm = Algorithm::kDirect;
  if (has_private_sizes(call.op)) {
    header.num_elems = 0;
    header.is_uneven = false;
  } else if (header.is_uneven) {
    header.num_elems = digest_of_shares(call, static_cast<int>(layout.world_size));
  }
  if (call.op != OpKind::kAllReduce) return;
  if (takes_turns) {
    header.algorithm = Algorithm::kTwoShot;
    return;
  }
  const bool fits_packets =
      call.num_bytes() <= packet_data_bytes(layout) && call.dtype != DType::kSoftmaxStats;
  Algorithm asked = call.algorithm != Algorithm::kAuto ? call.algorithm : options.algorithm;
  if (asked == Algorithm::kOneShot && !fits_packets) asked = Algorithm::kTwoShot;
  // A ring does not add in rank order, and does not support records.
  if (asked == Algorithm::kRing && (options.is_rank_ordered || call.dtype == DType::kSoftmaxStats))
    asked = Algorithm::kTwoShot;
  const bool is_open =
      asked != Algorithm::kOneShot && asked != Algorithm::kTwoShot && asked != Algorithm::kRing;
  header.algorithm = !is_open ? asked : fits_packets ? Algorithm::kOneShot : Algorithm::kTwoShot;
  if (header.algorithm != Algorithm::kRing) return;
  // Slots are in a block's two regions.
  const CommunicatorOptions cut = options.ring_options(call);
  header.ring_num_slots = std::min<std::uint32_t>(cut.num_slots, layout.region_bytes / kLineBytes);
  header.ring_slot_bytes =
      std::min<std::uint64_t>(cut.slot_bytes, 2 * std::uint64_t{layout.region_bytes} /
                                                  header.ring_num_slots / kLineBytes * kLineBytes);
}

LaunchPlan plan_launch(const Collective& call, const CallHeader& header, KernelCall& kernel_call) {
  LaunchPlan plan;
  const HeaderWords words = to_words(header);
  std::copy(words.begin(), words.end(), kernel_call.header);
  kernel_call.header_digest = 1;
  for (const std::uint32_t word : words)
    kernel_call.header_digest = digest_with(kernel_call.header_digest, word);
  kernel_call.root = call.root;
  kernel_call.dtype = call.dtype;
  kernel_call.reduction = call.reduction;
  kernel_call.divisor = divisor_of(call, kernel_call.world_size);
  kernel_call.num_elems = call.num_elems;
  plan.traffic.algorithm = header.algorithm;
  if (!is_reduction(call.op) && call.op != OpKind::kReduceUpdateGather) {
    plan_move(call, kernel_call, plan);
    return plan;
  }
  const std::string element = kernel_suffix(call.dtype);
  const bool has_shares = call.op == OpKind::kReduceScatter;
  for (int rank = 0; rank < (has_shares ? kernel_call.world_size : 1); ++rank) {
    kernel_call.inputs[rank] = static_cast<const std::byte*>(call.inputs[rank]);
    kernel_call.input_bytes[rank] = call.input_share(rank) * element_bytes(call.dtype);
  }
  kernel_call.outputs[0] = static_cast<std::byte*>(call.outputs[0]);
  switch (call.op) {
    case OpKind::kReduceUpdateGather:
      fill_update(call, kernel_call, plan);
      plan_reduction<ReduceShape::kUpdate>(call, kernel_call, plan);
      break;
    case OpKind::kReduceScatter:
      plan.kernel = "ringcomm_reduce_scatter_" + element;
      plan_reduction<ReduceShape::kReduceScatter>(call, kernel_call, plan);
      break;
    case OpKind::kReduce:
      plan.kernel = "ringcomm_reduce_" + element;
      plan_reduction<ReduceShape::kReduce>(call, kernel_call, plan);
      break;
    default:
      if (header.algorithm == Algorithm::kOneShot) {
        plan.kernel = "ringcomm_one_shot_" + element;
        plan_one_shot(call, kernel_call, plan);
      } else if (header.algorithm == Algorithm::kRing) {
        plan.kernel = "ringcomm_ring_" + element;
        kernel_call.ring_num_slots = header.ring_num_slots;
        kernel_call.ring_slot_bytes = static_cast<std::uint32_t>(header.ring_slot_bytes);
        plan_ring(call, header, kernel_call, plan);
      } else {
        plan.kernel = "ringcomm_two_shot_" + element;
        plan_reduction<ReduceShape::kAllReduce>(call, kernel_call, plan);
      }
  }
  return plan;
}

LaunchPlan plan_own_update(const Collective& call, const void* grad, void* param,
                           std::size_t num_elems, KernelCall& kernel_call) {
  LaunchPlan plan;
  kernel_call.dtype = call.dtype;
  kernel_call.num_elems = num_elems;
  kernel_call.inputs[0] = static_cast<const std::byte*>(grad);
  kernel_call.outputs[0] = static_cast<std::byte*>(param);
  fill_update(call, kernel_call, plan);
  plan.num_blocks = static_cast<unsigned>(
      std::clamp<std::size_t>(num_slices(num_elems, kOwnUpdateElems), 1, kMaxOwnUpdateBlocks));
  return plan;
}

std::uint32_t turns_of_move(const StagingLayout& layout, std::uint64_t longest_bytes,
                            unsigned num_blocks, bool is_shared) {
  return turns_for(num_slices(longest_bytes, move_part_bytes(layout, is_shared)), num_blocks);
}

void check_batch(const std::vector<Mail>& messages) {
  if (messages.size() > MailCall::kMaxMessages)
    throw std::invalid_argument("a batch of sends and receives on a GPU must have at most " +
                                std::to_string(MailCall::kMaxMessages) + ", got " +
                                std::to_string(messages.size()) + "; split it");
}

LaunchPlan plan_exchange(std::vector<Mail> messages, unsigned blocks_per_lane, MailCall& call) {
  std::stable_sort(messages.begin(), messages.end(),
                   [](const Mail& a, const Mail& b) { return lane_of(a) < lane_of(b); });
  const StagingLayout& layout = call.staging.layout;
  LaunchPlan plan;
  plan.kernel = "ringcomm_exchange";
  unsigned num_lanes = 0;
  unsigned num_channels = 1;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    call.messages[i] = messages[i];
    if (i == 0 || lane_of(messages[i]) != lane_of(messages[i - 1]))
      call.first_of_lane[num_lanes++] = static_cast<std::uint8_t>(i);
    num_channels = std::max(num_channels, MailSlices(layout, messages[i].num_bytes).num_channels);
  }
  call.first_of_lane[num_lanes] = static_cast<std::uint8_t>(messages.size());
  call.blocks_per_lane = std::min(blocks_per_lane, num_channels);
  plan.num_blocks = num_lanes * call.blocks_per_lane;
  return plan;
}

}  // namespace ringcomm::cuda
