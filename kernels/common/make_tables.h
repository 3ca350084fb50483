#pragma once

// All kernels of one level, as a table; for the source file of that level.

#include "kernels/losses/softmax_kernels.h"
#include "kernels/norms/norm_kernels.h"
#include "kernels/reductions/reduce_kernels.h"
#include "kernels/updates/optimizer_kernels.h"
#include "kernels/updates/weight_update_kernels.h"

namespace ringcomm::cpu {
namespace {

template <class Step>
constexpr void set_updates(Kernels& kernels, Optimizer optimizer) {
  for_each_array([&]<class Param>(int param_idx) {
    for_each_array([&]<class Grad>(int grad_idx) {
      kernels.updates[static_cast<int>(optimizer)][param_idx][grad_idx] = update<Step, Param, Grad>;
    });
  });
}

template <class Place>
constexpr void set_weights(Kernels& kernels, WeightFormat format) {
  for_each_array([&]<class Grad>(int grad_idx) {
    kernels.weights[static_cast<int>(format)][grad_idx] = {update_weights<Place, Grad>,
                                                           squares_of<Place, Grad>};
  });
}

consteval Kernels make_kernels(const char* level) {
  Kernels kernels = {.level = level};
  set_reductions(kernels);
  for_each_array([&]<class Array>(int idx) {
    kernels.softmax[idx] = {stats_of<Array>, grad_of<Array>};
    kernels.grads[idx] = {add_squares<Array>, add<Array>};
    kernels.add_rms_norm[idx] = add_rms_norm<Array>;
  });
  set_updates<SgdStep>(kernels, Optimizer::kSgd);
  set_updates<AdamWStep>(kernels, Optimizer::kAdamW);
  set_updates<LomoStep>(kernels, Optimizer::kLomo);
  set_weights<PlainPlace<Float32Array>>(kernels, WeightFormat::kFloat32);
  set_weights<PlainPlace<Float16Array>>(kernels, WeightFormat::kFloat16);
  set_weights<PlainPlace<BFloat16Array>>(kernels, WeightFormat::kBFloat16);
  set_weights<StochasticPlace>(kernels, WeightFormat::kStochastic);
  set_weights<SplitPlace>(kernels, WeightFormat::kSplit);
  return kernels;
}

}  // namespace
}  // namespace ringcomm::cpu

#if defined(__clang__) && RINGCOMM_VECTOR_BYTES != 16
#pragma clang attribute pop
#endif
