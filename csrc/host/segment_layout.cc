#include "host/segment_layout.h"

#include "host/process.h"

namespace ringcomm::host {
namespace {

// The sum of N regions reads all at once. If they began at the same place of a page, equal elements
// would compete for one set of an L1 cache: 32 sources take 1.8 times as long.
constexpr std::size_t kNumShifts = 4096 / kLineBytes;

// From one board to the next, with room for the shift.
std::size_t board_stride_bytes(const SegmentConfig& config) {
  return whole_pages(whole_pages(config.board_region_bytes) + (kNumShifts - 1) * kLineBytes);
}

// The one with number `idx` of the links that begin at `begin`.
LinkGeometry link_at(std::byte* begin, int idx, std::uint32_t num_slots, std::size_t slot_bytes) {
  begin += static_cast<std::size_t>(idx) * link_bytes(num_slots, slot_bytes);
  auto* cursors = reinterpret_cast<LinkCursors*>(begin);
  return {.tail = &cursors->tail,
          .head = &cursors->head,
          .slots = begin + whole_pages(sizeof(LinkCursors)),
          .num_slots = num_slots,
          .slot_bytes = slot_bytes};
}

}  // namespace

std::size_t link_bytes(std::uint32_t num_slots, std::size_t slot_bytes) {
  return whole_pages(sizeof(LinkCursors)) + whole_pages(num_slots * slot_bytes);
}

SegmentLayout::SegmentLayout(int world_size, const SegmentConfig& config)
    : world_size_(world_size), config_(config) {
  const auto world = static_cast<std::size_t>(world_size);
  control_offset_bytes_ =
      whole_pages(sizeof(AbortRecord) + sizeof(SurvivorChoices) + world * sizeof(std::uint32_t));
  boards_offset_bytes_ = control_offset_bytes_ + world * whole_pages(sizeof(RankControl));
  rings_offset_bytes_ = boards_offset_bytes_ + world * 2 * board_stride_bytes(config);
  send_recv_offset_bytes_ =
      rings_offset_bytes_ + world * link_bytes(config.ring_num_slots, config.ring_slot_bytes);
  num_bytes_ =
      send_recv_offset_bytes_ +
      world * (world - 1) * link_bytes(config.send_recv_num_slots, config.send_recv_slot_bytes);
}

std::uint32_t& SegmentLayout::has_joined(std::byte* base, int rank) const {
  base += sizeof(AbortRecord) + sizeof(SurvivorChoices);
  return reinterpret_cast<std::uint32_t*>(base)[rank];
}

RankControl& SegmentLayout::control(std::byte* base, int rank) const {
  base += control_offset_bytes_ + static_cast<std::size_t>(rank) * whole_pages(sizeof(RankControl));
  return *reinterpret_cast<RankControl*>(base);
}

BoardGeometry SegmentLayout::board(std::byte* base) const {
  const std::size_t stride_bytes = board_stride_bytes(config_);
  return {.world_size = world_size_,
          .cursors = base + boards_offset_bytes_,
          .cursor_stride_bytes = stride_bytes,
          .regions = base + boards_offset_bytes_ + sizeof(Cursor),
          .region_stride_bytes = stride_bytes,
          .region_bytes = whole_pages(config_.board_region_bytes) - sizeof(Cursor),
          .num_shifts = kNumShifts};
}

LinkGeometry SegmentLayout::ring_link(std::byte* base, int rank) const {
  return link_at(base + rings_offset_bytes_, rank, config_.ring_num_slots, config_.ring_slot_bytes);
}

LinkGeometry SegmentLayout::send_recv_link(std::byte* base, int from, int to) const {
  const int pair_idx = from * (world_size_ - 1) + (to < from ? to : to - 1);
  return link_at(base + send_recv_offset_bytes_, pair_idx, config_.send_recv_num_slots,
                 config_.send_recv_slot_bytes);
}

}  // namespace ringcomm::host
