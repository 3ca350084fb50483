#include "cuda/collectives/staging_plan.h"

#include <algorithm>

#include "cuda/kernels/one_shot.h"

namespace ringcomm::cuda {
namespace {

constexpr int kMaxPlaces = 132;
// For a rank with its own device: enough for its links.
constexpr int kMaxPlacesAlone = 32;
// For all ranks on a device together, so that its L2 cache holds the staging of collectives.
constexpr std::size_t kStagingBytes = std::size_t{27} << 20;
constexpr std::size_t kUnitBytes = std::size_t{2} << 20;
// What the threads of a block have in flight, 8 vectors each, and twice that for many ranks: their
// parts are short, and each step has a round (tests/cpp/test_gpu_latency.cc).
constexpr std::size_t kRegionBytes = 32 << 10;
constexpr std::size_t kRegionBytesOfMany = 64 << 10;
constexpr std::size_t kMany = 5;
constexpr std::size_t kMinRegionBytes = 8 << 10;
// Message slots use the remaining memory, at least 8 channels of two turns of a block's copy for
// each of up to 8 ranks; only the slots in use at a time need fit the cache.
constexpr std::size_t kTurnBytes = 16 << 10;
constexpr std::size_t kMaxSlotBytes = 4 * kTurnBytes;
constexpr std::size_t kMinPeerBytes =
    8 * (StagingLayout::kP2pSlots * 2 * kTurnBytes + sizeof(LinkCursors));
constexpr std::size_t kMaxFundedPeers = 8;
constexpr int kMaxPlacesPerLane = 8;
// The first group leaves half of a device's blocks to others.
constexpr int kShareOfFirst = 2;
// A further group, or a pair of ranks, reserves one part in this many of the free places.
constexpr int kShareOfFurther = 3;
constexpr int kShareOfMessages = 4;
constexpr std::size_t kTurnRegionBytes = std::size_t{64} << 20;  // of all blocks together
// Data in a block's packets: from all ranks together, and at most from one rank.
constexpr std::size_t kPacketBytesOfAll = 4 << 10;
constexpr std::size_t kMaxPacketBytes = 1 << 10;
// The number of a device's ranks that reserve their blocks.
int num_reserving(const DeviceFacts& facts) {
  const bool is_on_one_device = facts.max_ranks_per_device == facts.world_size;
  return facts.max_ranks_per_device - (is_on_one_device && facts.world_size > 1 ? 1 : 0);
}

int free_places_of(const DeviceFacts& facts) {
  return std::min(facts.free_places, max_waiting_places(facts.min_multiprocessors));
}

int places_per_lane(int free_places) {
  return std::clamp(free_places / kShareOfMessages / 2, 1, kMaxPlacesPerLane);
}

// Slots for messages: as many channels as the first pair of ranks gets blocks for a lane, unless
// that makes slots shorter than a turn.
void cut_p2p(const DeviceFacts& facts, std::size_t wanted_bytes, StagingLayout& layout) {
  const std::size_t world = layout.world_size;
  const auto in_pieces = [](std::size_t num) { return num / kUnitBytes * kUnitBytes; };
  const int left =
      free_places_of(facts) - num_reserving(facts) * static_cast<int>(layout.num_places());
  layout.num_p2p_channels = kBlocksPerPlace * static_cast<std::uint32_t>(places_per_lane(left));
  const std::size_t others = layout.num_bytes();
  const std::size_t least = others + std::min(world, kMaxFundedPeers) * kMinPeerBytes;
  const std::size_t rest =
      std::max(in_pieces(wanted_bytes), in_pieces(least + kUnitBytes - 1)) - others;
  const std::size_t num_slots = StagingLayout::kP2pSlots * world;
  layout.num_p2p_channels = static_cast<std::uint32_t>(std::clamp<std::size_t>(
      rest / (num_slots * kTurnBytes), kBlocksPerPlace, layout.num_p2p_channels));
  layout.p2p_slot_bytes = static_cast<std::uint32_t>(
      std::min(rest / (num_slots * layout.num_p2p_channels), kMaxSlotBytes) / kLineBytes *
      kLineBytes);
}

}  // namespace

int max_waiting_places(int num_multiprocessors) {
  // Of a group on one device a rank reserves none, so it uses up to twice as many as it reserves.
  static_assert(kPlacesPerMultiprocessor >= 2);
  return num_multiprocessors * 7 / 8;
}

bool reserves_places(const DeviceFacts& facts, int rank) {
  return num_reserving(facts) == facts.max_ranks_per_device || rank != 0;
}

unsigned places_that_fit(const DeviceFacts& facts) {
  const int all = max_waiting_places(facts.min_multiprocessors);
  const int free = free_places_of(facts);
  const int reserving = num_reserving(facts);
  int most = free / reserving;
  if (facts.max_ranks_per_device == 1) {
    most = std::min(most, kMaxPlacesAlone);
  } else {
    const int resident = facts.min_multiprocessors * kPlacesPerMultiprocessor;
    most = std::min(most, resident / kShareOfFirst / facts.max_ranks_per_device);
    // Some kernels of a late rank fill a multiprocessor, so three eighths are left to it.
    most = std::min(most, facts.min_multiprocessors * 5 / 8 / reserving);
  }
  if (free < all) most = std::min(most, free / kShareOfFurther / reserving);
  // Where the shares are less than a place, one does as long as there are places for it.
  return static_cast<unsigned>(std::clamp(most, free >= reserving ? 1 : 0, kMaxPlaces));
}

StagingLayout make_staging_layout(const DeviceFacts& facts) {
  const auto world = static_cast<std::size_t>(facts.world_size);
  const int resident = facts.min_multiprocessors * kPlacesPerMultiprocessor;
  StagingLayout layout;
  layout.world_size = static_cast<std::uint32_t>(world);
  layout.num_blocks =
      kBlocksPerPlace *
      (facts.takes_turns
           ? static_cast<std::uint32_t>(std::clamp(resident / kShareOfFirst, 1, kMaxPlaces))
           : places_that_fit(facts));
  // Every rank has packets for every rank, so their memory grows with the square of the ranks. Of
  // whole places, as a launch is.
  layout.num_packet_blocks = std::min(
      layout.num_blocks,
      static_cast<std::uint32_t>(std::clamp<std::size_t>(128 / world, 1, 32)) * kBlocksPerPlace);
  layout.packets_per_block =
      kHeaderPackets +
      static_cast<std::uint32_t>(
          std::clamp(kPacketBytesOfAll / world, std::size_t{128}, kMaxPacketBytes) / kWordBytes);
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

unsigned places_per_lane_that_fit(const StagingLayout& layout, int free_places) {
  if (free_places < 2) return 0;
  return std::min(static_cast<unsigned>(places_per_lane(free_places)),
                  static_cast<unsigned>(num_slices(layout.num_p2p_channels, kBlocksPerPlace)));
}

}  // namespace ringcomm::cuda
