#pragma once

#include <cstdint>

namespace ringcomm {

/// Why a wait ended before its condition held. Device code cannot throw, so the protocols of core
/// return this and the layer that knows the ranks' names turns it into an error.
enum class [[nodiscard]] Stop : std::uint8_t {
  kNone = 0,     ///< the condition holds
  kTimeout,      ///< the deadline of the operation passed
  kPeerDied,     ///< the process of the rank waited for has ended
  kPeerLeft,     ///< the rank waited for has destroyed its side of the group
  kAborted,      ///< another rank failed and reported why
  kInterrupted,  ///< this process was asked to stop waiting (a signal, an abort call)
};

}  // namespace ringcomm
