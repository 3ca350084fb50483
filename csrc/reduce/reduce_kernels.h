#pragma once

// The reductions, written once and compiled for each level by its own source file (see vectors.h
// for the rules).
//
// No expression multiplies and adds, because a compiler may contract such a pair to a fused
// instruction, and the result would depend on the level.

#include <type_traits>

#include "core/types.h"
#include "reduce/elements.h"
#include "reduce/simd_tables.h"

namespace ringcomm::host {
namespace {

// Integers wrap in sums and products, so those are taken in the unsigned type: overflow of a signed
// one is undefined.
template <class T>
struct WrappingType : std::make_unsigned<T> {};
template <>
struct WrappingType<float> : std::type_identity<float> {};
template <>
struct WrappingType<double> : std::type_identity<double> {};

struct Sum {
  template <class T>
  [[gnu::always_inline]] static Vec<T> apply(const Vec<T>& a, const Vec<T>& b) {
    using Wrapping = Vec<typename WrappingType<T>::type>;
    return bits_as<Vec<T>>(bits_as<Wrapping>(a) + bits_as<Wrapping>(b));
  }
};

struct Product {
  template <class T>
  [[gnu::always_inline]] static Vec<T> apply(const Vec<T>& a, const Vec<T>& b) {
    using Wrapping = Vec<typename WrappingType<T>::type>;
    return bits_as<Vec<T>>(bits_as<Wrapping>(a) * bits_as<Wrapping>(b));
  }
};

// Both keep the first of equals (zeros of either sign) and propagate NaN: the result is `a` if it
// is NaN, and `b` if that is NaN, because every comparison with NaN is false.
struct Min {
  template <class T>
  [[gnu::always_inline]] static Vec<T> apply(const Vec<T>& a, const Vec<T>& b) {
    return a <= b ? a : (a != a ? a : b);
  }
};

struct Max {
  template <class T>
  [[gnu::always_inline]] static Vec<T> apply(const Vec<T>& a, const Vec<T>& b) {
    return a >= b ? a : (a != a ? a : b);
  }
};

struct BitAnd {
  template <class T>
  [[gnu::always_inline]] static Vec<T> apply(const Vec<T>& a, const Vec<T>& b) {
    return a & b;
  }
};

struct BitOr {
  template <class T>
  [[gnu::always_inline]] static Vec<T> apply(const Vec<T>& a, const Vec<T>& b) {
    return a | b;
  }
};

struct BitXor {
  template <class T>
  [[gnu::always_inline]] static Vec<T> apply(const Vec<T>& a, const Vec<T>& b) {
    return a ^ b;
  }
};

template <class Op, class T, int kParts>
[[gnu::always_inline]] inline void combine_into(Accumulator<T, kParts>& acc,
                                                const Accumulator<T, kParts>& next) {
  for (int p = 0; p < kParts; ++p) acc.part[p] = Op::template apply<T>(acc.part[p], next.part[p]);
}

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
template <class Elem, class Op, int kVectors>
[[gnu::always_inline]] inline void combine_vectors(const Job& job, std::size_t offset_bytes) {
  typename Elem::Acc acc[kVectors];
  const char* first = job.src(0) + offset_bytes;
  for (int v = 0; v < kVectors; ++v) acc[v] = Elem::load(first + v * kVectorBytes);
  for (int s = 1; s < job.num_srcs; ++s) {
    const char* from = job.src(s) + offset_bytes;
    for (int v = 0; v < kVectors; ++v) {
      combine_into<Op>(acc[v], Elem::load(from + v * kVectorBytes));
    }
  }
  if (job.divisor > 1) {
    for (int v = 0; v < kVectors; ++v) Elem::divide(acc[v], job.divisor);
  }
  for (int v = 0; v < kVectors; ++v) {
    const auto packed = Elem::pack(acc[v]);
    store_bytes(job.to + offset_bytes + v * kVectorBytes, packed);
    if (job.also_to != nullptr) store_bytes(job.also_to + offset_bytes + v * kVectorBytes, packed);
  }
}

// The last `num_bytes` < kVectorBytes, in vectors filled up with zeros. Not an overlapping last
// vector: where `to` is a source that would combine elements twice.
template <class Elem, class Op>
[[gnu::always_inline]] inline void combine_tail(const Job& job, std::size_t offset_bytes,
                                                std::size_t num_bytes) {
  char padded[kVectorBytes] = {};
  __builtin_memcpy(padded, job.src(0) + offset_bytes, num_bytes);
  auto acc = Elem::load(padded);
  for (int s = 1; s < job.num_srcs; ++s) {
    __builtin_memcpy(padded, job.src(s) + offset_bytes, num_bytes);
    combine_into<Op>(acc, Elem::load(padded));
  }
  if (job.divisor > 1) Elem::divide(acc, job.divisor);
  store_bytes(padded, Elem::pack(acc));
  __builtin_memcpy(job.to + offset_bytes, padded, num_bytes);
  if (job.also_to != nullptr) __builtin_memcpy(job.also_to + offset_bytes, padded, num_bytes);
}

// Measured on Zen 5, g++ 12, in L1 and L2: with one vector at a time three and more sources are up
// to a third slower (their addresses are read for every vector), and with four two sources of fp32
// lose a quarter; 16-bit types do not care. At 64 MB nothing matters.
constexpr int kUnroll = 2;

template <class Elem, class Op>
[[gnu::always_inline]] inline void combine_all(const Job& job, std::size_t num_bytes) {
  std::size_t offset = 0;
  for (; num_bytes - offset >= kUnroll * kVectorBytes; offset += kUnroll * kVectorBytes) {
    combine_vectors<Elem, Op, kUnroll>(job, offset);
  }
  for (; num_bytes - offset >= kVectorBytes; offset += kVectorBytes) {
    combine_vectors<Elem, Op, 1>(job, offset);
  }
  if (offset < num_bytes) combine_tail<Elem, Op>(job, offset, num_bytes - offset);
}

template <class Elem, class Op, std::size_t kElementBytes>
void combine(void* to, void* also_to, const void* const* srcs, int num_srcs, std::size_t num_elems,
             int divisor) {
  const std::size_t num_bytes = num_elems * kElementBytes;
  Job job{static_cast<char*>(to), static_cast<char*>(also_to), srcs, num_srcs, divisor};
  if (num_srcs == 2 && divisor <= 1) {
    // Two sources are most calls. Their addresses move to registers: through `srcs` they would be
    // read again after every store, which might have changed them for all that the compiler knows.
    const void* const both[2] = {srcs[0], srcs[1]};
    job = {job.to, job.also_to, both, 2, 1};
    return combine_all<Elem, Op>(job, num_bytes);
  }
  combine_all<Elem, Op>(job, num_bytes);
}

template <class Elem, DType kDType>
constexpr void set_arithmetic(SimdKernels& kernels) {
  const auto set = [&kernels](Reduction reduction, CombineFn fn) {
    kernels.combine[static_cast<int>(reduction)][static_cast<int>(kDType)] = fn;
  };
  set(Reduction::kSum, combine<Elem, Sum, element_bytes(kDType)>);
  set(Reduction::kAvg, combine<Elem, Sum, element_bytes(kDType)>);
  set(Reduction::kProduct, combine<Elem, Product, element_bytes(kDType)>);
  set(Reduction::kMin, combine<Elem, Min, element_bytes(kDType)>);
  set(Reduction::kMax, combine<Elem, Max, element_bytes(kDType)>);
}

template <class Elem, DType kDType>
constexpr void set_bitwise(SimdKernels& kernels) {
  const auto set = [&kernels](Reduction reduction, CombineFn fn) {
    kernels.combine[static_cast<int>(reduction)][static_cast<int>(kDType)] = fn;
  };
  set(Reduction::kBitAnd, combine<Elem, BitAnd, element_bytes(kDType)>);
  set(Reduction::kBitOr, combine<Elem, BitOr, element_bytes(kDType)>);
  set(Reduction::kBitXor, combine<Elem, BitXor, element_bytes(kDType)>);
}

template <class T, DType kDType>
constexpr void set_integer(SimdKernels& kernels) {
  set_arithmetic<IntElement<T>, kDType>(kernels);
  set_bitwise<IntElement<T>, kDType>(kernels);
}

// For booleans the sum is "any" and the product "all".
constexpr void set_bool(SimdKernels& kernels) {
  const auto set = [&kernels](Reduction reduction, CombineFn fn) {
    kernels.combine[static_cast<int>(reduction)][static_cast<int>(DType::kBool)] = fn;
  };
  set(Reduction::kSum, combine<BoolElement, BitOr, 1>);
  set(Reduction::kMax, combine<BoolElement, BitOr, 1>);
  set(Reduction::kProduct, combine<BoolElement, BitAnd, 1>);
  set(Reduction::kMin, combine<BoolElement, BitAnd, 1>);
  set_bitwise<BoolElement, DType::kBool>(kernels);
}

consteval SimdKernels make_kernels(const char* level,
                                   decltype(SimdKernels::stream_copy) stream_copy) {
  SimdKernels kernels;
  kernels.level = level;
  kernels.stream_copy = stream_copy;
  set_bool(kernels);
  set_integer<std::uint8_t, DType::kUint8>(kernels);
  set_integer<std::int8_t, DType::kInt8>(kernels);
  set_integer<std::int16_t, DType::kInt16>(kernels);
  set_integer<std::int32_t, DType::kInt32>(kernels);
  set_integer<std::int64_t, DType::kInt64>(kernels);
  set_integer<std::uint16_t, DType::kUint16>(kernels);
  set_integer<std::uint32_t, DType::kUint32>(kernels);
  set_integer<std::uint64_t, DType::kUint64>(kernels);
  set_arithmetic<Float16Element, DType::kFloat16>(kernels);
  set_arithmetic<BFloat16Element, DType::kBFloat16>(kernels);
  set_arithmetic<FloatElement<float>, DType::kFloat32>(kernels);
  set_arithmetic<FloatElement<double>, DType::kFloat64>(kernels);
  return kernels;
}

}  // namespace
}  // namespace ringcomm::host
