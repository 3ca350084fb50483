#pragma once

#include <cstddef>
#include <cstdint>

#include "core/arch.h"
#include "core/board_protocol.h"
#include "core/link_protocol.h"

namespace ringcomm::shm {

/// The sizes of a group's links. All ranks agree on them when the group is made.
struct SegmentConfig {
  /// A region of a board: 1 MiB of data at least, and the header in front of it.
  std::size_t board_bytes = (std::size_t{1} << 20) + 4096;
  std::uint32_t ring_num_slots = 2;
  std::size_t ring_slot_bytes = std::size_t{256} << 10;
  std::uint32_t p2p_num_slots = 8;
  std::size_t p2p_slot_bytes = std::size_t{64} << 10;
};

/// The reason of the first rank that fails, written once and read by all others.
struct AbortRecord {
  /// kFirstWriter + r: rank r is writing it.
  static constexpr std::uint32_t kNone = 0, kWritten = 1, kFirstWriter = 2;
  std::uint32_t state = kNone;
  std::uint32_t kind = 0;     ///< an ErrorKind
  std::int32_t origin = -1;   ///< the rank that failed
  std::int32_t culprit = -1;  ///< the rank that it blames
  char text[1024] = {};
};

/// Words that one rank writes and all others read. In pages of its own, which the rank touches
/// first: then its own NUMA node has them.
struct RankControl {
  Cursor published;  ///< of its board
  Cursor doorbell;   ///< rung by peers: something on a point-to-point link changed
  /// 1 from the destruction of its side of the group on.
  alignas(kLineBytes) std::uint32_t has_left = 0;
  std::uint64_t num_calls = 0;  ///< collectives that it has begun
};

struct SegmentHeader {
  AbortRecord abort;
};

/// The layout of the memory that a group shares. Every rank computes it from the group's size and
/// configuration; no address is read from the memory itself.
///
///   header, has_joined of each rank | control of each rank | boards | ring links r -> r + 1 |
///   point-to-point links of each ordered pair
///
/// A zeroed segment is valid and empty. So no rank initializes it, and unused pages are never
/// touched.
class SegmentLayout {
 public:
  SegmentLayout(int world_size, const SegmentConfig& config);

  std::size_t num_bytes() const { return num_bytes_; }

  SegmentHeader& header(std::byte* base) const { return *reinterpret_cast<SegmentHeader*>(base); }
  /// 1 once the rank has mapped the memory.
  std::uint32_t& has_joined(std::byte* base, int rank) const;
  RankControl& control(std::byte* base, int rank) const;
  BoardGeometry board(std::byte* base) const;
  /// The link from `rank` to the next one.
  LinkGeometry ring_link(std::byte* base, int rank) const;
  LinkGeometry p2p_link(std::byte* base, int from, int to) const;

 private:
  LinkGeometry link_at(std::byte* base, std::size_t offset_bytes, std::uint32_t num_slots,
                       std::size_t slot_bytes) const;

  int world_size_;
  SegmentConfig config_;
  std::size_t board_stride_bytes_;
  std::size_t ring_stride_bytes_;
  std::size_t p2p_stride_bytes_;
  std::size_t control_offset_bytes_;
  std::size_t boards_offset_bytes_;
  std::size_t rings_offset_bytes_;
  std::size_t p2p_offset_bytes_;
  std::size_t num_bytes_;
};

}  // namespace ringcomm::shm
