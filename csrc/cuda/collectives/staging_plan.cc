#include "cuda/collectives/staging_plan.h"

#include <algorithm>

#include "cuda/kernels/packets.h"

namespace ringcomm::cuda {
namespace {

constexpr int kMaxBlocks = 32;
// Data of packets from all ranks together, in each of two rounds and of two calls.
constexpr std::size_t kPacketBytes = std::size_t{1} << 20;
constexpr std::uint32_t kRingSlotBytes = 64 << 10;
constexpr std::uint32_t kLinkSlotBytes = (16 << 10) + sizeof(Letter);
constexpr std::uint64_t kUnitBytes = std::uint64_t{2} << 20;
constexpr std::uint64_t kMaxScratchBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kShareOfScratch = 64;  // of a device's free memory, for all of its ranks

}  // namespace

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

}  // namespace ringcomm::cuda
