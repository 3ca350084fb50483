#pragma once

#include <cstdint>

#include "core/arch.h"
#include "core/board_protocol.h"
#include "core/survivor_protocol.h"

namespace ringcomm::host {

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

}  // namespace ringcomm::host
