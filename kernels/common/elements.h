#pragma once

#include <cstdint>
#include <type_traits>

#include "core/annotations.h"
#include "kernels/common/types.h"
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// Elements in kernels of GPUs. They are accumulated with the bits of reductions/reduce_kernels.h.

namespace ringcomm::cuda {

/// The largest unit of one load or store.
struct alignas(16) Vector {
  std::uint32_t words[4];
};

template <class To, class From>
RINGCOMM_HD inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

RINGCOMM_HD inline float quiet(float value) {
  return value == value ? value : bits_as<float>(0x7fc00000u);
}
RINGCOMM_HD inline double quiet(double value) {
  return value == value ? value : bits_as<double>(std::uint64_t{0x7ff8} << 48);
}

// ---- 16-bit floats; both ways exact, or rounded to nearest even

RINGCOMM_HD inline float bfloat16_to_fp32(std::uint16_t bits) {
  return bits_as<float>(static_cast<std::uint32_t>(bits) << 16);
}

#ifdef __CUDACC__
// An instruction's NaN differs from the CPU's, 0x7fc0 and 0x7e00.
__device__ inline std::uint16_t fp32_to_bfloat16(float value) {
  return value == value ? __bfloat16_as_ushort(__float2bfloat16_rn(value)) : std::uint16_t{0x7fc0};
}
__device__ inline float float16_to_fp32(std::uint16_t half) {
  return __half2float(__ushort_as_half(half));
}
__device__ inline std::uint16_t fp32_to_float16(float value) {
  return value == value ? __half_as_ushort(__float2half_rn(value)) : std::uint16_t{0x7e00};
}
/// Two in a word, the first in its low half. The instruction's NaN is 0x7fff, as a signed number
/// above all others and the CPU's.
__device__ inline std::uint32_t fp32_to_bfloat16s(float low, float high) {
  const auto words = bits_as<std::uint32_t>(__floats2bfloat162_rn(low, high));
  return __vmins2(words, 0x7fc07fc0u);
}
__device__ inline std::uint32_t fp32_to_float16s(float low, float high) {
  const auto words = bits_as<std::uint32_t>(__floats2half2_rn(low, high));
  return __vmins2(words, 0x7e007e00u);
}
#else
// Of kernels on a CPU, which only tests run: tests/emulator/elements.h.
std::uint16_t fp32_to_bfloat16(float value);
float float16_to_fp32(std::uint16_t half);
std::uint16_t fp32_to_float16(float value);
std::uint32_t fp32_to_bfloat16s(float low, float high);
std::uint32_t fp32_to_float16s(float low, float high);
#endif

// ---- types that kernels know: Stored is the type in memory; all are accumulated in fp32. Four
// bytes have kPer32Bits elements.

template <float (*kLoad)(std::uint16_t), std::uint16_t (*kStore)(float),
          std::uint32_t (*kStoreTwo)(float, float)>
struct Element16 {
  using Stored = std::uint16_t;
  RINGCOMM_HD static float load(Stored value) { return kLoad(value); }
  RINGCOMM_HD static Stored store(float acc) { return kStore(acc); }
  static constexpr int kPer32Bits = 2;
  RINGCOMM_HD static std::uint32_t store_32_bits(const float* acc) {
    return kStoreTwo(acc[0], acc[1]);
  }
};
using Float16Element = Element16<float16_to_fp32, fp32_to_float16, fp32_to_float16s>;
using BFloat16Element = Element16<bfloat16_to_fp32, fp32_to_bfloat16, fp32_to_bfloat16s>;
struct Float32Element {
  using Stored = float;
  RINGCOMM_HD static float load(Stored value) { return value; }
  RINGCOMM_HD static Stored store(float acc) { return quiet(acc); }
  static constexpr int kPer32Bits = 1;
  RINGCOMM_HD static std::uint32_t store_32_bits(const float* acc) {
    return bits_as<std::uint32_t>(quiet(acc[0]));
  }
};

/// Two elements as one. Minimum and maximum keep the first of equals, and propagate NaN; sums and
/// products of integers wrap. Reductions that are not named are sums.
template <class T>
RINGCOMM_HD T combined(Reduction reduction, T a, T b) {
  constexpr bool kIsInt = std::is_integral_v<T>;
  using Wrapping = std::conditional_t<kIsInt, std::uint64_t, T>;
  const auto x = static_cast<Wrapping>(a), y = static_cast<Wrapping>(b);
  switch (reduction) {
    case Reduction::kProduct:
      return static_cast<T>(x * y);
    case Reduction::kMin:
      return a <= b ? a : (a != a ? a : b);
    case Reduction::kMax:
      return a >= b ? a : (a != a ? a : b);
    case Reduction::kBitAnd:
      if constexpr (kIsInt) return a & b;
      break;
    case Reduction::kBitOr:
      if constexpr (kIsInt) return a | b;
      break;
    case Reduction::kBitXor:
      if constexpr (kIsInt) return a ^ b;
      break;
    default:
      break;
  }
  return static_cast<T>(x + y);
}

}  // namespace ringcomm::cuda
