#include "cuda/collectives/launch_plan.h"

#include <algorithm>
#include <cstring>

#include "core/chunk_layout.h"
#include "cuda/kernels/packets.h"
#include "kernels/updates/update_op.h"

namespace ringcomm::cuda {

// ---- the staging of a group

constexpr int kMaxBlocks = 32;
// Data of packets from all ranks together, in each of two rounds and of two calls.
constexpr std::size_t kPacketBytes = std::size_t{1} << 20;
constexpr std::uint32_t kRingSlotBytes = 64 << 10;
constexpr std::uint32_t kLinkSlotBytes = (16 << 10) + sizeof(Letter);
constexpr std::uint64_t kUnitBytes = std::uint64_t{2} << 20;
constexpr std::uint64_t kMaxScratchBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kShareOfScratch = 64;  // of a device's free memory, for all of its ranks

int share_of_waiting_blocks(int num_multiprocessors, int num_ranks) {
  return std::max(1, num_multiprocessors * 7 / 8 / num_ranks);
}

int waiting_blocks_of_group(const DeviceFacts& facts) {
  const int share = share_of_waiting_blocks(facts.min_multiprocessors, facts.max_ranks_per_device);
  return std::clamp(std::min(facts.free_blocks, share) * 3 / 4, 1, kMaxBlocks);
}

bool has_room_for_messages(const DeviceFacts& facts) {
  return facts.max_ranks_per_device * (facts.world_size - 1) <= facts.min_multiprocessors ||
         facts.world_size <= 2;
}

StagingLayout make_staging_layout(const DeviceFacts& facts) {
  StagingLayout layout;
  layout.world_size = static_cast<std::uint32_t>(facts.world_size);
  layout.num_blocks = static_cast<std::uint32_t>(waiting_blocks_of_group(facts));
  const std::size_t words_per_rank = 2 * kPacketBytes / kWordBytes / layout.world_size;
  // An even number: half of them for each round.
  layout.packets_per_block =
      kHeaderPackets +
      static_cast<std::uint32_t>(num_slices(words_per_rank / 2, layout.num_blocks)) * 2;
  layout.ring_slot_bytes = kRingSlotBytes;
  layout.link_slot_bytes = kLinkSlotBytes;
  const std::uint64_t share =
      facts.free_bytes / kShareOfScratch / static_cast<std::uint64_t>(facts.max_ranks_per_device);
  layout.scratch_bytes = std::clamp(share / kUnitBytes * kUnitBytes, kUnitBytes, kMaxScratchBytes);
  return layout;
}

// ---- headers

// Between these two parts a header has bytes that hold anything.
constexpr std::size_t kFirst = offsetof(CallHeader, num_elems);
constexpr std::size_t kFirstBytes =
    offsetof(CallHeader, element_name) + sizeof(ElementName) - kFirst;
static_assert(kFirstBytes + sizeof(UpdateSpec) <= sizeof(HeaderWords));
static_assert(kFirstBytes == 8 + 4 + 6 + 16 &&
                  sizeof(UpdateSpec) == 6 * sizeof(double) + sizeof(std::uint32_t) + 4,
              "has no gaps");

// One word more of a digest: any difference in a word changes about half of the bits.
static std::uint64_t digest_with(std::uint64_t digest, std::uint64_t word) {
  digest = (digest ^ word) * 0x9e3779b97f4a7c15u;
  return digest ^ digest >> 29;
}

// Of sizes that must be equal on all ranks, for which the header has no room.
static std::uint64_t digest_of_shards(const Collective& call, int world_size) {
  std::uint64_t digest = 1;
  for (int rank = 0; rank < world_size; ++rank)
    digest = digest_with(
        digest, call.op == OpKind::kAllGather ? call.output_shard(rank) : call.input_shard(rank));
  return digest;
}

HeaderWords compared_words(const Collective& call, int world_size) {
  CallHeader header = call;
  if (has_private_sizes(call.op)) header = without_sizes(header);
  if (header.is_uneven) header.num_elems = digest_of_shards(call, world_size);
  HeaderWords words = {};
  auto* to = reinterpret_cast<char*>(words.data());
  std::memcpy(to, reinterpret_cast<const char*>(&header) + kFirst, kFirstBytes);
  std::memcpy(to + kFirstBytes, &header.update, sizeof header.update);
  return words;
}

CallHeader from_words(const std::uint32_t* words, std::uint64_t number) {
  CallHeader header;
  header.seq = number;
  const auto* from = reinterpret_cast<const char*>(words);
  std::memcpy(reinterpret_cast<char*>(&header) + kFirst, from, kFirstBytes);
  std::memcpy(&header.update, from + kFirstBytes, sizeof header.update);
  return header;
}

using enum OpKind;

static bool gathers(OpKind op) { return op == kAllReduce || op == kReduceUpdateGather; }

// ---- which way

constexpr std::size_t kMostPacketBytes = std::size_t{1} << 20;
// An all_reduce of more than two ranks goes in one round while all that a rank sends is this.
constexpr std::size_t kMostOneRoundBytes = std::size_t{512} << 10;

// Data of the packets from one rank in one round, or in each of two.
static std::size_t capacity(const StagingLayout& layout, int num_rounds) {
  const std::size_t words = layout.packets_per_block - kHeaderPackets;
  return words / static_cast<std::size_t>(num_rounds) * layout.num_blocks * kWordBytes;
}

// Of an all_reduce in two rounds, at most.
static std::size_t part_bytes(const StagingLayout& layout, std::size_t num_bytes) {
  return num_slices(num_slices(num_bytes, kWordBytes), layout.world_size) * kWordBytes;
}

static bool fits_one_round(const StagingLayout& layout, std::size_t num_bytes) {
  return num_bytes <= std::min(kMostPacketBytes, capacity(layout, 1));
}
static bool fits_two_rounds(const StagingLayout& layout, std::size_t num_bytes) {
  return num_bytes <= kMostPacketBytes && part_bytes(layout, num_bytes) <= capacity(layout, 2);
}

void plan_algorithm(const CommunicatorOptions& options, const StagingLayout& layout,
                    Collective& call) {
  const Algorithm asked = call.algorithm != Algorithm::kAuto ? call.algorithm : options.algorithm;
  call.algorithm = Algorithm::kDirect;
  if (call.op != kAllReduce) return;
  const std::size_t num_bytes = call.num_bytes();
  const bool is_short =
      asked == Algorithm::kOneShot ||
      (asked != Algorithm::kTwoShot &&
       (layout.world_size <= 2 || num_bytes * layout.world_size <= kMostOneRoundBytes));
  // A ring is used on request only. It does not add in rank order.
  if (asked == Algorithm::kRing && !options.is_rank_ordered)
    call.algorithm = Algorithm::kRing;
  else
    call.algorithm =
        is_short && fits_one_round(layout, num_bytes) ? Algorithm::kOneShot : Algorithm::kTwoShot;
}

// ---- each kernel's parameters

namespace {

// What a block of a kernel that waits for nobody has under way, and its blocks on a multiprocessor:
// some kernels have registers for two of them.
constexpr std::size_t kBytesOfBlock = std::size_t{32} << 10;
constexpr unsigned kPlainBlocks = 4, kUpdateBlocks = 2;
constexpr std::uint64_t kAlignElems = 16;  // parts of an all_reduce are as aligned as the buffer

// A part for each rank: where it is in the inputs and the outputs, in elements.
ElemRange part_of_rank(const Collective& call, int rank, int world_size) {
  if (call.op == kReduceUpdateGather) return ChunkLayout(call.num_elems, world_size).chunk(rank);
  if (call.op == kAllReduce) {
    const std::size_t units = num_slices(call.num_elems, kAlignElems);
    return slice_of({0, call.num_elems}, static_cast<std::size_t>(rank),
                    num_slices(units, static_cast<std::size_t>(world_size)) * kAlignElems);
  }
  if (call.op == kReduceScatter) return {0, call.input_shard(rank)};
  return {0, rank == call.root ? call.num_elems : 0};
}

void fill_shards(const Collective& call, KernelCall& kernel_call, LaunchPlan& plan) {
  const std::size_t elem_bytes = element_bytes(call.dtype);
  const int own = kernel_call.rank;
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    auto given = part_given(call, own, rank), taken = part_taken(call, own, rank);
    if (call.op == kBroadcast && own == call.root)
      given = {const_cast<void*>(call.inputs[0]), call.num_elems};
    else if (call.op == kBroadcast && rank == call.root)
      taken = {call.outputs[0], call.num_elems};
    if (given) {
      kernel_call.inputs[rank] = static_cast<const std::byte*>(given->data);
      kernel_call.input_bytes[rank] = given->num_elems * elem_bytes;
    }
    if (taken) {
      kernel_call.outputs[rank] = static_cast<std::byte*>(taken->data);
      kernel_call.output_bytes[rank] = taken->num_elems * elem_bytes;
    }
    if (rank != own) plan.traffic.sent_bytes += kernel_call.input_bytes[rank];
  }
}

// Cuts parts of at most `longest` elements or bytes into pieces that fit the scratch memory.
void cut(const Collective& call, KernelCall& kernel_call, std::uint64_t longest, LaunchPlan& plan) {
  constexpr std::uint64_t kAlign = StagingLayout::kScratchAlign;
  const bool has_parts = is_reduction(call.op) && call.op != kReduce;
  const auto num_parts = has_parts ? static_cast<std::uint64_t>(kernel_call.world_size) : 1;
  const bool is_update = call.op == kReduceUpdateGather;
  if (is_reduction(call.op)) {
    kernel_call.input_unit = static_cast<std::uint32_t>(element_bytes(call.dtype));
    kernel_call.output_unit = static_cast<std::uint32_t>(call.output_element_bytes());
  }
  kernel_call.has_update = is_update;
  const std::size_t unit = kernel_call.input_unit + (is_update ? kernel_call.output_unit : 0);
  const std::uint64_t most = kernel_call.staging.layout.scratch_bytes / num_parts / unit;
  plan.piece_size = std::max<std::uint64_t>(std::min(longest, most / kAlign * kAlign), 1);
  plan.num_pieces =
      static_cast<unsigned>(std::max<std::uint64_t>(num_slices(longest, plan.piece_size), 1));
  const auto stride_of = [&](std::size_t bytes) {
    return has_parts ? num_slices(plan.piece_size * bytes, kAlign) * kAlign : 0;
  };
  plan.input_stride = stride_of(kernel_call.input_unit);
  plan.output_stride = stride_of(kernel_call.output_unit);
  plan.outputs_offset = is_update ? num_parts * plan.input_stride : 0;
}

unsigned blocks_for(std::uint64_t num_bytes, unsigned most) {
  return static_cast<unsigned>(
      std::clamp<std::uint64_t>(num_slices(num_bytes, kBytesOfBlock), 1, most));
}

void plan_reduction(const Collective& call, int num_multiprocessors, KernelCall& kernel_call,
                    LaunchPlan& plan) {
  const std::size_t input_bytes = element_bytes(call.dtype);
  const std::size_t output_bytes = call.output_element_bytes();
  const int own = kernel_call.rank;
  const auto num_ranks = static_cast<std::uint32_t>(kernel_call.world_size);
  kernel_call.num_outputs = gathers(call.op) ? num_ranks : 1;
  std::uint64_t longest = 0;
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    const ElemRange part = part_of_rank(call, rank, kernel_call.world_size);
    const void* input = call.inputs[call.op == kReduceScatter ? rank : 0];
    longest = std::max<std::uint64_t>(longest, part.num_elems);
    if (rank == own) kernel_call.num_elems = part.num_elems;
    kernel_call.inputs[rank] = at(input, part.begin_elems, input_bytes);
    kernel_call.input_bytes[rank] = part.num_elems * input_bytes;
    if (rank != own) plan.traffic.sent_bytes += kernel_call.input_bytes[rank];
    if (!gathers(call.op) && rank != own) continue;
    kernel_call.outputs[rank] = at(call.outputs[0], part.begin_elems, output_bytes);
    kernel_call.output_bytes[rank] = part.num_elems * output_bytes;
  }
  plan.traffic.sent_bytes += kernel_call.output_bytes[own] * (kernel_call.num_outputs - 1);
  cut(call, kernel_call, longest, plan);
  const unsigned blocks = call.op == kReduceUpdateGather ? kUpdateBlocks : kPlainBlocks;
  plan.num_blocks = blocks_for(kernel_call.input_bytes[own] * num_ranks,
                               blocks * static_cast<unsigned>(num_multiprocessors));
}

void plan_move(const Collective& call, int num_multiprocessors, KernelCall& kernel_call,
               LaunchPlan& plan) {
  std::uint64_t longest = 0, all = 0;
  for (int rank = 0; rank < kernel_call.world_size; ++rank) {
    longest = std::max({longest, kernel_call.input_bytes[rank], kernel_call.output_bytes[rank]});
    all += kernel_call.output_bytes[rank];
  }
  cut(call, kernel_call, longest, plan);
  plan.num_blocks = plain_blocks(all, num_multiprocessors);
}

// Words of the longest part that a rank sends to another in a round.
void plan_packets(std::size_t longest_bytes, KernelCall& kernel_call, LaunchPlan& plan) {
  plan.kind = LaunchKind::kPackets;
  const std::size_t words = std::max<std::size_t>(num_slices(longest_bytes, kWordBytes), 1);
  plan.num_blocks = static_cast<unsigned>(std::clamp<std::size_t>(
      num_slices(words, kBlockThreads), 1, kernel_call.staging.layout.num_blocks));
  kernel_call.words_per_block = static_cast<std::uint32_t>(num_slices(words, plan.num_blocks));
}

void plan_all_reduce(const Collective& call, int num_multiprocessors, KernelCall& kernel_call,
                     LaunchPlan& plan, const std::string& suffix) {
  if (call.algorithm == Algorithm::kDirect) {  // another library's, behind a rendezvous
    plan.kernel = "ringcomm_move_packets";
    return plan_packets(0, kernel_call, plan);
  }
  const StagingLayout& layout = kernel_call.staging.layout;
  const bool is_short =
      call.algorithm == Algorithm::kTwoShot && fits_two_rounds(layout, call.num_bytes());
  if (call.algorithm == Algorithm::kTwoShot && !is_short) {
    plan.kernel = "ringcomm_reduce_" + suffix;
    return plan_reduction(call, num_multiprocessors, kernel_call, plan);
  }
  kernel_call.inputs[0] = static_cast<const std::byte*>(call.inputs[0]);
  kernel_call.outputs[0] = static_cast<std::byte*>(call.outputs[0]);
  kernel_call.input_bytes[0] = call.num_bytes();
  const auto others = static_cast<std::size_t>(kernel_call.world_size - 1);
  if (call.algorithm == Algorithm::kOneShot) {
    plan.kernel = "ringcomm_one_shot_" + suffix;
    plan_packets(call.num_bytes(), kernel_call, plan);
    plan.traffic.sent_bytes = others * call.num_bytes();
  } else if (is_short) {
    plan.kernel = "ringcomm_two_rounds_" + suffix;
    plan_packets(part_bytes(layout, call.num_bytes()), kernel_call, plan);
    plan.traffic.sent_bytes = 2 * others * part_bytes(layout, call.num_bytes());
  } else {
    plan.kernel = "ringcomm_ring_" + suffix;
    plan.kind = LaunchKind::kRing;
    kernel_call.num_elems = call.num_elems;
    plan.piece_size = call.num_elems;
    const std::size_t elem_bytes = element_bytes(call.dtype);
    const ChunkLayout chunks(call.num_elems, kernel_call.world_size);
    plan.num_blocks = static_cast<unsigned>(std::clamp<std::size_t>(
        num_slices(chunks.max_chunk_elems(), layout.ring_slot_bytes / elem_bytes), 1,
        layout.num_blocks));
    const RingSchedule schedule(kernel_call.rank, kernel_call.world_size);
    for (int step = 0; step < schedule.num_steps(); ++step)
      plan.traffic.sent_bytes += (chunks.chunk(schedule.reduce_scatter_send_chunk(step)).num_elems +
                                  chunks.chunk(schedule.all_gather_send_chunk(step)).num_elems) *
                                 elem_bytes;
  }
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

}  // namespace

LaunchPlan plan_launch(const Collective& call, int num_multiprocessors, KernelCall& kernel_call) {
  LaunchPlan plan;
  const HeaderWords words = compared_words(call, kernel_call.world_size);
  std::copy(words.begin(), words.end(), kernel_call.header);
  std::uint64_t digest = 1;
  for (const std::uint32_t word : words) digest = digest_with(digest, word);
  kernel_call.header_digest = digest;
  kernel_call.dtype = call.dtype;
  kernel_call.reduction = call.reduction;
  kernel_call.divisor = divisor_of(call, kernel_call.world_size);
  plan.traffic.algorithm = call.algorithm;
  plan.copy_blocks = kPlainBlocks * static_cast<unsigned>(num_multiprocessors);
  // float64, integers and booleans share a kernel.
  const bool has_own = call.dtype == DType::kFloat16 || call.dtype == DType::kBFloat16 ||
                       call.dtype == DType::kFloat32;
  const std::string suffix = has_own ? name_of(call.dtype) : "any";
  if (call.op == kAllReduce) {
    plan_all_reduce(call, num_multiprocessors, kernel_call, plan, suffix);
  } else if (call.op == kReduceUpdateGather) {
    fill_update(call, kernel_call, plan);
    plan_reduction(call, num_multiprocessors, kernel_call, plan);
  } else if (is_reduction(call.op)) {
    plan.kernel = "ringcomm_reduce_" + suffix;
    plan_reduction(call, num_multiprocessors, kernel_call, plan);
  } else {
    plan.kernel = "ringcomm_move";
    fill_shards(call, kernel_call, plan);
    if (has_private_sizes(call.op))
      plan.kind = LaunchKind::kShards;
    else
      plan_move(call, num_multiprocessors, kernel_call, plan);
  }
  if (plan.kind != LaunchKind::kInPlace || call.op == kAllReduce || call.op == kReduceUpdateGather)
    return plan;
  // All ranks know the longest part: short ones go by packets.
  const std::uint64_t unit_bytes = is_reduction(call.op) ? element_bytes(call.dtype) : 1;
  const std::uint64_t longest = plan.piece_size * plan.num_pieces * unit_bytes;
  const StagingLayout& layout = kernel_call.staging.layout;
  if (!fits_one_round(layout, longest * layout.world_size) || longest > capacity(layout, 1))
    return plan;
  plan.kernel =
      is_reduction(call.op) ? "ringcomm_reduce_packets_" + suffix : "ringcomm_move_packets";
  plan_packets(longest, kernel_call, plan);
  if (is_reduction(call.op)) kernel_call.outputs[0] = static_cast<std::byte*>(call.outputs[0]);
  return plan;
}

LaunchPlan plan_own_update(const Collective& call, const void* grad, void* param,
                           std::size_t num_elems, KernelCall& kernel_call) {
  LaunchPlan plan;
  kernel_call.dtype = call.dtype;
  kernel_call.num_elems = num_elems;
  kernel_call.inputs[0] = static_cast<const std::byte*>(grad);
  kernel_call.outputs[0] = static_cast<std::byte*>(param);
  kernel_call.num_outputs = 1;
  fill_update(call, kernel_call, plan);
  plan.num_blocks = blocks_for(num_elems * element_bytes(call.dtype), 1024);
  return plan;
}

unsigned plain_blocks(std::uint64_t num_bytes, int num_multiprocessors) {
  return blocks_for(num_bytes, kPlainBlocks * static_cast<unsigned>(num_multiprocessors));
}

bool writes_inputs(const Collective& call, const KernelCall& kernel_call) {
  const auto overlap = [](const std::byte* a, std::uint64_t a_bytes, const std::byte* b,
                          std::uint64_t b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
  };
  // An owner writes what it alone has read.
  if (gathers(call.op)) return false;
  const int own = kernel_call.rank;
  for (int to = 0; to < kernel_call.world_size; ++to)
    for (int from = 0; from < kernel_call.world_size; ++from) {
      // Its own shard of a move may be in place: it is not copied then.
      if (to == own || (from == own && !is_reduction(call.op) &&
                        kernel_call.outputs[own] == kernel_call.inputs[own]))
        continue;
      if (overlap(kernel_call.inputs[to], kernel_call.input_bytes[to], kernel_call.outputs[from],
                  kernel_call.output_bytes[from]))
        return true;
    }
  return false;
}

}  // namespace ringcomm::cuda
