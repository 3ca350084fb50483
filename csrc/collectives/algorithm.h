#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ringcomm {

/// How a collective is carried out; docs/design/collectives.md has the steps and bytes of each.
enum class Algorithm : std::uint8_t { kAuto, kOneShot, kTwoShot, kRing, kDirect, kHierarchical };
inline constexpr int kNumAlgorithms = 6;
inline constexpr const char* kAlgorithmNames[kNumAlgorithms] = {"auto", "one_shot", "two_shot",
                                                                "ring", "direct",   "hierarchical"};

/// Of any number, because a peer's header may hold it.
constexpr const char* name_of(Algorithm algorithm) {
  const auto idx = static_cast<std::size_t>(algorithm);
  return idx < kNumAlgorithms ? kAlgorithmNames[idx] : "unknown algorithm";
}

/// One that users may request for all_reduce: the first four, which every transport has. A
/// transport of device tensors may run a different one if the buffers do not allow it; Stats show
/// which one ran. Throws std::invalid_argument naming the known ones.
inline Algorithm algorithm_from_name(const std::string& name) {
  for (int i = 0; i < 4; ++i)
    if (name == kAlgorithmNames[i]) return static_cast<Algorithm>(i);
  throw std::invalid_argument("unknown algorithm '" + name +
                              "'; known are auto, one_shot, two_shot and ring");
}

}  // namespace ringcomm
