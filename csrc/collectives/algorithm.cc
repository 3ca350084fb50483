#include "collectives/algorithm.h"

#include <array>
#include <cstddef>
#include <stdexcept>

namespace ringcomm {

namespace {

constexpr std::array<const char*, kNumAlgorithms> kAlgorithmNames = {
    "auto", "one_shot", "two_shot", "ring", "direct", "hierarchical"};


}  // namespace

// A peer's header may hold any number.
const char* name_of(Algorithm algorithm) {
  const auto idx = static_cast<std::size_t>(algorithm);
  return idx < kAlgorithmNames.size() ? kAlgorithmNames[idx] : "unknown algorithm";
}

Algorithm algorithm_from_name(const std::string& name) {
  for (const Algorithm known :
       {Algorithm::kAuto, Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing})
    if (name == name_of(known)) return known;
  throw std::invalid_argument("unknown algorithm '" + name +
                              "'; known are auto, one_shot, two_shot and ring");
}

}  // namespace ringcomm
