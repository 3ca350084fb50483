#pragma once

#include <cstdint>
#include <type_traits>

#include "core/annotations.h"
#include "kernels/common/types.h"
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// Elements in kernels of GPUs. They are accumulated with the bits of csrc/reduce/reduce_kernels.h.

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
RINGCOMM_HD inline std::uint16_t fp32_to_bfloat16(float value) {
#ifdef __CUDA_ARCH__
  // The instruction's NaN differs from the host's.
  return value == value ? __bfloat16_as_ushort(__float2bfloat16_rn(value)) : std::uint16_t{0x7fc0};
#else
  const auto bits = bits_as<std::uint32_t>(quiet(value));
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}
/// Two in a word, the first in its low half. The instruction's NaN is 0x7fff, as a signed number
/// above all others and the host's.
RINGCOMM_HD inline std::uint32_t fp32_to_bfloat16s(float low, float high) {
#ifdef __CUDA_ARCH__
  const auto words = bits_as<std::uint32_t>(__floats2bfloat162_rn(low, high));
  return __vmins2(words, 0x7fc07fc0u);
#else
  return fp32_to_bfloat16(low) | std::uint32_t{fp32_to_bfloat16(high)} << 16;
#endif
}

RINGCOMM_HD inline float float16_to_fp32(std::uint16_t half) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(half));
#else
  const std::uint32_t shifted = (half & 0x7fffu) << 13;
  const std::uint32_t exponent = shifted & 0x0f800000u;
  const std::uint32_t sign = (half & 0x8000u) << 16;
  if (exponent == 0) {
    const float magnitude = bits_as<float>(shifted + (113u << 23)) - bits_as<float>(113u << 23);
    return bits_as<float>(bits_as<std::uint32_t>(magnitude) | sign);
  }
  const std::uint32_t bias = (112u << 23) + (exponent == 0x0f800000u ? 112u << 23 : 0u);
  return bits_as<float>((shifted + bias) | sign);
#endif
}
RINGCOMM_HD inline std::uint16_t fp32_to_float16(float value) {
#ifdef __CUDA_ARCH__
  return value == value ? __half_as_ushort(__float2half_rn(value)) : std::uint16_t{0x7e00};
#else
  const auto bits = bits_as<std::uint32_t>(quiet(value));
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t nan = magnitude > (255u << 23) ? 0x200u : 0u;
  if (magnitude < (113u << 23)) {
    const float moved = bits_as<float>(magnitude) + bits_as<float>(126u << 23);
    return static_cast<std::uint16_t>(sign | (bits_as<std::uint32_t>(moved) - (126u << 23)));
  }
  const std::uint32_t limited = magnitude < (143u << 23) ? magnitude : 143u << 23;
  return static_cast<std::uint16_t>(
      sign | nan | ((limited - (112u << 23) + 0xfffu + ((limited >> 13) & 1u)) >> 13));
#endif
}
RINGCOMM_HD inline std::uint32_t fp32_to_float16s(float low, float high) {
#ifdef __CUDA_ARCH__
  const auto words = bits_as<std::uint32_t>(__floats2half2_rn(low, high));
  return __vmins2(words, 0x7e007e00u);
#else
  return fp32_to_float16(low) | std::uint32_t{fp32_to_float16(high)} << 16;
#endif
}

// ---- types that kernels know: Stored is the type in memory; all are accumulated in fp32. Four
// bytes have kPer32Bits elements.

struct Float16Element {
  using Stored = std::uint16_t;
  RINGCOMM_HD static float load(Stored value) { return float16_to_fp32(value); }
  RINGCOMM_HD static Stored store(float acc) { return fp32_to_float16(acc); }
  static constexpr int kPer32Bits = 2;
  RINGCOMM_HD static std::uint32_t store_32_bits(const float* acc) {
    return fp32_to_float16s(acc[0], acc[1]);
  }
};
struct BFloat16Element {
  using Stored = std::uint16_t;
  RINGCOMM_HD static float load(Stored value) { return bfloat16_to_fp32(value); }
  RINGCOMM_HD static Stored store(float acc) { return fp32_to_bfloat16(acc); }
  static constexpr int kPer32Bits = 2;
  RINGCOMM_HD static std::uint32_t store_32_bits(const float* acc) {
    return fp32_to_bfloat16s(acc[0], acc[1]);
  }
};
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
