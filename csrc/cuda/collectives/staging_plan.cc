#include "cuda/collectives/staging_plan.h"

#include <algorithm>

#include "cuda/kernels/one_shot.h"

namespace ringcomm::cuda {
namespace {

constexpr int kMaxBlocks = 132;
// For a rank with its own device: enough for its links.
constexpr int kMaxBlocksAlone = 32;
// For all ranks on a device together, so that its L2 cache holds the staging of collectives.
constexpr std::size_t kStagingBytes = std::size_t{26} << 20;
constexpr std::size_t kUnitBytes = std::size_t{2} << 20;
// What the threads of a block have in flight, 8 vectors each, and twice of it for many ranks: their
// parts are short, and each step has a hand-over (tests/cpp/test_gpu_latency.cc).
constexpr std::size_t kRegionBytes = 64 << 10;
constexpr std::size_t kRegionBytesOfMany = 128 << 10;
constexpr std::size_t kMany = 5;
constexpr std::size_t kMinRegionBytes = 16 << 10;
// Message slots use the remaining memory, at least 4 channels of two turns of a block's copy for
// each of up to 8 ranks; only the slots in use at a time need fit the cache.
constexpr std::size_t kTurnBytes = 32 << 10;
constexpr std::size_t kMaxSlotBytes = 4 * kTurnBytes;
constexpr std::size_t kMinPeerBytes =
    4 * (StagingLayout::kP2pSlots * 2 * kTurnBytes + sizeof(LinkCursors));
constexpr std::size_t kMaxFundedPeers = 8;
constexpr int kMaxP2pChannels = 8;
// The first group leaves half of a device's blocks to others.
constexpr int kShareOfFirst = 2;
// A further group, or a pair of ranks, reserves one part in this many of the free places.
constexpr int kShareOfFurther = 3;
constexpr int kShareOfMessages = 4;
constexpr std::size_t kTurnRegionBytes = std::size_t{64} << 20;  // of all blocks together
// Data in a block's packets: from all ranks together, and at most from one rank.
constexpr std::size_t kPacketBytesOfAll = 8 << 10;
constexpr std::size_t kMaxPacketBytes = 2 << 10;
// The number of a device's ranks that reserve their blocks.
int num_reserving(const DeviceFacts& facts) {
  return facts.max_ranks_per_device - (facts.is_on_one_device && facts.world_size > 1 ? 1 : 0);
}

int free_blocks_of(const DeviceFacts& facts) {
  return std::min(facts.free_blocks, max_waiting_blocks(facts.min_multiprocessors));
}

int pair_blocks(int free_blocks) {
  return std::clamp(free_blocks / kShareOfMessages / 2, 1, kMaxP2pChannels);
}

// Slots for messages: as many channels as the first pair of ranks gets blocks, unless that makes
// slots shorter than a turn.
void cut_p2p(const DeviceFacts& facts, std::size_t wanted_bytes, StagingLayout& layout) {
  const std::size_t world = layout.world_size;
  const auto in_pieces = [](std::size_t num) { return num / kUnitBytes * kUnitBytes; };
  const int left =
      free_blocks_of(facts) - num_reserving(facts) * static_cast<int>(layout.num_blocks);
  layout.num_p2p_channels = static_cast<std::uint32_t>(pair_blocks(left));
  const std::size_t others = layout.num_bytes();
  const std::size_t least = others + std::min(world, kMaxFundedPeers) * kMinPeerBytes;
  const std::size_t rest =
      std::max(in_pieces(wanted_bytes), in_pieces(least + kUnitBytes - 1)) - others;
  const std::size_t num_slots = StagingLayout::kP2pSlots * world;
  layout.num_p2p_channels = static_cast<std::uint32_t>(
      std::clamp<std::size_t>(rest / (num_slots * kTurnBytes), 1, layout.num_p2p_channels));
  layout.p2p_slot_bytes = static_cast<std::uint32_t>(
      std::min(rest / (num_slots * layout.num_p2p_channels), kMaxSlotBytes) / kLineBytes *
      kLineBytes);
}

}  // namespace

int max_waiting_blocks(int num_multiprocessors) {
  // Of a group on one device a rank reserves none, so blocks are up to twice as many as reserved.
  static_assert(kBlocksPerMultiprocessor >= 2);
  return num_multiprocessors * 7 / 8;
}

bool reserves_blocks(const DeviceFacts& facts, int rank) {
  return num_reserving(facts) == facts.max_ranks_per_device || rank != 0;
}

unsigned blocks_that_fit(const DeviceFacts& facts) {
  const int all = max_waiting_blocks(facts.min_multiprocessors);
  const int free = free_blocks_of(facts);
  const int reserving = num_reserving(facts);
  int most = free / reserving;
  if (facts.max_ranks_per_device == 1) {
    most = std::min(most, kMaxBlocksAlone);
  } else {
    const int resident = facts.min_multiprocessors * kBlocksPerMultiprocessor;
    most = std::min(most, resident / kShareOfFirst / facts.max_ranks_per_device);
    // Some kernels of a late rank fill a multiprocessor, so three eighths are left to it.
    most = std::min(most, facts.min_multiprocessors * 5 / 8 / reserving);
  }
  if (free < all) most = std::min(most, free / kShareOfFurther / reserving);
  // Where the shares are less than a block, one does as long as there are places for it.
  return static_cast<unsigned>(std::clamp(most, free >= reserving ? 1 : 0, kMaxBlocks));
}

StagingLayout make_staging_layout(const DeviceFacts& facts) {
  const auto world = static_cast<std::size_t>(facts.world_size);
  const int resident = facts.min_multiprocessors * kBlocksPerMultiprocessor;
  StagingLayout layout;
  layout.world_size = static_cast<std::uint32_t>(world);
  layout.num_blocks =
      facts.takes_turns
          ? static_cast<std::uint32_t>(std::clamp(resident / kShareOfFirst, 1, kMaxBlocks))
          : blocks_that_fit(facts);
  // Every rank has packets for every rank, so their memory grows with the square of the ranks.
  layout.num_packet_blocks = std::min(
      layout.num_blocks, static_cast<std::uint32_t>(std::clamp<std::size_t>(128 / world, 1, 32)));
  layout.packets_per_block =
      kHeaderPackets +
      static_cast<std::uint32_t>(
          std::clamp(kPacketBytesOfAll / world, std::size_t{256}, kMaxPacketBytes) / kWordBytes);
  if (facts.takes_turns) {
    layout.region_bytes =
        static_cast<std::uint32_t>(kTurnRegionBytes / layout.num_blocks / kLineBytes * kLineBytes);
    return layout;
  }
  const auto in_lines = [](std::size_t num_bytes) {
    return static_cast<std::uint32_t>(num_bytes / kLineBytes * kLineBytes);
  };
  const std::size_t each = kStagingBytes / static_cast<std::size_t>(facts.max_ranks_per_device);
  const std::size_t left = each > layout.num_bytes() ? each - layout.num_bytes() : 0;
  const std::size_t most = world >= kMany ? kRegionBytesOfMany : kRegionBytes;
  layout.region_bytes = in_lines(std::clamp(left / (2 * layout.num_blocks), kMinRegionBytes, most));
  cut_p2p(facts, each, layout);
  return layout;
}

unsigned blocks_per_lane_that_fit(const StagingLayout& layout, int free_blocks) {
  if (free_blocks < 2) return 0;
  return std::min(static_cast<unsigned>(pair_blocks(free_blocks)), layout.num_p2p_channels);
}

}  // namespace ringcomm::cuda
