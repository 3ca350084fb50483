#pragma once

#include <cstdint>

#include "core/arch.h"

namespace ringcomm::host {

/// How often the ranks of a group try to agree on survivors.
inline constexpr int kMaxAttempts = 8;

/// What the survivors of a group choose (SurvivorProtocol), by attempt.
struct alignas(kLineBytes) SurvivorChoices {
  std::uint64_t chosen[kMaxAttempts] = {};
  std::uint64_t verdict[kMaxAttempts] = {};
};

}  // namespace ringcomm::host
