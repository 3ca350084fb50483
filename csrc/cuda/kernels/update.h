#pragma once

#include "cuda/kernels/reduce_gather.h"
#include "cuda/kernels/reducers.h"
#include "kernels/updates/cuda_steps.h"

// Optimizers' steps inside of a reduction.

namespace ringcomm::cuda {

/// Updates the parameters of a slice with its reduced gradient, which is rounded in between and
/// kept nowhere.
template <class Grad, class Param, class Step>
struct UpdatingOwner {
  template <class B, class To, class Sources>
  RINGCOMM_HD void operator()(B& block, const KernelCall& call, const To& outputs,
                              const Sources& sources, std::size_t begin_in_chunk,
                              std::size_t num_elems) const {
    const auto moved = [&](float* array) {
      return array != nullptr ? array + begin_in_chunk : nullptr;
    };
    const Arrays arrays{moved(call.master), moved(call.states[0]), moved(call.states[1])};
    const bool is_wide = are_aligned(outputs, sources) && is_aligned(arrays.master, 16) &&
                         is_aligned(arrays.first, 16) && is_aligned(arrays.second, 16);
    // A block's part has less than 2^32 elements.
    const auto num = static_cast<std::uint32_t>(num_elems);
    const std::uint32_t num_packs = is_wide ? num / kElems : 0;
    RINGCOMM_ROLLED
    for (std::uint32_t first = 0; first < num_packs; first += block.num_threads())
      update<kElems>(call, outputs, sources, arrays, opaque(first + block.thread_idx()), num_packs);
    RINGCOMM_ROLLED
    for (std::uint32_t first = num_packs * kElems; first < num; first += block.num_threads())
      update<1>(call, outputs, sources, arrays, opaque(first + block.thread_idx()), num);
  }

 private:
  static constexpr int kElems = 4;  ///< of fp32 states 16 bytes
  /// Loads of gradients in flight, besides those of the states: as many as fit the registers.
  static constexpr int kWideParam = sizeof(typename Param::Stored) == 4 ? 1 : 0;
  static constexpr bool kIsWide =
      sizeof(typename Grad::Stored) == 4 || Step::kNumStates + kWideParam > 1;
  static constexpr int kAtOnce = kIsWide ? 2 : 4;

  struct Arrays {
    float* master;
    float* first;
    float* second;
  };
  template <int kNum>
  using Floats = Pack<Float32Element, kNum>;

  template <int kNum>
  RINGCOMM_HD static Floats<kNum> load_floats(const float* from, std::size_t idx, bool is_there) {
    return load_pack<Cached::kNo, Floats<kNum>>(from + idx * kNum, is_there && from != nullptr);
  }
  template <int kNum>
  RINGCOMM_HD static void store_floats(float* to, Floats<kNum> from, std::size_t idx,
                                       bool is_there) {
    for (float& value : from.of) value = quiet(value);
    store_pack<Cached::kNo>(to + idx * kNum, from, is_there && to != nullptr);
  }

  /// The reduced gradient, whose first sources have been loaded.
  template <int kNum, class Sources>
  RINGCOMM_HD static Pack<Grad, kNum> reduced(const Sources& sources, std::size_t idx, int divisor,
                                              bool is_there, Pack<Grad, kNum>* loaded) {
    float acc[kNum] = {};
    const int num_sources = sources.num();
    RINGCOMM_ROLLED
    for (int first = 0; first < num_sources; first += kAtOnce) {
      if (first > 0) load_sources<kNum>(sources, first, idx, is_there, loaded);
      RINGCOMM_UNROLL
      for (int s = 0; s < kAtOnce; ++s)
        for (int e = 0; e < kNum; ++e) {
          const float next = Grad::load(loaded[s].of[e]);
          if (first + s < num_sources) acc[e] = first + s == 0 ? next : acc[e] + next;
        }
    }
    Pack<Grad, kNum> result;
    for (int e = 0; e < kNum; ++e)
      result.of[e] = Grad::store(divisor > 1 ? acc[e] / static_cast<float>(divisor) : acc[e]);
    return result;
  }
  template <int kNum, class Sources>
  RINGCOMM_HD static void load_sources(const Sources& sources, int first, std::size_t idx,
                                       bool is_there, Pack<Grad, kNum>* loaded) {
    RINGCOMM_UNROLL
    for (int s = 0; s < kAtOnce; ++s) {
      const bool is_source = first + s < sources.num();
      const int source = is_source ? first + s : 0;
      loaded[s] = load_pack<Cached::kYes, Pack<Grad, kNum>>(
          sources.at(source) + idx * sizeof(Pack<Grad, kNum>), is_source && is_there);
    }
  }

  /// All that it reads is under way before any of it is used.
  template <int kNum, class To, class Sources>
  RINGCOMM_HD static void update(const KernelCall& call, const To& outputs, const Sources& sources,
                                 const Arrays& arrays, std::uint32_t idx, std::uint32_t num) {
    const bool is_there = idx < num;
    Pack<Grad, kNum> loaded[kAtOnce];
    load_sources<kNum>(sources, 0, idx, is_there, loaded);
    const bool has_master = arrays.master != nullptr;
    const std::size_t offset = std::size_t{idx} * sizeof(Pack<Param, kNum>);
    auto params =
        load_pack<Cached::kNo, Pack<Param, kNum>>(outputs.at(0) + offset, is_there && !has_master);
    Floats<kNum> weights = load_floats<kNum>(arrays.master, idx, is_there);
    Floats<kNum> first = {};
    Floats<kNum> second = {};
    if constexpr (Step::kNumStates > 0) first = load_floats<kNum>(arrays.first, idx, is_there);
    if constexpr (Step::kNumStates > 1) second = load_floats<kNum>(arrays.second, idx, is_there);
    end_of_loads();
    const Pack<Grad, kNum> grads = reduced<kNum>(sources, idx, call.divisor, is_there, loaded);
    for (int e = 0; e < kNum; ++e) {
      if (!has_master) weights.of[e] = Param::load(params.of[e]);
      Step::apply(call.update, arrays.first != nullptr, weights.of[e],
                  Grad::load(grads.of[e]) * call.update.grad_scale, first.of[e], second.of[e]);
      params.of[e] = Param::store(weights.of[e]);
    }
    store_pack<Cached::kNo>(outputs.at(0) + offset, params, is_there);
    RINGCOMM_ROLLED
    for (int o = 1; o < outputs.num(); ++o)
      store_pack<Cached::kYes>(outputs.at(o) + offset, params, is_there);
    store_floats<kNum>(arrays.master, weights, idx, is_there);
    if constexpr (Step::kNumStates > 0) store_floats<kNum>(arrays.first, first, idx, is_there);
    if constexpr (Step::kNumStates > 1) store_floats<kNum>(arrays.second, second, idx, is_there);
  }
};

struct OwnGradient {
  const std::byte* grad;
  RINGCOMM_HD int num() const { return 1; }
  RINGCOMM_HD const std::byte* at(int) const { return grad; }
};

/// In a group of one, a step on this rank's arrays only: blocks share nothing and do not wait.
template <class Step, class Grad, class Param, Block B>
RINGCOMM_HD void reduce_update_gather(B& block, const KernelCall& call) {
  using Owner = UpdatingOwner<Grad, Param, Step>;
  const Owner owner;
  if (call.world_size == 1) {
    constexpr std::size_t kAlignElems = 16;  // the alignment of 16-byte loads for all types
    const std::size_t fair_elems = num_slices(call.num_elems, block.num_blocks());
    const ElemRange elems = slice_of({0, call.num_elems}, block.block_idx(),
                                     num_slices(fair_elems, kAlignElems) * kAlignElems);
    owner(block, call,
          Outputs{call.outputs[0] + elems.begin_elems * sizeof(typename Param::Stored)},
          OwnGradient{call.inputs[0] + elems.begin_elems * sizeof(typename Grad::Stored)},
          elems.begin_elems, elems.num_elems);
    return;
  }
  run_collective<ReduceGather<ReduceShape::kUpdate, Owner, B>>(
      block, call, sizeof(typename Grad::Stored), sizeof(typename Param::Stored), owner);
}

}  // namespace ringcomm::cuda
