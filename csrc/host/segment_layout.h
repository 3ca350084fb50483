#pragma once

#include <cstddef>
#include <cstdint>

#include "core/board_protocol.h"
#include "core/link_protocol.h"
#include "host/abort_reason.h"
#include "host/rank_control.h"

namespace ringcomm::host {

/// The sizes of a group's boards and links. All ranks agree on them when the group is made.
struct SegmentConfig {
  /// A region of a board, 1 MiB of data at least, and the cursor in front of it.
  std::size_t board_bytes = (std::size_t{1} << 20) + 4096;
  std::uint32_t ring_num_slots = 2;
  std::size_t ring_slot_bytes = std::size_t{256} << 10;
  std::uint32_t send_recv_num_slots = 8;
  std::size_t send_recv_slot_bytes = std::size_t{64} << 10;
};

/// The memory of a link: its cursors and its slots.
std::size_t link_bytes(std::uint32_t num_slots, std::size_t slot_bytes);

/// The layout of the memory that a group shares, which every rank computes:
///
///   abort record, survivors' choices, has_joined of each rank | control of each rank | boards |
///   ring links r -> r + 1 | point-to-point links of each ordered pair
///
/// A zeroed segment is valid and empty: no rank initializes it, and unused pages are never touched.
class SegmentLayout {
 public:
  SegmentLayout(int world_size, const SegmentConfig& config);

  std::size_t num_bytes() const { return num_bytes_; }

  AbortRecord& abort_record(std::byte* base) const { return *reinterpret_cast<AbortRecord*>(base); }
  SurvivorChoices& survivor_choices(std::byte* base) const {
    return *reinterpret_cast<SurvivorChoices*>(base + sizeof(AbortRecord));
  }
  /// 1 once the rank has mapped the memory.
  std::uint32_t& has_joined(std::byte* base, int rank) const;
  RankControl& control(std::byte* base, int rank) const;
  BoardGeometry board(std::byte* base) const;
  /// The link from `rank` to the next one.
  LinkGeometry ring_link(std::byte* base, int rank) const;
  LinkGeometry send_recv_link(std::byte* base, int from, int to) const;

 private:
  int world_size_;
  SegmentConfig config_;
  std::size_t control_offset_bytes_;
  std::size_t boards_offset_bytes_;
  std::size_t rings_offset_bytes_;
  std::size_t send_recv_offset_bytes_;
  std::size_t num_bytes_;
};

/// The words of SurvivorProtocol in a group's memory, which must outlive this object.
struct SurvivorWords {
  const SegmentLayout* layout;
  std::byte* base;

  Cursor& stage(int rank) const { return layout->control(base, rank).survivor_stage; }
  std::uint64_t& proposal(int attempt, int rank, int idx) const {
    return layout->control(base, rank).survivor_proposals[attempt][idx];
  }
  std::uint64_t& chosen(int attempt) const {
    return layout->survivor_choices(base).chosen[attempt];
  }
  std::uint64_t& verdict(int attempt) const {
    return layout->survivor_choices(base).verdict[attempt];
  }
  std::uint64_t& store_number(int rank) const { return layout->control(base, rank).store_number; }
};

}  // namespace ringcomm::host
