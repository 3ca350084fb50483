#pragma once

#include "cuda/kernels/plain.h"
#include "kernels/updates/cuda_steps.h"

// Optimizers' steps inside of a reduction.

namespace ringcomm::cuda {

/// A pack of up to four vectors.
template <Cached kCached, class P>
RINGCOMM_HD P load_wide(const void* from, bool is_wanted) {
  if constexpr (sizeof(P) <= sizeof(Vector)) {
    return load_pack<kCached, P>(from, is_wanted);
  } else {
    constexpr std::size_t kNum = sizeof(P) / sizeof(Vector);
    Vector vectors[kNum];
    RINGCOMM_UNROLL
    for (std::size_t v = 0; v < kNum; ++v)
      vectors[v] =
          load_pack<kCached, Vector>(static_cast<const std::byte*>(from) + v * 16, is_wanted);
    P pack;
    __builtin_memcpy(&pack, vectors, sizeof pack);
    return pack;
  }
}
template <Cached kCached, class P>
RINGCOMM_HD void store_wide(void* to, const P& pack, bool is_wanted) {
  if constexpr (sizeof(P) <= sizeof(Vector)) {
    store_pack<kCached>(to, pack, is_wanted);
  } else {
    constexpr std::size_t kNum = sizeof(P) / sizeof(Vector);
    Vector vectors[kNum];
    __builtin_memcpy(vectors, &pack, sizeof pack);
    RINGCOMM_UNROLL
    for (std::size_t v = 0; v < kNum; ++v)
      store_pack<kCached>(static_cast<std::byte*>(to) + v * 16, vectors[v], is_wanted);
  }
}

/// Updates parameters with their reduced gradient, which is rounded in between and kept nowhere.
template <class Grad, class Param, class Step>
struct Updating {
  float* master;
  float* first;
  float* second;

  /// `num` elements; the first of `outputs` has the parameters, unless there is a master.
  template <class To, class Sources>
  RINGCOMM_HD void run(const Threads& threads, const KernelCall& call, const To& outputs,
                       const Sources& sources, std::uint32_t num) const {
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
  static constexpr int kAtOnce = 8;  ///< sources: a vector of each is under way
  template <int kNum>
  using Floats = Pack<Float32Element, kNum>;

  template <int kNum>
  RINGCOMM_HD static Floats<kNum> load_floats(const float* from, std::size_t idx, bool is_there) {
    return load_wide<Cached::kNo, Floats<kNum>>(from + idx * kNum, is_there && from != nullptr);
  }
  template <int kNum>
  RINGCOMM_HD static void store_floats(float* to, Floats<kNum> from, std::size_t idx,
                                       bool is_there) {
    for (float& value : from.of) value = quiet(value);
    store_wide<Cached::kNo>(to + idx * kNum, from, is_there && to != nullptr);
  }

  template <int kNum, class Sources>
  RINGCOMM_HD static void load_sources(const Sources& sources, int from, std::size_t idx,
                                       bool is_there, Pack<Grad, kNum>* loaded) {
    RINGCOMM_UNROLL
    for (int s = 0; s < kAtOnce; ++s) {
      const bool is_source = from + s < sources.num();
      const int source = is_source ? from + s : 0;
      loaded[s] = load_pack<Cached::kYes, Pack<Grad, kNum>>(
          sources.at(source) + idx * sizeof(Pack<Grad, kNum>), is_source && is_there);
    }
  }
  /// The reduced gradient, whose first sources have been loaded.
  template <int kNum, class Sources>
  RINGCOMM_HD static Pack<Grad, kNum> reduced(const Sources& sources, std::size_t idx, int divisor,
                                              bool is_there, Pack<Grad, kNum>* loaded) {
    float acc[kNum] = {};
    const int num_sources = sources.num();
    RINGCOMM_ROLLED
    for (int from = 0; from < num_sources; from += kAtOnce) {
      if (from > 0) load_sources<kNum>(sources, from, idx, is_there, loaded);
      RINGCOMM_UNROLL
      for (int s = 0; s < kAtOnce; ++s)
        for (int e = 0; e < kNum; ++e) {
          const float next = Grad::load(loaded[s].of[e]);
          if (from + s < num_sources) acc[e] = from + s == 0 ? next : acc[e] + next;
        }
    }
    Pack<Grad, kNum> result;
    for (int e = 0; e < kNum; ++e)
      result.of[e] = Grad::store(divisor > 1 ? acc[e] / static_cast<float>(divisor) : acc[e]);
    return result;
  }

  /// All that it reads is under way before any of it is used.
  template <int kNum, class To, class Sources>
  RINGCOMM_HD void update(const KernelCall& call, const To& outputs, const Sources& sources,
                          std::uint32_t idx, std::uint32_t num) const {
    const bool is_there = idx < num;
    Pack<Grad, kNum> loaded[kAtOnce];
    load_sources<kNum>(sources, 0, idx, is_there, loaded);
    const bool has_master = master != nullptr;
    const std::size_t offset = std::size_t{idx} * sizeof(Pack<Param, kNum>);
    auto params =
        load_wide<Cached::kNo, Pack<Param, kNum>>(outputs.at(0) + offset, is_there && !has_master);
    Floats<kNum> weights = load_floats<kNum>(master, idx, is_there);
    Floats<kNum> mean = {};
    Floats<kNum> square = {};
    if constexpr (Step::kNumStates > 0) mean = load_floats<kNum>(first, idx, is_there);
    if constexpr (Step::kNumStates > 1) square = load_floats<kNum>(second, idx, is_there);
    end_of_loads();
    const Pack<Grad, kNum> grads = reduced<kNum>(sources, idx, call.divisor, is_there, loaded);
    for (int e = 0; e < kNum; ++e) {
      if (!has_master) weights.of[e] = Param::load(params.of[e]);
      Step::apply(call.update, first != nullptr, weights.of[e],
                  Grad::load(grads.of[e]) * call.update.grad_scale, mean.of[e], square.of[e]);
      params.of[e] = Param::store(weights.of[e]);
    }
    store_wide<Cached::kNo>(outputs.at(0) + offset, params, is_there);
    RINGCOMM_ROLLED
    for (int o = 1; o < outputs.num(); ++o)
      store_wide<Cached::kYes>(outputs.at(o) + offset, params, is_there);
    store_floats<kNum>(master, weights, idx, is_there);
    if constexpr (Step::kNumStates > 0) store_floats<kNum>(first, mean, idx, is_there);
    if constexpr (Step::kNumStates > 1) store_floats<kNum>(second, square, idx, is_there);
  }
};

struct OwnGradient {
  const std::byte* grad;
  RINGCOMM_HD int num() const { return 1; }
  RINGCOMM_HD const std::byte* at(int) const { return grad; }
};

/// In a group of one the step alone.
template <class Step, class Grad, class Param, Block B>
RINGCOMM_HD void update_in_place(B& block, const KernelCall& call) {
  constexpr std::size_t kGradBytes = sizeof(typename Grad::Stored);
  constexpr std::size_t kParamBytes = sizeof(typename Param::Stored);
  const bool is_alone = call.world_size == 1;
  const ElemRange elems =
      is_alone ? ElemRange{0, call.num_elems} : find_buffers(block, call, kGradBytes, kParamBytes);
  RINGCOMM_ROLLED
  for (std::uint64_t done = 0; done < elems.num_elems; done += kSpan) {
    const auto moved = [&](float* array) {
      return array != nullptr ? array + elems.begin_elems + done : nullptr;
    };
    const Updating<Grad, Param, Step> updating{moved(call.master), moved(call.states[0]),
                                               moved(call.states[1])};
    const std::uint64_t left = elems.num_elems - done;
    const auto num = static_cast<std::uint32_t>(left < kSpan ? left : kSpan);
    const Threads threads = Threads::of_grid(block);
    if (is_alone)
      updating.run(threads, call, Outputs{call.outputs[0] + done * kParamBytes},
                   OwnGradient{call.inputs[0] + done * kGradBytes}, num);
    else
      updating.run(threads, call, TableOutputs{block.tables(), done * kParamBytes},
                   TableSources{block.tables(), call.world_size, done * kGradBytes}, num);
  }
}

}  // namespace ringcomm::cuda
