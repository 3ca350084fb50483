#pragma once

#include <cstddef>
#include <cstdint>

#include "core/board_protocol.h"
#include "host/segment_layout.h"

namespace ringcomm::host {

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
