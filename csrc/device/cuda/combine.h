#pragma once

#include <cstddef>
#include <cstdint>

#include "device/cuda/elements.h"
#include "device/cuda/memory.h"

namespace ringcomm::cuda {

/// Calls `body` with the type of a reduction's operator. What has no meaning for the type is
/// refused by the host.
template <class Element, class Body>
RINGCOMM_HD void with_operator(Reduction reduction, const Body& body) {
  if constexpr (std::is_same_v<Element, SoftmaxElement>) {
    body(Merge{});
  } else if constexpr (std::is_same_v<Element, BoolElement>) {
    // Of truth values the sum is "any" and the product "all".
    if (reduction == Reduction::kProduct || reduction == Reduction::kMin ||
        reduction == Reduction::kBitAnd)
      return body(BitAnd{});
    if (reduction == Reduction::kBitXor) return body(BitXor{});
    body(BitOr{});
  } else {
    if (reduction == Reduction::kSum || reduction == Reduction::kAvg) return body(Sum{});
    if (reduction == Reduction::kProduct) return body(Product{});
    if (reduction == Reduction::kMin) return body(Min{});
    if (reduction == Reduction::kMax) return body(Max{});
    if constexpr (Element::kIsBitwise) {
      if (reduction == Reduction::kBitAnd) return body(BitAnd{});
      if (reduction == Reduction::kBitOr) return body(BitOr{});
      if (reduction == Reduction::kBitXor) return body(BitXor{});
    }
  }
}

/// Several elements that one load brings.
template <class Element, int kElems>
struct alignas(kElems == 1 ? alignof(typename Element::Stored)
                           : kElems * sizeof(typename Element::Stored)) Pack {
  typename Element::Stored of[kElems];
};

/// Where a result goes: to one place, or two.
struct Outputs {
  std::byte* to;
  std::byte* also_to = nullptr;
  RINGCOMM_HD int num() const { return also_to != nullptr ? 2 : 1; }
  RINGCOMM_HD std::byte* at(int output) const { return output == 0 ? to : also_to; }
};

/// Pack `idx` of every source, left to right. All are read before anything is stored, so that an
/// output may be a source.
template <class Element, class Operator, int kElems, int kSources, class To, class Sources>
RINGCOMM_HD void combine_pack(const To& outputs, const Sources& sources, std::size_t idx,
                              int divisor) {
  using P = Pack<Element, kElems>;
  constexpr int kAtOnce = kSources > 0 ? kSources : 4;
  const int num_sources = kSources > 0 ? kSources : sources.num();
  typename Element::Acc acc[kElems] = {};
  for (int first = 0; first < num_sources; first += kAtOnce) {
    P loaded[kAtOnce] = {};
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int s = 0; s < kAtOnce; ++s)
      if (first + s < num_sources)
        loaded[s] = reinterpret_cast<const P*>(sources.at(first + s))[idx];
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int s = 0; s < kAtOnce; ++s) {
      if (first + s >= num_sources) break;
      for (int e = 0; e < kElems; ++e) {
        const typename Element::Acc next = Element::load(loaded[s].of[e]);
        acc[e] = first + s == 0 ? next : Operator::apply(acc[e], next);
      }
    }
  }
  P result;
  for (int e = 0; e < kElems; ++e)
    result.of[e] = Element::store(divisor > 1 ? Element::divide(acc[e], divisor) : acc[e]);
  for (int o = 0; o < outputs.num(); ++o) reinterpret_cast<P*>(outputs.at(o))[idx] = result;
}

template <class Element, int kElems, class To, class Sources>
RINGCOMM_HD bool are_aligned(const To& outputs, const Sources& sources) {
  using P = Pack<Element, kElems>;
  bool result = true;
  for (int o = 0; o < outputs.num(); ++o) result = result && is_aligned(outputs.at(o), alignof(P));
  for (int s = 0; s < sources.num(); ++s) result = result && is_aligned(sources.at(s), alignof(P));
  return result;
}

template <class Element, class Operator, int kSources, class B, class To, class Sources>
RINGCOMM_HD void combine_elems(const B& block, const To& outputs, const Sources& sources,
                               std::size_t num_elems, int divisor) {
  constexpr int kVectorElems = sizeof(Vector) % sizeof(typename Element::Stored) == 0
                                   ? sizeof(Vector) / sizeof(typename Element::Stored)
                                   : 1;
  std::size_t done = 0;
  if (kVectorElems > 1 && are_aligned<Element, kVectorElems>(outputs, sources)) {
    const std::size_t num_packs = num_elems / kVectorElems;
    for (std::size_t i = block.thread_idx(); i < num_packs; i += block.num_threads())
      combine_pack<Element, Operator, kVectorElems, kSources>(outputs, sources, i, divisor);
    done = num_packs * kVectorElems;
  }
  for (std::size_t i = done + block.thread_idx(); i < num_elems; i += block.num_threads())
    combine_pack<Element, Operator, 1, kSources>(outputs, sources, i, divisor);
}

/// The same for what need not be fast: any number of sources, any operator.
template <class Element, class Operator, class B, class To, class Sources>
RINGCOMM_APART RINGCOMM_HD void combine_elems_apart(const B& block, const To& outputs,
                                                    const Sources& sources, std::size_t num_elems,
                                                    int divisor) {
  combine_elems<Element, Operator, 0>(block, outputs, sources, num_elems, divisor);
}

/// outputs[...][i] = sources[0][i] (+) ... by all threads of a block, as ReduceOp::combine says.
/// Both have num() and at(idx).
template <class Element, class B, class To, class Sources>
RINGCOMM_HD void combine(const B& block, const To& outputs, const Sources& sources,
                         std::size_t num_elems, Reduction reduction, int divisor) {
  with_operator<Element>(reduction, [&](auto op) {
    using Operator = decltype(op);
    // Where the number is known, so many loads are under way at once; for what sums are made of.
    constexpr bool kIsHot = std::is_same_v<Operator, Sum> && !Element::kIsBitwise;
    if constexpr (kIsHot) {
      if (sources.num() == 2)
        return combine_elems<Element, Operator, 2>(block, outputs, sources, num_elems, divisor);
      combine_elems<Element, Operator, 0>(block, outputs, sources, num_elems, divisor);
    } else {
      combine_elems_apart<Element, Operator>(block, outputs, sources, num_elems, divisor);
    }
  });
}

}  // namespace ringcomm::cuda
