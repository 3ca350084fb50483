#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

/// Which of several waits of a collective a rank is in: the step, and the slice of the data that
/// takes these steps. All from 1 on; 0 where it is not known.
struct alignas(8) CallStep {
  std::uint16_t step = 0, num_steps = 0, slice = 0, num_slices = 0;

  constexpr CallStep() = default;
  constexpr CallStep(int step_now, int steps, std::size_t slice_now, std::size_t slices)
      : step(static_cast<std::uint16_t>(step_now)), num_steps(static_cast<std::uint16_t>(steps)) {
    if (slices > UINT16_MAX) return;  // more than 16 GiB for each rank
    slice = static_cast<std::uint16_t>(slice_now);
    num_slices = static_cast<std::uint16_t>(slices);
  }
};

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
