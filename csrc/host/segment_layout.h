#pragma once

#include <cstddef>
#include <cstdint>

#include "core/arch.h"
#include "core/board_protocol.h"
#include "core/link_protocol.h"
#include "core/survivor_protocol.h"

namespace ringcomm::host {

/// The reason of the first rank that fails, written once and read by all others.
struct alignas(kLineBytes) AbortRecord {
  /// kFirstWriter + r: rank r is writing it.
  static constexpr std::uint32_t kNone = 0, kWritten = 1, kFirstWriter = 2;
  std::uint32_t state = kNone;
  std::uint32_t kind = 0;     ///< an ErrorKind
  std::int32_t origin = -1;   ///< the rank that failed
  std::int32_t culprit = -1;  ///< the rank that it blames
  /// The ranks that have left; in the line of `state`, which rarely changes.
  std::uint32_t num_left = 0;
  char text[1024] = {};
};

/// How often the ranks of a group try to agree on survivors.
inline constexpr int kMaxAttempts = 8;

/// What the survivors of a group choose (SurvivorProtocol), by attempt.
struct alignas(kLineBytes) SurvivorChoices {
  std::uint64_t chosen[kMaxAttempts] = {};
  std::uint64_t verdict[kMaxAttempts] = {};
};

/// Words that one rank writes and all others read. In pages of its own, touched first by the rank,
/// and so on its NUMA node.
struct RankControl {
  Cursor doorbell;  ///< rung by peers: something on a point-to-point link changed
  /// 1 from the destruction of its side of the group on.
  alignas(kLineBytes) std::uint32_t has_left = 0;
  std::uint64_t num_calls = 0;  ///< collectives that it has begun
  std::uint64_t num_ended = 0;  ///< those in this memory, or their parts, that have succeeded
  Cursor survivor_stage;
  std::uint64_t survivor_proposals[kMaxAttempts][RankSet::kWords] = {};
  std::uint64_t store_number = 0;  ///< random; of what it offers as the survivors' new store
};

/// The sizes of a group's boards and links. All ranks agree on them when the group is made.
struct SegmentConfig {
  /// A region of a board, 1 MiB of data at least, and the cursor in front of it.
  std::size_t board_region_bytes = (std::size_t{1} << 20) + 4096;
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
