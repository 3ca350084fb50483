#pragma once

// The common part of updates by a clamped gradient. The includer must define multiply_add for its
// level first.

#include "kernels/float_arrays.h"

namespace ringcomm::host {
namespace {

/// NaN stays: no comparison with it holds.
[[gnu::always_inline]] inline Fp32 clamped(const Fp32& value, float clip_value) {
  const Fp32 limit = all(clip_value);
  const Fp32 bounded = value > limit ? limit : value;
  return bounded < -limit ? -limit : bounded;
}

[[gnu::always_inline]] inline Fp32 descended(const Fp32& weight, const Fp32& update, float lr_minus,
                                             float decay) {
  return multiply_add(update, all(lr_minus), weight * decay);
}

}  // namespace
}  // namespace ringcomm::host
