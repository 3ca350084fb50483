#pragma once

// The reductions, written once and compiled for each level by its own source file (see
// kernels/common/simd.h for the rules).

#include <type_traits>

#include "kernels/common/denormals.h"
#include "kernels/common/tables.h"

// Below the headers of others.
#include "kernels/common/simd.h"

namespace ringcomm::cpu {
namespace {

// ---- element types: from memory to an accumulator (load), the last step of an average (divide),
// ---- and the vector to store (pack)

template <class T, int kParts = 1>
struct Element {
  using Lane = T;
  static constexpr bool kIsFloat = std::is_floating_point_v<T>;
  /// The running result for one vector of memory (two of T where 16-bit elements are held as fp32).
  struct Acc {
    Vec<T> part[kParts];
  };

  [[gnu::always_inline]] static Acc load(const char* from) { return {{load_bytes<Vec<T>>(from)}}; }
  [[gnu::always_inline]] static void divide(Acc& acc, int divisor) {
    if constexpr (kIsFloat) {
      for (Vec<T>& part : acc.part) part /= static_cast<T>(divisor);
    } else {
      // By lane, because SSE, AVX and NEON have no integer division. In a type that can also
      // represent the divisor, unlike T.
      for (std::size_t lane = 0; lane < kVectorBytes / sizeof(T); ++lane)
        acc.part[0][lane] = static_cast<T>(acc.part[0][lane] / divisor);
    }
  }
  [[gnu::always_inline]] static Vec<T> pack(const Acc& acc) {
    if constexpr (kIsFloat) return canonical_nan<T>(acc.part[0]);
    return acc.part[0];
  }
};

/// Any byte but zero counts as true.
struct BoolElement : Element<std::uint8_t> {
  [[gnu::always_inline]] static Acc load(const char* from) {
    using Bytes = Vec<std::uint8_t>;
    return {{bits_as<Bytes>(load_bytes<Bytes>(from) != 0) & 1}};
  }
};

/// Stored one by one: as one object they would go through the stack.
struct TwoHalves {
  HalfWord low, high;
};

[[gnu::always_inline]] inline void store_bytes(char* to, const TwoHalves& v) {
  store_bytes(to, v.low);
  store_bytes(to + sizeof v.low, v.high);
}

/// 16-bit floats accumulate as two vectors of fp32.
struct Float16Element : Element<float, 2> {
  [[gnu::always_inline]] static Acc load(const char* from) {
    return {{widen_float16(load_bytes<HalfWord>(from)),
             widen_float16(load_bytes<HalfWord>(from + sizeof(HalfWord)))}};
  }
  [[gnu::always_inline]] static TwoHalves pack(const Acc& acc) {
    return {narrow_float16(canonical_nan<float>(acc.part[0])),
            narrow_float16(canonical_nan<float>(acc.part[1]))};
  }
};

/// A bfloat16 is the upper half of an fp32: of each pair one element is a mask away and the other a
/// shift.
struct BFloat16Element : Element<float, 2> {
  [[gnu::always_inline]] static Acc load(const char* from) {
    const auto pairs = load_bytes<Word>(from);
    return {{bits_as<Fp32>(pairs << 16), bits_as<Fp32>(pairs & 0xffff0000u)}};
  }
  [[gnu::always_inline]] static Word pack(const Acc& acc) {
    return (rounded_to_bfloat16(acc.part[0]) >> 16) |
           (rounded_to_bfloat16(acc.part[1]) & 0xffff0000u);
  }
};

// ---- reductions

/// Integers wrap in sums and products, so those are taken in the unsigned type: overflow of a
/// signed one is undefined. Min and max keep the first of equals (zeros of either sign) and
/// propagate NaN: the result is `a` if it is NaN, and `b` if that is NaN, because every comparison
/// with NaN is false.
template <Reduction kOp, class T>
[[gnu::always_inline]] inline Vec<T> combined(const Vec<T>& a, const Vec<T>& b) {
  using Wrapping =
      Vec<typename std::conditional_t<std::is_floating_point_v<T>, std::type_identity<T>,
                                      std::make_unsigned<T>>::type>;
  if constexpr (kOp == Reduction::kSum) {
    return bits_as<Vec<T>>(bits_as<Wrapping>(a) + bits_as<Wrapping>(b));
  } else if constexpr (kOp == Reduction::kProduct) {
    return bits_as<Vec<T>>(bits_as<Wrapping>(a) * bits_as<Wrapping>(b));
  } else if constexpr (kOp == Reduction::kMin) {
    return a <= b ? a : (a != a ? a : b);
  } else if constexpr (kOp == Reduction::kMax) {
    return a >= b ? a : (a != a ? a : b);
  } else if constexpr (kOp == Reduction::kBitAnd) {
    return a & b;
  } else if constexpr (kOp == Reduction::kBitOr) {
    return a | b;
  } else {
    static_assert(kOp == Reduction::kBitXor);
    return a ^ b;
  }
}

template <class Elem, Reduction kOp>
[[gnu::always_inline]] inline void combine_into(typename Elem::Acc& acc, const char* next) {
  const auto other = Elem::load(next);
  for (std::size_t p = 0; p < sizeof(acc.part) / kVectorBytes; ++p)
    acc.part[p] = combined<kOp, typename Elem::Lane>(acc.part[p], other.part[p]);
}

// ---- arrays

/// The arguments of one call, as bytes.
struct Job {
  char* to;
  char* also_to;
  const void* const* srcs;
  int num_srcs;
  int divisor;

  [[gnu::always_inline]] const char* src(int s) const { return static_cast<const char*>(srcs[s]); }
};

// `kVectors` vectors of every source at `offset_bytes`. All sources are read before anything is
// stored, so that `to` may be any one of them.
template <class Elem, Reduction kOp, int kVectors>
[[gnu::always_inline]] inline void combine_vectors(const Job& job, std::size_t offset_bytes) {
  typename Elem::Acc acc[kVectors];
  const char* first = job.src(0) + offset_bytes;
  for (int v = 0; v < kVectors; ++v) acc[v] = Elem::load(first + v * kVectorBytes);
  for (int s = 1; s < job.num_srcs; ++s) {
    const char* from = job.src(s) + offset_bytes;
    for (int v = 0; v < kVectors; ++v) combine_into<Elem, kOp>(acc[v], from + v * kVectorBytes);
  }
  if (job.divisor > 1)
    for (int v = 0; v < kVectors; ++v) Elem::divide(acc[v], job.divisor);
  for (int v = 0; v < kVectors; ++v) {
    const auto packed = Elem::pack(acc[v]);
    store_bytes(job.to + offset_bytes + v * kVectorBytes, packed);
    if (job.also_to != nullptr) store_bytes(job.also_to + offset_bytes + v * kVectorBytes, packed);
  }
}

// The last `num_bytes` < kVectorBytes, in vectors filled up with zeros. Not an overlapping last
// vector: where `to` is a source that would combine elements twice.
template <class Elem, Reduction kOp>
[[gnu::always_inline]] inline void combine_tail(const Job& job, std::size_t offset_bytes,
                                                std::size_t num_bytes) {
  char padded[kVectorBytes] = {};
  __builtin_memcpy(padded, job.src(0) + offset_bytes, num_bytes);
  auto acc = Elem::load(padded);
  for (int s = 1; s < job.num_srcs; ++s) {
    __builtin_memcpy(padded, job.src(s) + offset_bytes, num_bytes);
    combine_into<Elem, kOp>(acc, padded);
  }
  if (job.divisor > 1) Elem::divide(acc, job.divisor);
  store_bytes(padded, Elem::pack(acc));
  __builtin_memcpy(job.to + offset_bytes, padded, num_bytes);
  if (job.also_to != nullptr) __builtin_memcpy(job.also_to + offset_bytes, padded, num_bytes);
}

// With one vector at a time the sources' addresses are read for every vector; with four, two
// sources of fp32 lose a quarter.
constexpr int kUnroll = 2;

template <class Elem, Reduction kOp>
[[gnu::always_inline]] inline void combine_all(const Job& job, std::size_t num_bytes) {
  std::size_t offset = 0;
  for (; num_bytes - offset >= kUnroll * kVectorBytes; offset += kUnroll * kVectorBytes)
    combine_vectors<Elem, kOp, kUnroll>(job, offset);
  for (; num_bytes - offset >= kVectorBytes; offset += kVectorBytes)
    combine_vectors<Elem, kOp, 1>(job, offset);
  if (offset < num_bytes) combine_tail<Elem, kOp>(job, offset, num_bytes - offset);
}

template <class Elem, Reduction kOp, std::size_t kElementBytes>
void combine(void* to, void* also_to, const void* const* srcs, int num_srcs, std::size_t num_elems,
             int divisor) {
  const KeepDenormals mode;
  const std::size_t num_bytes = num_elems * kElementBytes;
  Job job{static_cast<char*>(to), static_cast<char*>(also_to), srcs, num_srcs, divisor};
  if (num_srcs == 2 && divisor <= 1) {
    // Most calls. The addresses move to registers: through `srcs` they would be read again after
    // every store, which might have changed them for all that the compiler knows (in L1 that costs
    // 7 % for float32, up to 60 % for int8).
    const void* const both[2] = {srcs[0], srcs[1]};
    job = {job.to, job.also_to, both, 2, 1};
    return combine_all<Elem, kOp>(job, num_bytes);
  }
  combine_all<Elem, kOp>(job, num_bytes);
}

// ---- the table

/// The reduction of vectors that another one is of such elements, or kMerge where it has no
/// meaning. The sum of truth values is "any" and the product "all"; they have no average.
template <class Elem>
consteval Reduction lane_reduction(Reduction reduction) {
  using enum Reduction;
  const bool is_bitwise = reduction == kBitAnd || reduction == kBitOr || reduction == kBitXor;
  if (!std::is_same_v<Elem, BoolElement>)
    return reduction == kAvg ? kSum : is_bitwise && Elem::kIsFloat ? kMerge : reduction;
  if (reduction == kSum || reduction == kMax) return kBitOr;
  if (reduction == kProduct || reduction == kMin) return kBitAnd;
  return is_bitwise ? reduction : kMerge;
}

template <DType kDType, class Elem, int kReduction>
consteval void set_reductions(Kernels& kernels) {
  if constexpr (kReduction < kNumReductions) {
    constexpr Reduction kOp = lane_reduction<Elem>(static_cast<Reduction>(kReduction));
    if constexpr (kOp != Reduction::kMerge)
      kernels.reductions[kReduction][static_cast<int>(kDType)] = {
          element_bytes(kDType), combine<Elem, kOp, element_bytes(kDType)>};
    set_reductions<kDType, Elem, kReduction + 1>(kernels);
  }
}

consteval void set_reductions(Kernels& kernels) {
  set_reductions<DType::kBool, BoolElement, 0>(kernels);
  set_reductions<DType::kUint8, Element<std::uint8_t>, 0>(kernels);
  set_reductions<DType::kInt8, Element<std::int8_t>, 0>(kernels);
  set_reductions<DType::kInt16, Element<std::int16_t>, 0>(kernels);
  set_reductions<DType::kInt32, Element<std::int32_t>, 0>(kernels);
  set_reductions<DType::kInt64, Element<std::int64_t>, 0>(kernels);
  set_reductions<DType::kUint16, Element<std::uint16_t>, 0>(kernels);
  set_reductions<DType::kUint32, Element<std::uint32_t>, 0>(kernels);
  set_reductions<DType::kUint64, Element<std::uint64_t>, 0>(kernels);
  set_reductions<DType::kFloat16, Float16Element, 0>(kernels);
  set_reductions<DType::kBFloat16, BFloat16Element, 0>(kernels);
  set_reductions<DType::kFloat32, Element<float>, 0>(kernels);
  set_reductions<DType::kFloat64, Element<double>, 0>(kernels);
  kernels.reductions[static_cast<int>(Reduction::kMerge)][static_cast<int>(DType::kSoftmaxStats)] =
      {element_bytes(DType::kSoftmaxStats), merge_softmax_stats};
}

}  // namespace
}  // namespace ringcomm::cpu
