#pragma once

// Sums over an array that do not depend on the level: they go into kSumLanes partial sums whatever
// the width of a vector, and these are added as a tree.

#include "kernels/float_arrays.h"

namespace ringcomm::host {
namespace {

constexpr std::size_t kSumLanes = 64;
constexpr std::size_t kNumParts = kSumLanes / kLanes;

struct Partial {
  Fp32 part[kNumParts];

  [[gnu::always_inline]] float total() const {
    float lanes[kSumLanes];
    for (std::size_t v = 0; v < kNumParts; ++v)
      store_bytes(reinterpret_cast<char*>(lanes + v * kLanes), part[v]);
    for (std::size_t width = kSumLanes / 2; width > 0; width /= 2)
      for (std::size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
  }
};

}  // namespace
}  // namespace ringcomm::host
