#pragma once

#include <cstdint>

namespace ringcomm {

/// What this rank does with `rank` in a collective: it waits, or has exchanged messages.
struct PeerEvent {
  int rank;
  std::uint64_t begin_ticks = 0;  ///< of a wait
  std::uint64_t end_ticks = 0;    ///< 0: it waits, for long already
  bool is_arrival = false;        ///< the wait is for the rank to begin the collective
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

}  // namespace ringcomm
