#pragma once

// Instructions of a turn of a kernel's loop for sm_90, by tests/sass/gate.py --update.

namespace ringcomm::benchmarks::loops {

inline constexpr double kLossRow = 1375;

}  // namespace ringcomm::benchmarks::loops
