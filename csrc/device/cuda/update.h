#pragma once

#include <cmath>

#include "device/cuda/combine.h"
#include "device/cuda/reduce_gather.h"
#include "device/update_op.h"

// Optimizers' steps inside of a reduction: device/host/update_kernels.h, one element at a time,
// with the same results to the last bit. Compiled without contraction, as there; fma() is what is
// fused.

namespace ringcomm::cuda {

struct SgdStep {
  RINGCOMM_HD static void apply(const UpdateScalars& s, bool has_momentum, float& weight,
                                float grad, float& momentum, float&) {
    if (s.weight_decay != 0) grad = fmaf(weight, s.weight_decay, grad);
    if (has_momentum) {
      momentum = s.is_first ? grad : fmaf(grad, s.damped, momentum * s.momentum);
      grad = s.is_nesterov ? fmaf(momentum, s.momentum, grad) : momentum;
    }
    weight = fmaf(grad, s.lr_minus, weight);
  }
};

struct AdamWStep {
  RINGCOMM_HD static void apply(const UpdateScalars& s, bool, float& weight, float grad,
                                float& first, float& second) {
    weight = weight * s.decay;
    // torch's lerp, which starts from the end that is nearer.
    const float distance = grad - first;
    first = s.lerp_weight < 0.5F ? fmaf(s.lerp_weight, distance, first)
                                 : fmaf(s.lerp_weight - 1.0F, distance, grad);
    second = fmaf(s.beta2_rest * grad, grad, second * s.beta2);
    const float denominator = sqrtf(second) / s.bias_sqrt + s.eps;
    weight = weight + (s.lr_minus * first) / denominator;
  }
};

struct LomoStep {
  RINGCOMM_HD static void apply(const UpdateScalars& s, bool, float& weight, float grad, float&,
                                float&) {
    grad = grad > s.clip_value ? s.clip_value : grad;
    grad = grad < -s.clip_value ? -s.clip_value : grad;
    weight = fmaf(grad, s.lr_minus, weight * s.decay);
  }
};

/// Updates the parameters of a slice with its reduced gradient, which is rounded to its type in
/// between and kept nowhere.
template <class Grad, class Param, class Step>
struct UpdatingOwner {
  template <class B, class To, class Sources>
  RINGCOMM_HD void operator()(B& block, const KernelCall& call, const To& outputs,
                              const Sources& sources, const ElemRange& elems) const {
    const std::size_t num_elems = elems.num_elems;
    const std::size_t begin =
        elems.begin_elems -
        ChunkLayout(call.num_elems, call.world_size).chunk(call.rank).begin_elems;
    const auto moved = [begin](float* array) { return array != nullptr ? array + begin : nullptr; };
    float* const master = moved(call.master);
    float* const first = moved(call.states[0]);
    float* const second = moved(call.states[1]);
    constexpr int kElems = 4;
    const bool is_wide = are_aligned<Grad, kElems>(Outputs{nullptr}, sources) &&
                         are_aligned<Param, kElems>(outputs, NoSources{}) &&
                         is_aligned(master, sizeof(Vector)) && is_aligned(first, sizeof(Vector)) &&
                         is_aligned(second, sizeof(Vector));
    const std::size_t num_packs = is_wide ? num_elems / kElems : 0;
    for (std::size_t i = block.thread_idx(); i < num_packs; i += block.num_threads())
      update<kElems>(call, outputs, sources, master, first, second, i);
    for (std::size_t i = num_packs * kElems + block.thread_idx(); i < num_elems;
         i += block.num_threads())
      update<1>(call, outputs, sources, master, first, second, i);
  }

 private:
  template <int kElems>
  using Floats = Pack<FloatElement<float>, kElems>;

  template <int kElems>
  RINGCOMM_HD static void load(Floats<kElems>& to, const float* from, std::size_t idx) {
    if (from != nullptr) to = reinterpret_cast<const Floats<kElems>*>(from)[idx];
  }
  template <int kElems>
  RINGCOMM_HD static void store(float* to, Floats<kElems> from, std::size_t idx) {
    if (to == nullptr) return;
    for (float& value : from.of) value = quiet(value);
    reinterpret_cast<Floats<kElems>*>(to)[idx] = from;
  }

  template <int kElems, class To, class Sources>
  RINGCOMM_HD static void update(const KernelCall& call, const To& outputs, const Sources& sources,
                                 float* master, float* first, float* second, std::size_t idx) {
    Pack<Grad, kElems> reduced;
    combine_pack<Grad, Sum, kElems, 0>(Outputs{reinterpret_cast<std::byte*>(&reduced)},
                                       At<Sources, kElems>{sources, idx}, 0, call.divisor);
    auto params = reinterpret_cast<const Pack<Param, kElems>*>(outputs.at(0))[idx];
    Floats<kElems> weights = {};
    Floats<kElems> states[2] = {};
    load(weights, master, idx);
    load(states[0], first, idx);
    load(states[1], second, idx);
    for (int e = 0; e < kElems; ++e) {
      if (master == nullptr) weights.of[e] = Param::load(params.of[e]);
      Step::apply(call.update, first != nullptr, weights.of[e],
                  Grad::load(reduced.of[e]) * call.update.grad_scale, states[0].of[e],
                  states[1].of[e]);
      params.of[e] = Param::store(weights.of[e]);
    }
    for (int o = 0; o < outputs.num(); ++o)
      reinterpret_cast<Pack<Param, kElems>*>(outputs.at(o))[idx] = params;
    store(master, weights, idx);
    store(first, states[0], idx);
    store(second, states[1], idx);
  }

  struct NoSources {
    RINGCOMM_HD int num() const { return 0; }
    RINGCOMM_HD const std::byte* at(int) const { return nullptr; }
  };

  /// Sources whose pack 0 is pack `idx` of others.
  template <class Sources, int kElems>
  struct At {
    const Sources& sources;
    std::size_t idx;
    RINGCOMM_HD int num() const { return sources.num(); }
    RINGCOMM_HD const std::byte* at(int source) const {
      return sources.at(source) + idx * sizeof(Pack<Grad, kElems>);
    }
  };
};

/// The one gradient of a group of one.
struct OwnGradient {
  const std::byte* grad;
  RINGCOMM_HD int num() const { return 1; }
  RINGCOMM_HD const std::byte* at(int) const { return grad; }
};

/// In a group of one, a step on this rank's arrays alone: blocks share nothing, and wait for
/// nobody.
template <class Step, class Grad, class Param, Block B>
RINGCOMM_HD void reduce_update_gather(B& block, const KernelCall& call) {
  using Owner = UpdatingOwner<Grad, Param, Step>;
  const Owner owner;
  if (call.world_size == 1) {
    constexpr std::size_t kAlignElems = 16;  // as many as 16-byte loads of all types want
    const std::size_t fair_elems = num_slices(call.num_elems, block.num_blocks());
    const ElemRange elems = slice_of({0, call.num_elems}, block.block_idx(),
                                     num_slices(fair_elems, kAlignElems) * kAlignElems);
    owner(block, call,
          Outputs{call.outputs[0] + elems.begin_elems * sizeof(typename Param::Stored)},
          OwnGradient{call.inputs[0] + elems.begin_elems * sizeof(typename Grad::Stored)}, elems);
    return;
  }
  run_collective<ReduceGather<ReduceShape::kUpdate, Owner, B>>(
      block, call, sizeof(typename Grad::Stored), sizeof(typename Param::Stored), owner);
}

}  // namespace ringcomm::cuda
