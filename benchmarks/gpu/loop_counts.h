#pragma once

// Instructions of a turn of kernels' loops for sm_90, by tests/sass/gate.py --update.

namespace ringcomm::benchmarks::loops {

inline constexpr double kCopy = 115;
inline constexpr double kSumOfTwo = 295;
inline constexpr double kSumOfFour = 251;
inline constexpr double kSumOfEight = 234;
inline constexpr double kSumOfFew = 154;
inline constexpr double kStoreSum = 156;
inline constexpr double kAlsoStore = 7;
inline constexpr double kAdamW = 514;
inline constexpr double kLossRow = 1375;

}  // namespace ringcomm::benchmarks::loops
