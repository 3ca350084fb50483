#pragma once

#include <cstdint>

namespace ringcomm {

/// What this rank has just done with `rank` in a collective: waited, or exchanged messages. With
/// nothing but the rank: it waits, for long already.
struct PeerEvent {
  int rank;
  std::uint64_t waited_ns = 0;
  bool is_arrival = false;  ///< it waited for the rank to begin the collective
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

}  // namespace ringcomm
