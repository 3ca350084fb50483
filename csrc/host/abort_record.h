#pragma once

#include <cstdint>

#include "core/arch.h"

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

}  // namespace ringcomm::host
