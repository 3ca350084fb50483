#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/block.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/memory.h"
#include "kernels/common/elements.h"

// How the threads of a block reduce elements: eight bytes at a time, the data of a packet, and in
// bulk.

namespace ringcomm::cuda {

inline constexpr std::size_t kWordBytes = 8;

/// Eight bytes of an array of `num_bytes`, filled up with zeros where it ends before.
RINGCOMM_HD inline std::uint64_t load_word(const std::byte* from, std::size_t idx,
                                           std::size_t num_bytes) {
  const std::size_t begin = idx * kWordBytes;
  std::uint64_t word = 0;
  if (begin + kWordBytes <= num_bytes && is_aligned(from, kWordBytes))
    return load_pack<Cached::kYes, std::uint64_t>(from + begin);
  RINGCOMM_ROLLED
  for (std::size_t i = 0; i < kWordBytes && begin + i < num_bytes; ++i)
    word |= std::uint64_t{load_pack<Cached::kYes, std::uint8_t>(from + begin + i)} << (8 * i);
  return word;
}
RINGCOMM_HD inline void store_word(std::byte* to, std::size_t idx, std::size_t num_bytes,
                                   std::uint64_t word) {
  const std::size_t begin = idx * kWordBytes;
  if (begin + kWordBytes <= num_bytes && is_aligned(to, kWordBytes)) {
    store_pack<Cached::kYes>(to + begin, word);
    return;
  }
  RINGCOMM_ROLLED
  for (std::size_t i = 0; i < kWordBytes && begin + i < num_bytes; ++i)
    store_pack<Cached::kYes>(to + begin + i, static_cast<std::uint8_t>(word >> (8 * i)));
}

/// Reduces integers, booleans and float64: branches on the type for every word.
class AnyReducer {
 public:
  RINGCOMM_HD AnyReducer(DType dtype, Reduction reduction)
      : is_bool_(dtype == DType::kBool),
        reduction_(!is_bool_                                                      ? reduction
                   : reduction == Reduction::kProduct                             ? Reduction::kMin
                   : reduction == Reduction::kSum || reduction == Reduction::kAvg ? Reduction::kMax
                                                                                  : reduction),
        elem_bits_(static_cast<unsigned>(8 * element_bytes(dtype))),
        kind_(dtype == DType::kFloat64 ? Kind::kFloat
              : dtype == DType::kInt8 || dtype == DType::kInt16 || dtype == DType::kInt32 ||
                      dtype == DType::kInt64
                  ? Kind::kSigned
                  : Kind::kUnsigned) {}

  RINGCOMM_HD std::size_t elem_bytes() const { return elem_bits_ / 8; }

  // ---- eight bytes of elements

  using Word = std::uint64_t;
  RINGCOMM_HD Word first(std::uint64_t word) const {
    if (!is_bool_) return word;
    // 1 for each byte that has a bit: the carry of an addition that stays within its byte.
    const std::uint64_t low = 0x7f7f7f7f7f7f7f7fu;
    return (((word & low) + low) | word) >> 7 & 0x0101010101010101u;
  }
  RINGCOMM_HD void add(Word& acc, std::uint64_t word) const {
    const std::uint64_t next = first(word);
    if (kind_ == Kind::kFloat) {
      acc =
          bits_as<std::uint64_t>(combined(reduction_, bits_as<double>(acc), bits_as<double>(next)));
    } else {
      acc = by_element(acc, [&](std::uint64_t mine, unsigned shift) {
        const std::uint64_t theirs = element(next, shift);
        return kind_ == Kind::kSigned ? static_cast<std::uint64_t>(
                                            combined(reduction_, static_cast<std::int64_t>(mine),
                                                     static_cast<std::int64_t>(theirs)))
                                      : combined(reduction_, mine, theirs);
      });
    }
  }
  RINGCOMM_HD std::uint64_t result(Word acc, int divisor) const {
    if (kind_ == Kind::kFloat) {
      const auto value = bits_as<double>(acc);
      return bits_as<std::uint64_t>(quiet(divisor > 1 ? value / divisor : value));
    }
    if (divisor <= 1 || is_bool_) return acc;
    return by_element(acc, [&](std::uint64_t mine, unsigned) {
      return kind_ == Kind::kSigned
                 ? static_cast<std::uint64_t>(static_cast<std::int64_t>(mine) / divisor)
                 : mine / static_cast<std::uint64_t>(divisor);
    });
  }

  /// outputs[...][i] = sources[0][i] (+) ... by some threads. Both have num() and
  /// at(idx).
  template <int kMaxVectors = 8, class B, class To, class Sources>
  RINGCOMM_HD void combine(const B& block, const To& outputs, const Sources& sources,
                           std::uint32_t num_elems, int divisor) const {
    const std::size_t num_bytes = num_elems * elem_bytes();
    const std::size_t num_words = (num_bytes + kWordBytes - 1) / kWordBytes;
    RINGCOMM_ROLLED
    for (std::size_t i = block.thread_idx(); i < num_words; i += block.num_threads()) {
      Word acc = first(load_word(sources.at(0), i, num_bytes));
      RINGCOMM_ROLLED
      for (int s = 1; s < sources.num(); ++s) add(acc, load_word(sources.at(s), i, num_bytes));
      const std::uint64_t word = result(acc, divisor);
      RINGCOMM_ROLLED
      for (int o = 0; o < outputs.num(); ++o) store_word(outputs.at(o), i, num_bytes, word);
    }
  }

 private:
  enum class Kind : std::uint8_t { kSigned, kUnsigned, kFloat };

  /// An element in the low bits of 64 bits.
  RINGCOMM_HD std::uint64_t element(std::uint64_t word, unsigned shift) const {
    const unsigned above = 64 - elem_bits_;
    const std::uint64_t high = (word >> shift) << above;
    return kind_ == Kind::kSigned
               ? static_cast<std::uint64_t>(static_cast<std::int64_t>(high) >> above)
               : high >> above;
  }
  template <class F>
  RINGCOMM_HD std::uint64_t by_element(std::uint64_t word, const F& function) const {
    const unsigned above = 64 - elem_bits_;
    std::uint64_t result = 0;
    RINGCOMM_ROLLED
    for (unsigned shift = 0; shift < 64; shift += elem_bits_)
      result |= function(element(word, shift), shift) << above >> above << shift;
    return result;
  }
  bool is_bool_;
  Reduction reduction_;  ///< of booleans the sum is "any", the maximum, and the product "all"
  unsigned elem_bits_;
  Kind kind_;
};

template <class Element, int kElems>
struct alignas(kElems == 1 ? alignof(typename Element::Stored)
                           : kElems * sizeof(typename Element::Stored)) Pack {
  typename Element::Stored of[kElems];
};

struct Outputs {
  std::byte* to;
  std::byte* also_to = nullptr;
  RINGCOMM_HD int num() const { return also_to != nullptr ? 2 : 1; }
  RINGCOMM_HD std::byte* at(int output) const { return output == 0 ? to : also_to; }
};

struct TableSources {
  const Tables& tables;
  int num_sources;
  std::size_t offset;
  RINGCOMM_HD int num() const { return num_sources; }
  RINGCOMM_HD const std::byte* at(int source) const { return tables.sources[source] + offset; }
};
struct TableOutputs {
  const Tables& tables;
  std::size_t offset;
  RINGCOMM_HD int num() const { return tables.num_outputs; }
  RINGCOMM_HD std::byte* at(int output) const { return tables.outputs[output] + offset; }
};

template <class To, class Sources>
RINGCOMM_HD bool are_aligned(const To& outputs, const Sources& sources) {
  std::uintptr_t bits = 0;
  RINGCOMM_ROLLED
  for (int o = 0; o < outputs.num(); ++o) bits |= reinterpret_cast<std::uintptr_t>(outputs.at(o));
  RINGCOMM_ROLLED
  for (int s = 0; s < sources.num(); ++s) bits |= reinterpret_cast<std::uintptr_t>(sources.at(s));
  return bits % sizeof(Vector) == 0;
}

template <class Element, int kElems>
RINGCOMM_HD void add_pack(float* acc, const Pack<Element, kElems>& pack, bool is_first) {
  RINGCOMM_UNROLL
  for (int e = 0; e < kElems; ++e) {
    const float next = Element::load(pack.of[e]);
    acc[e] = is_first ? next : acc[e] + next;
  }
}

template <class Element, class To>
RINGCOMM_HD void store_sums(const To& outputs, std::uint32_t idx, const float* acc,
                            bool is_wanted) {
  Vector vector;
  RINGCOMM_UNROLL
  for (int w = 0; w < 4; ++w)
    vector.words[w] = Element::store_32_bits(acc + w * Element::kPer32Bits);
  const std::size_t offset = std::size_t{idx} * sizeof(Vector);
  store_pack<Cached::kNo>(outputs.at(0) + offset, vector, is_wanted);
  RINGCOMM_ROLLED
  for (int o = 1; o < outputs.num(); ++o)
    store_pack<Cached::kYes>(outputs.at(o) + offset, vector, is_wanted);
}

/// Sums, times the inverse of a power of two for an average, which is exact: of 2, 4 or 8 ranks. A
/// thread has kUnroll vectors of kSources sources under way, and stores nothing before it has all
/// of them, so that an output may be a source. Eight vectors fit 64 registers.
template <class Element, int kSources, int kUnroll, class B, class To, class Sources>
RINGCOMM_HD void sum_exactly(const B& block, const To& outputs, const Sources& sources,
                             std::uint32_t num_vectors, float scale) {
  constexpr int kElems = sizeof(Vector) / sizeof(typename Element::Stored);
  RINGCOMM_ROLLED
  for (std::uint32_t begin = 0; begin < num_vectors; begin += kUnroll * block.num_threads()) {
    const std::uint32_t first = begin + block.thread_idx();
    Pack<Element, kElems> loaded[kUnroll][kSources];
    RINGCOMM_UNROLL
    for (int s = 0; s < kSources; ++s) {
      const std::byte* const source = sources.at(s);
      RINGCOMM_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        const std::uint32_t idx = opaque(first + static_cast<unsigned>(u) * block.num_threads());
        loaded[u][s] = load_pack<Cached::kYes, Pack<Element, kElems>>(
            source + std::size_t{idx} * sizeof(Vector), idx < num_vectors);
      }
    }
    end_of_loads();
    RINGCOMM_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      float acc[kElems];
      RINGCOMM_UNROLL
      for (int s = 0; s < kSources; ++s) add_pack(acc, loaded[u][s], s == 0);
      RINGCOMM_UNROLL
      for (int e = 0; e < kElems; ++e) acc[e] *= scale;
      const std::uint32_t idx = opaque(first + static_cast<unsigned>(u) * block.num_threads());
      store_sums<Element>(outputs, idx, acc, idx < num_vectors);
    }
  }
}

/// Sums of any number of sources, kAtOnce at a time, and with any divisor: kElems elements of each.
template <class Element, int kElems, int kAtOnce>
struct AnySums {
  Pack<Element, kElems> loaded[kAtOnce];

  template <class Sources>
  RINGCOMM_HD void load(const Sources& sources, int from, std::size_t idx, bool is_there) {
    RINGCOMM_UNROLL
    for (int s = 0; s < kAtOnce; ++s) {
      const bool is_source = from + s < sources.num();
      const int source = is_source ? from + s : 0;
      loaded[s] = load_pack<Cached::kYes, Pack<Element, kElems>>(
          sources.at(source) + idx * sizeof loaded[s], is_source && is_there);
    }
  }
  /// The first sources have been loaded.
  template <class Sources>
  RINGCOMM_HD void sum(const Sources& sources, std::size_t idx, int divisor, bool is_there,
                       float (&acc)[kElems]) {
    RINGCOMM_ROLLED
    for (int from = 0; from < sources.num(); from += kAtOnce) {
      if (from > 0) load(sources, from, idx, is_there);
      RINGCOMM_UNROLL
      for (int s = 0; s < kAtOnce; ++s)
        if (from + s < sources.num()) add_pack(acc, loaded[s], from + s == 0);
    }
    RINGCOMM_UNROLL
    for (int e = 0; e < kElems; ++e)
      if (divisor > 1) acc[e] /= static_cast<float>(divisor);
  }
};

/// Reduces floats of one type, known to the compiler, in fp32.
template <class Element>
class TypedReducer {
 public:
  using Stored = typename Element::Stored;

  RINGCOMM_HD TypedReducer(DType, Reduction reduction) : reduction_(reduction) {}

  RINGCOMM_HD static constexpr std::size_t elem_bytes() { return sizeof(Stored); }

  // ---- eight bytes of elements

  static constexpr int kWordElems = static_cast<int>(kWordBytes / sizeof(Stored));
  struct Word {
    float of[kWordElems];
  };
  RINGCOMM_HD Word first(std::uint64_t word) const {
    const auto pack = bits_as<Pack<Element, kWordElems>>(word);
    Word result;
    RINGCOMM_UNROLL
    for (int e = 0; e < kWordElems; ++e) result.of[e] = Element::load(pack.of[e]);
    return result;
  }
  RINGCOMM_HD void add(Word& acc, std::uint64_t word) const {
    const Word next = first(word);
    RINGCOMM_UNROLL
    for (int e = 0; e < kWordElems; ++e) acc.of[e] = combined(reduction_, acc.of[e], next.of[e]);
  }
  RINGCOMM_HD std::uint64_t result(const Word& acc, int divisor) const {
    Word mean;
    RINGCOMM_UNROLL
    for (int e = 0; e < kWordElems; ++e) mean.of[e] = averaged(acc.of[e], divisor);
    return Element::store_32_bits(mean.of) |
           std::uint64_t{Element::store_32_bits(mean.of + Element::kPer32Bits)} << 32;
  }

  /// As AnyReducer's, of a slice. A thread holds `kMaxVectors` of 16 bytes.
  template <int kMaxVectors = 8, class B, class To, class Sources>
  RINGCOMM_HD void combine(const B& block, const To& outputs, const Sources& sources,
                           std::uint32_t num_elems, int divisor) const {
    constexpr std::uint32_t kElems = sizeof(Vector) / sizeof(Stored);
    const bool is_sum = reduction_ == Reduction::kSum || reduction_ == Reduction::kAvg;
    const std::uint32_t num_vectors =
        is_sum && are_aligned(outputs, sources) ? num_elems / kElems : 0;
    // What is left of vectors comes first: fewer numbers are kept beside the vectors under way.
    RINGCOMM_ROLLED
    for (std::uint32_t i = num_vectors * kElems + block.thread_idx(); i < num_elems;
         i += block.num_threads()) {
      const std::size_t offset = std::size_t{i} * sizeof(Stored);
      const auto element = [&](int s) {
        return Element::load(load_pack<Cached::kYes, Stored>(sources.at(s) + offset));
      };
      float acc = element(0);
      RINGCOMM_ROLLED
      for (int s = 1; s < sources.num(); ++s) acc = combined(reduction_, acc, element(s));
      const Stored stored = Element::store(averaged(acc, divisor));
      RINGCOMM_ROLLED
      for (int o = 0; o < outputs.num(); ++o)
        store_pack<Cached::kYes>(outputs.at(o) + offset, stored);
    }
    if (num_vectors > 0) sum<kMaxVectors>(block, outputs, sources, num_vectors, divisor);
  }

 private:
  template <int kMaxVectors, class B, class To, class Sources>
  RINGCOMM_HD static void sum(const B& block, const To& outputs, const Sources& sources,
                              std::uint32_t num_vectors, int divisor) {
    const bool is_power = (divisor & (divisor - 1)) == 0;
    const int num = is_power ? sources.num() : 0;
    // The inverse of a power of two. Functions of <bit> are not for kernels: nvcc takes
    // std::countr_zero for a constant, without a word.
    const float scale =
        bits_as<float>((254u << 23) - bits_as<std::uint32_t>(static_cast<float>(divisor)));
    if (num == 2)
      sum_exactly<Element, 2, kMaxVectors / 2>(block, outputs, sources, num_vectors, scale);
    else if (num == 4)
      sum_exactly<Element, 4, kMaxVectors / 4>(block, outputs, sources, num_vectors, scale);
    else if (num == 8)
      sum_exactly<Element, 8, 1>(block, outputs, sources, num_vectors, scale);
    else
      sum_any(block, outputs, sources, num_vectors, divisor);
  }

  template <class B, class To, class Sources>
  RINGCOMM_HD static void sum_any(const B& block, const To& outputs, const Sources& sources,
                                  std::uint32_t num_vectors, int divisor) {
    RINGCOMM_ROLLED
    for (std::uint32_t i = block.thread_idx(); i < num_vectors; i += block.num_threads()) {
      AnySums<Element, sizeof(Vector) / sizeof(Stored), 4> sums;
      float acc[sizeof(Vector) / sizeof(Stored)] = {};
      sums.load(sources, 0, i, true);
      sums.sum(sources, i, divisor, true, acc);
      store_sums<Element>(outputs, i, acc, true);
    }
  }

  RINGCOMM_HD static float averaged(float acc, int divisor) {
    return divisor > 1 ? acc / static_cast<float>(divisor) : acc;
  }

  Reduction reduction_;
};

}  // namespace ringcomm::cuda
