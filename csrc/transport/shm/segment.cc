#include "transport/shm/segment.h"

#include "transport/page_bytes.h"

namespace ringcomm::shm {
namespace {

std::size_t link_stride_bytes(std::uint32_t num_slots, std::size_t slot_bytes) {
  return whole_pages(sizeof(LinkCursors)) + whole_pages(num_slots * slot_bytes);
}

}  // namespace

SegmentLayout::SegmentLayout(int world_size, const SegmentConfig& config)
    : world_size_(world_size),
      config_(config),
      board_stride_bytes_(whole_pages(config.board_bytes)),
      ring_stride_bytes_(link_stride_bytes(config.ring_num_slots, config.ring_slot_bytes)),
      p2p_stride_bytes_(link_stride_bytes(config.p2p_num_slots, config.p2p_slot_bytes)) {
  const auto world = static_cast<std::size_t>(world_size);
  control_offset_bytes_ = whole_pages(sizeof(SegmentHeader) + world * sizeof(std::uint32_t));
  boards_offset_bytes_ = control_offset_bytes_ + world * whole_pages(sizeof(RankControl));
  rings_offset_bytes_ = boards_offset_bytes_ + world * 2 * board_stride_bytes_;
  p2p_offset_bytes_ = rings_offset_bytes_ + world * ring_stride_bytes_;
  num_bytes_ = p2p_offset_bytes_ + world * (world - 1) * p2p_stride_bytes_;
}

std::uint32_t& SegmentLayout::has_joined(std::byte* base, int rank) const {
  return reinterpret_cast<std::uint32_t*>(base + sizeof(SegmentHeader))[rank];
}

RankControl& SegmentLayout::control(std::byte* base, int rank) const {
  return *reinterpret_cast<RankControl*>(base + control_offset_bytes_ +
                                         static_cast<std::size_t>(rank) *
                                             whole_pages(sizeof(RankControl)));
}

BoardGeometry SegmentLayout::board(std::byte* base) const {
  return {.world_size = world_size_,
          .published = &control(base, 0).published,
          .published_stride_bytes = whole_pages(sizeof(RankControl)),
          .regions = base + boards_offset_bytes_,
          .region_bytes = board_stride_bytes_};
}

LinkGeometry SegmentLayout::ring_link(std::byte* base, int rank) const {
  return link_at(base, rings_offset_bytes_ + static_cast<std::size_t>(rank) * ring_stride_bytes_,
                 config_.ring_num_slots, config_.ring_slot_bytes);
}

LinkGeometry SegmentLayout::p2p_link(std::byte* base, int from, int to) const {
  const int pair_idx = from * (world_size_ - 1) + (to < from ? to : to - 1);
  return link_at(base, p2p_offset_bytes_ + static_cast<std::size_t>(pair_idx) * p2p_stride_bytes_,
                 config_.p2p_num_slots, config_.p2p_slot_bytes);
}

LinkGeometry SegmentLayout::link_at(std::byte* base, std::size_t offset_bytes,
                                    std::uint32_t num_slots, std::size_t slot_bytes) const {
  auto* cursors = reinterpret_cast<LinkCursors*>(base + offset_bytes);
  return {.tail = &cursors->tail,
          .head = &cursors->head,
          .slots = base + offset_bytes + whole_pages(sizeof(LinkCursors)),
          .num_slots = num_slots,
          .slot_bytes = slot_bytes};
}

}  // namespace ringcomm::shm
