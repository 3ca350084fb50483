#pragma once

#include "cuda/kernels/plain.h"
#include "kernels/updates/cuda_steps.h"

// Optimizers' steps inside of a reduction.

namespace ringcomm::cuda {

/// Updates parameters with their reduced gradient, which is rounded in between and kept nowhere.
template <class Grad, class Param, class Step>
struct Updating {
  float* master;
  float* first;
  float* second;

  /// `num` elements; the first of `outputs` has the parameters, unless there is a master.
  RINGCOMM_HD void run(const Threads& threads, const KernelCall& call, const TableOutputs& outputs,
                       const TableSources& sources, std::uint32_t num) const {
    const bool is_wide = are_aligned(outputs, sources) && is_aligned(master, 16) &&
                         is_aligned(first, 16) && is_aligned(second, 16);
    const std::uint32_t num_packs = is_wide ? num / kElems : 0;
    RINGCOMM_ROLLED
    for (std::uint32_t i = 0; i < num_packs; i += threads.num)
      update<kElems>(call, outputs, sources, opaque(i + threads.idx), num_packs);
    RINGCOMM_ROLLED
    for (std::uint32_t i = num_packs * kElems; i < num; i += threads.num)
      update<1>(call, outputs, sources, opaque(i + threads.idx), num);
  }

 private:
  static constexpr int kElems = sizeof(Vector) / sizeof(typename Grad::Stored);
  template <int kNum>
  using Floats = Pack<Float32Element, kNum>;

  template <int kNum>
  RINGCOMM_HD static Floats<kNum> load_floats(const float* from, std::size_t idx, bool is_there) {
    return load_pack<Cached::kNo, Floats<kNum>>(from + idx * kNum, is_there && from != nullptr);
  }
  template <int kNum>
  RINGCOMM_HD static void store_floats(float* to, const Floats<kNum>& from, std::size_t idx,
                                       bool is_there) {
    Floats<kNum> values = from;
    for (float& value : values.of) value = quiet(value);
    store_pack<Cached::kNo>(to + idx * kNum, values, is_there && to != nullptr);
  }

  /// All that it reads is under way before any of it is used.
  template <int kNum>
  RINGCOMM_HD void update(const KernelCall& call, const TableOutputs& outputs,
                          const TableSources& sources, std::uint32_t idx, std::uint32_t num) const {
    const bool is_there = idx < num;
    AnySums<Grad, kNum, 8> sums;
    sums.load(sources, 0, idx, is_there);
    const bool has_master = master != nullptr;
    const std::size_t offset = std::size_t{idx} * sizeof(Pack<Param, kNum>);
    auto params =
        load_pack<Cached::kNo, Pack<Param, kNum>>(outputs.at(0) + offset, is_there && !has_master);
    Floats<kNum> weights = load_floats<kNum>(master, idx, is_there);
    Floats<kNum> mean = {};
    Floats<kNum> square = {};
    if constexpr (Step::kNumStates > 0) mean = load_floats<kNum>(first, idx, is_there);
    if constexpr (Step::kNumStates > 1) square = load_floats<kNum>(second, idx, is_there);
    end_of_loads();
    float grads[kNum] = {};
    sums.sum(sources, idx, call.divisor, is_there, grads);
    for (int e = 0; e < kNum; ++e) {
      if (!has_master) weights.of[e] = Param::load(params.of[e]);
      Step::apply(call.update, first != nullptr, weights.of[e],
                  Grad::load(Grad::store(grads[e])) * call.update.grad_scale, mean.of[e],
                  square.of[e]);
      params.of[e] = Param::store(weights.of[e]);
    }
    store_pack<Cached::kNo>(outputs.at(0) + offset, params, is_there);
    RINGCOMM_ROLLED
    for (int o = 1; o < outputs.num(); ++o)
      store_pack<Cached::kYes>(outputs.at(o) + offset, params, is_there);
    store_floats<kNum>(master, weights, idx, is_there);
    if constexpr (Step::kNumStates > 0) store_floats<kNum>(first, mean, idx, is_there);
    if constexpr (Step::kNumStates > 1) store_floats<kNum>(second, square, idx, is_there);
  }
};

/// In a group of one the step alone.
template <class Step, class Grad, class Param, Block B>
RINGCOMM_HD void update_in_place(B& block, const KernelCall& call) {
  constexpr std::size_t kGradBytes = sizeof(typename Grad::Stored);
  constexpr std::size_t kParamBytes = sizeof(typename Param::Stored);
  const ElemRange elems = find_buffers(block, call, kGradBytes, kParamBytes);
  for_spans(elems.num_elems, [&](std::uint64_t done, std::uint32_t num) {
    const auto moved = [&](float* array) {
      return array != nullptr ? array + elems.begin_elems + done : nullptr;
    };
    const Updating<Grad, Param, Step> updating{moved(call.master), moved(call.states[0]),
                                               moved(call.states[1])};
    updating.run(Threads::of_grid(block), call, TableOutputs{block.tables(), done * kParamBytes},
                 TableSources{block.tables(), call.world_size, done * kGradBytes}, num);
  });
}

}  // namespace ringcomm::cuda
