#pragma once

#include <cstdint>
#include <string>

namespace ringcomm {

/// How a collective is carried out; docs/design/collectives.md has the steps and bytes of each.
enum class Algorithm : std::uint8_t { kAuto, kOneShot, kTwoShot, kRing, kDirect, kHierarchical };
inline constexpr int kNumAlgorithms = 6;

const char* name_of(Algorithm algorithm);
/// One that users may request for all_reduce: the first four, which every transport has. A
/// transport of device tensors may run a different one if the buffers do not allow it; Stats show
/// which one ran. Throws std::invalid_argument naming the known ones.
Algorithm algorithm_from_name(const std::string& name);

}  // namespace ringcomm
