#include "cuda/collectives/launch_plan.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "collectives/call.h"
#include "core/chunk_layout.h"
#include "cuda/kernels/move.h"
#include "cuda/kernels/one_shot.h"
#include "cuda/kernels/reduce_gather.h"
#include "cuda/kernels/send_recv.h"
#include "kernels/updates/update_op.h"

namespace ringcomm::cuda {

namespace {

// Between these two parts a header has bytes that hold anything.
constexpr std::size_t kFirst = offsetof(CallHeader, num_elems);
constexpr std::size_t kFirstBytes =
    offsetof(CallHeader, element_name) + sizeof(ElementName) - kFirst;
static_assert(kFirstBytes + sizeof(UpdateSpec) <= sizeof(HeaderWords));
static_assert(kFirstBytes == 8 + 4 + 6 + 16 &&
                  sizeof(UpdateSpec) == 6 * sizeof(double) + sizeof(std::uint32_t) + 4,
              "has no gaps");

// One word more of a digest: any difference in a word changes about half of the bits.
std::uint64_t digest_with(std::uint64_t digest, std::uint64_t word) {
  digest = (digest ^ word) * 0x9e3779b97f4a7c15u;
  return digest ^ digest >> 29;
}

// Of sizes that must be equal on all ranks, for which the header has no room.
std::uint64_t digest_of_shards(const Collective& call, int world_size) {
  std::uint64_t digest = 1;
  for (int rank = 0; rank < world_size; ++rank)
    digest = digest_with(
        digest, call.op == OpKind::kAllGather ? call.output_shard(rank) : call.input_shard(rank));
  return digest;
}

}  // namespace

HeaderWords to_words(const CallHeader& header) {
  HeaderWords words = {};
  auto* to = reinterpret_cast<char*>(words.data());
  std::memcpy(to, reinterpret_cast<const char*>(&header) + kFirst, kFirstBytes);
  std::memcpy(to + kFirstBytes, &header.update, sizeof header.update);
  return words;
}

HeaderWords compared_words(const Collective& call, int world_size) {
  CallHeader header = call;
  if (has_private_sizes(call.op)) header = without_sizes(header);
  if (header.is_uneven) header.num_elems = digest_of_shards(call, world_size);
  return to_words(header);
}

CallHeader from_words(const std::uint32_t* words) {
  CallHeader header;
  const auto* from = reinterpret_cast<const char*>(words);
  std::memcpy(reinterpret_cast<char*>(&header) + kFirst, from, kFirstBytes);
  std::memcpy(&header.update, from + kFirstBytes, sizeof header.update);
  return header;
}

// ---- each kernel's parameters

namespace {

// A block for each piece: at a place of its own as long as there is one, which is the faster.
void use_blocks(LaunchPlan& plan, std::size_t num_pieces, std::size_t most,
                std::size_t num_places) {
  plan.num_blocks = static_cast<unsigned>(std::clamp<std::size_t>(num_pieces, 1, most));
  plan.blocks_per_place = plan.num_blocks > num_places ? kBlocksPerPlace : 1;
  // Whole places; a block that has no piece only meets the others, or ends at once.
  plan.num_blocks = static_cast<unsigned>(num_slices(plan.num_blocks, plan.blocks_per_place) *
                                          plan.blocks_per_place);
}
void use_blocks(LaunchPlan& plan, std::size_t num_pieces, const StagingLayout& layout) {
  use_blocks(plan, num_pieces, layout.num_blocks, layout.num_places());
}

void deal_slices(KernelCall& call, LaunchPlan& plan) {
  use_blocks(plan, call.num_slices, call.staging.layout);
  call.slices_each = static_cast<std::uint32_t>(call.num_slices / plan.num_blocks);
  call.num_longer = static_cast<std::uint32_t>(call.num_slices % plan.num_blocks);
  // Those of the first block, which has the most pieces, and one to read the last staged piece.
  plan.num_turns = call.slices_each + (call.num_longer > 0 ? 1 : 0) + 1;
}

}  // namespace

std::uint64_t longest_shard(const KernelCall& call) {
  return std::max(*std::max_element(call.input_bytes, call.input_bytes + call.world_size),
                  *std::max_element(call.output_bytes, call.output_bytes + call.world_size));
}

void set_longest_shard(KernelCall& call, LaunchPlan& plan, std::uint64_t longest_bytes) {
  call.num_slices = std::max<std::uint64_t>(num_slices(longest_bytes, call.part_bytes), 1);
  deal_slices(call, plan);
}

namespace {

// For an update without a collective: several loads per thread, several blocks per multiprocessor.
constexpr std::size_t kOwnUpdateElems = 4 << 10;
constexpr std::size_t kMaxOwnUpdateBlocks = 2048;
constexpr std::size_t kRoundBytes = sizeof(Vector) * kBlockThreads;

template <ReduceShape kShape>
void plan_reduction(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  const std::size_t input_bytes = element_bytes(call.dtype);
  const std::size_t output_bytes = call.output_element_bytes();
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

void plan_ring(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  plan.can_lend = false;
  const std::size_t elem_bytes = element_bytes(call.dtype);
  const StagingLayout& layout = kernel_call.staging.layout;
  const ChunkLayout chunks(call.num_elems, kernel_call.world_size);
  use_blocks(plan, num_slices(chunks.max_chunk_elems(), layout.ring_slot_bytes() / elem_bytes),
             layout);
  const RingSchedule schedule(kernel_call.rank, kernel_call.world_size);
  for (int step = 0; step < schedule.num_steps(); ++step)
    plan.traffic.sent_bytes += (chunks.chunk(schedule.reduce_scatter_send_chunk(step)).num_elems +
                                chunks.chunk(schedule.all_gather_send_chunk(step)).num_elems) *
                               elem_bytes;
}

// Data of one block's packets.
std::size_t block_packet_bytes(const StagingLayout& layout) {
  return (layout.packets_per_block - kHeaderPackets) * kWordBytes;
}

void plan_one_shot(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  plan.can_lend = false;
  const std::size_t most = block_packet_bytes(kernel_call.staging.layout);
  use_blocks(plan, num_slices(call.num_bytes(), most), kernel_call.staging.layout);
  plan.traffic.sent_bytes = static_cast<std::size_t>(kernel_call.world_size - 1) * call.num_bytes();
}

void fill_shards(const Collective& call, KernelCall& kernel_call) {
  const std::size_t elem_bytes = element_bytes(call.dtype);
  const int own = kernel_call.rank;
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    auto given = part_given(call, own, rank), taken = part_taken(call, own, rank);
    if (call.op == OpKind::kBroadcast && own == call.root)
      given = {const_cast<void*>(call.inputs[0]), call.num_elems};
    else if (call.op == OpKind::kBroadcast && rank == call.root)
      taken = {call.outputs[0], call.num_elems};
    if (given) {
      kernel_call.inputs[rank] = static_cast<const std::byte*>(given->data);
      kernel_call.input_bytes[rank] = given->num_elems * elem_bytes;
    }
    if (taken) {
      kernel_call.outputs[rank] = static_cast<std::byte*>(taken->data);
      kernel_call.output_bytes[rank] = taken->num_elems * elem_bytes;
    }
  }
}

template <bool kIsShared>
void plan_move(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  fill_shards(call, kernel_call);
  for (int rank = 0; rank < kernel_call.world_size; ++rank)
    if (rank != kernel_call.rank) plan.traffic.sent_bytes += kernel_call.input_bytes[rank];
  const StagingLayout& layout = kernel_call.staging.layout;
  const std::uint64_t longest = longest_shard(kernel_call);
  std::size_t part_bytes = move_part_bytes(layout, kIsShared);
  // Where all ranks know the sizes, a short call is cut for all blocks, in whole rounds of threads.
  if (!has_private_sizes(call.op)) {
    const std::size_t rounds =
        num_slices(num_slices(longest, layout.num_blocks), kRoundBytes) * kRoundBytes;
    part_bytes = std::min(part_bytes, std::max(rounds, kRoundBytes));
  }
  kernel_call.part_bytes = static_cast<std::uint32_t>(part_bytes);
  kernel_call.staged_stride = CopyList::stride_of(part_bytes);
  if (has_private_sizes(call.op))
    use_blocks(plan, layout.num_blocks, layout);
  else
    set_longest_shard(kernel_call, plan, longest);
}

void fill_update(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  constexpr const char* kOptimizers[] = {"", "sgd_", "adamw_", "lomo_"};
  plan.kernel = std::string("ringcomm_update_") +
                kOptimizers[static_cast<std::size_t>(call.update.optimizer)] + name_of(call.dtype) +
                "_" + name_of(call.update.param_dtype);
  kernel_call.update = make_update_op(call.update, call.dtype).scalars;
  kernel_call.master = call.master;
  kernel_call.states[0] = call.states[0];
  kernel_call.states[1] = call.states[1];
}

void plan_update(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  fill_update(call, kernel_call, plan);
  plan_reduction<ReduceShape::kUpdate>(call, kernel_call, plan);
}

struct Choice {
  const Collective& call;
  const CommunicatorOptions& options;
  const StagingLayout& layout;
  bool takes_turns;
  Algorithm asked;
};

bool sends_packets(const Choice& of) {
  const std::size_t most = std::size_t{of.layout.num_packet_blocks} * block_packet_bytes(of.layout);
  return of.asked != Algorithm::kTwoShot && of.asked != Algorithm::kRing && !of.takes_turns &&
         of.call.num_bytes() <= most;
}
// Only on request. It does not add in rank order.
bool goes_round(const Choice& of) {
  return of.asked == Algorithm::kRing && !of.takes_turns && !of.options.is_rank_ordered;
}
bool always(const Choice&) { return true; }

// The kernel of an operation by an algorithm, when it is used, and what sets its parameters.
struct KernelChoice {
  OpKind op;
  Algorithm algorithm;
  const char* kernel;  // of reductions without their element type
  bool (*is_chosen)(const Choice&);
  void (*plan)(const Collective&, KernelCall&, LaunchPlan&);
};

using enum OpKind;
using enum Algorithm;

// The first of an operation that is chosen.
constexpr KernelChoice kKernels[] = {
    {kAllReduce, kOneShot, "ringcomm_one_shot_", sends_packets, plan_one_shot},
    {kAllReduce, kRing, "ringcomm_ring_", goes_round, plan_ring},
    {kAllReduce, kTwoShot, "ringcomm_two_shot_", always, plan_reduction<ReduceShape::kAllReduce>},
    {kReduceScatter, kDirect, "ringcomm_reduce_scatter_", always,
     plan_reduction<ReduceShape::kReduceScatter>},
    {kReduce, kDirect, "ringcomm_reduce_", always, plan_reduction<ReduceShape::kReduce>},
    {kReduceUpdateGather, kDirect, "", always, plan_update},
    {kScatter, kDirect, "ringcomm_move", always, plan_move<false>},
    {kAllToAll, kDirect, "ringcomm_move", always, plan_move<false>},
    {kAllGather, kDirect, "ringcomm_move_same", always, plan_move<true>},
    {kBroadcast, kDirect, "ringcomm_move_same", always, plan_move<true>},
    {kGather, kDirect, "ringcomm_move_same", always, plan_move<true>},
    {kBarrier, kDirect, "ringcomm_move_same", always, plan_move<true>},
};

}  // namespace

void plan_algorithm(const CommunicatorOptions& options, const StagingLayout& layout,
                    bool takes_turns, Collective& call) {
  const Algorithm asked = call.algorithm != kAuto ? call.algorithm : options.algorithm;
  const Choice choice{call, options, layout, takes_turns, asked};
  const auto kernel = std::find_if(std::begin(kKernels), std::end(kKernels), [&](const auto& each) {
    return each.op == call.op && each.is_chosen(choice);
  });
  call.algorithm = kernel != std::end(kKernels) ? kernel->algorithm : kDirect;
}

LaunchPlan plan_launch(const Collective& call, KernelCall& kernel_call) {
  LaunchPlan plan;
  const HeaderWords words = compared_words(call, kernel_call.world_size);
  std::copy(words.begin(), words.end(), kernel_call.header);
  kernel_call.header_digest = 1;
  for (const std::uint32_t word : words)
    kernel_call.header_digest = digest_with(kernel_call.header_digest, word);
  kernel_call.root = call.root;
  kernel_call.dtype = call.dtype;
  kernel_call.reduction = call.reduction;
  kernel_call.divisor = divisor_of(call, kernel_call.world_size);
  kernel_call.num_elems = call.num_elems;
  plan.traffic.algorithm = call.algorithm;
  const auto kernel = std::find_if(std::begin(kKernels), std::end(kKernels), [&](const auto& each) {
    return each.op == call.op && each.algorithm == call.algorithm;
  });
  if (kernel == std::end(kKernels) || call.dtype == DType::kSoftmaxStats)
    throw std::invalid_argument(std::string("there is no kernel for ") + name_of(call.op) + " of " +
                                name_of(call.dtype));
  plan.kernel = kernel->kernel;
  if (is_reduction(call.op)) {
    // float64, integers and booleans share a kernel.
    const bool has_own = call.dtype == DType::kFloat16 || call.dtype == DType::kBFloat16 ||
                         call.dtype == DType::kFloat32;
    plan.kernel += has_own ? name_of(call.dtype) : "any";
  }
  if (is_reduction(call.op) || call.op == OpKind::kReduceUpdateGather) {
    const int num_inputs = call.op == OpKind::kReduceScatter ? kernel_call.world_size : 1;
    for (int rank = 0; rank < num_inputs; ++rank) {
      kernel_call.inputs[rank] = static_cast<const std::byte*>(call.inputs[rank]);
      kernel_call.input_bytes[rank] = call.input_shard(rank) * element_bytes(call.dtype);
    }
    kernel_call.outputs[0] = static_cast<std::byte*>(call.outputs[0]);
  }
  kernel->plan(call, kernel_call, plan);
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
  use_blocks(plan, num_slices(num_elems, kOwnUpdateElems), kMaxOwnUpdateBlocks, 1);
  return plan;
}

// ---- buffers that peers use where they are

namespace {

struct Buffer {
  const std::byte* data;
  std::size_t num_bytes;
};

bool overlap(const Buffer& a, const Buffer& b) {
  return a.num_bytes > 0 && b.num_bytes > 0 && a.data < b.data + b.num_bytes &&
         b.data < a.data + a.num_bytes;
}

// Whether peers write this rank's output.
bool gathers(OpKind op) { return op == OpKind::kAllReduce || op == OpKind::kReduceUpdateGather; }

// This rank's input for `rank`, at the address where that rank reads it.
Buffer input_for(const Collective& call, const KernelCall& kernel_call, int rank) {
  const bool is_one = gathers(call.op) || call.op == OpKind::kReduce;
  if (call.op == OpKind::kReduce && rank != call.root) return {nullptr, 0};
  const int idx = is_one ? 0 : rank;
  return {kernel_call.inputs[idx], kernel_call.input_bytes[idx]};
}

// Whether this rank's kernel writes to a buffer that a peer reads. Its own shard of a move may be
// in place: it is not copied then.
bool is_written(const Collective& call, const KernelCall& kernel_call, const Buffer& input) {
  const int own = kernel_call.rank;
  if (gathers(call.op)) return false;
  if (is_reduction(call.op)) {
    const bool has_output = call.op == OpKind::kReduceScatter;
    return has_output && overlap(input, {kernel_call.outputs[0], kernel_call.input_bytes[own]});
  }
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    const Buffer output{kernel_call.outputs[rank], kernel_call.output_bytes[rank]};
    if (rank == own && output.data == kernel_call.inputs[own]) continue;
    if (overlap(input, output)) return true;
  }
  return false;
}

// Whether no block has a second slice; not known for moves with different sizes.
bool is_short(const Collective& call, const LaunchPlan& plan, const KernelCall& kernel_call) {
  return !gathers(call.op) && kernel_call.num_slices > 0 &&
         kernel_call.num_slices <= plan.num_blocks;
}

}  // namespace

bool find_lent_buffers(const Collective& call, const LaunchPlan& plan, const PlaceOf& place_of,
                       KernelCall& kernel_call) {
  std::fill(std::begin(kernel_call.lent_inputs), std::end(kernel_call.lent_inputs), 0);
  kernel_call.lent_output = 0;
  kernel_call.lends = Lends::kNo;
  if (!plan.can_lend || is_short(call, plan, kernel_call)) return false;
  bool has_any = false;
  Buffer last{nullptr, 0};
  std::uint64_t place = 0;
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    const Buffer input = input_for(call, kernel_call, rank);
    if (rank == kernel_call.rank || input.num_bytes == 0) continue;
    // Mostly it has the same for all.
    if (input.data != last.data || input.num_bytes != last.num_bytes) {
      place = is_written(call, kernel_call, input) ? 0 : place_of(input.data, input.num_bytes);
      last = input;
    }
    if (place == 0) return true;
    kernel_call.lent_inputs[rank] = place;
    has_any = true;
  }
  if (has_any && gathers(call.op)) {
    kernel_call.lent_output =
        place_of(kernel_call.outputs[0], call.num_elems * call.output_element_bytes());
    if (kernel_call.lent_output == 0) return true;
  }
  kernel_call.lends = has_any ? Lends::kYes : Lends::kNothing;
  return has_any;
}

// ---- messages

// The lane of messages to one rank, or from one.
static int lane_of(const P2pMessage& message) {
  return 2 * message.peer + (message.is_send ? 1 : 0);
}

void check_batch(const std::vector<P2pMessage>& messages) {
  if (messages.size() > P2pCall::kMaxMessages)
    throw std::invalid_argument("a batch of sends and receives on a GPU must have at most " +
                                std::to_string(P2pCall::kMaxMessages) + ", got " +
                                std::to_string(messages.size()) + "; split it");
}

LaunchPlan plan_exchange(std::vector<P2pMessage> messages, unsigned places_per_lane,
                         P2pCall& call) {
  std::stable_sort(messages.begin(), messages.end(), [](const P2pMessage& a, const P2pMessage& b) {
    return lane_of(a) < lane_of(b);
  });
  const StagingLayout& layout = call.staging.layout;
  LaunchPlan plan;
  plan.kernel = "ringcomm_exchange";
  unsigned num_lanes = 0;
  unsigned num_channels = 1;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    call.messages[i] = messages[i];
    if (i == 0 || lane_of(messages[i]) != lane_of(messages[i - 1]))
      call.first_of_lane[num_lanes++] = static_cast<std::uint8_t>(i);
    num_channels = std::max(num_channels, P2pSlices(layout, messages[i].num_bytes).num_channels);
  }
  call.first_of_lane[num_lanes] = static_cast<std::uint8_t>(messages.size());
  use_blocks(plan, num_channels, std::size_t{places_per_lane} * kBlocksPerPlace, 1);
  call.blocks_per_lane = plan.num_blocks;
  plan.num_blocks *= num_lanes;
  return plan;
}

}  // namespace ringcomm::cuda
