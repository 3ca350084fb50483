#pragma once

#include <bit>
#include <cmath>
#include <type_traits>

#include "ptx/memory.h"

/// Types of operands, registers, and the conversions of 16-bit floats.
namespace ringcomm::ptx {

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};
/// f16x2, s16x2, f32x2: the low half first.
template <class T>
struct Pair {
  T low, high;
};
using f16x2 = Pair<f16>;
using bf16x2 = Pair<bf16>;
using s16x2 = Pair<s16>;
using u16x2 = Pair<u16>;
using f32x2 = Pair<float>;

template <class T>
constexpr bool is_half = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
template <class T>
constexpr bool is_pair = std::is_class_v<T> && !is_half<T>;
template <class T>
constexpr bool is_float = std::is_floating_point_v<T> || is_half<T>;

template <std::size_t kBytes>
using Bits = std::conditional_t<
    kBytes == 1, u8,
    std::conditional_t<kBytes == 2, u16, std::conditional_t<kBytes == 4, u32, u64>>>;

/// An operand of type T from a register or a literal: the low bits, as PTX reads wider registers.
template <class T, class V>
T get(V value) {
  if constexpr (std::is_same_v<T, bool>)
    return value != 0;
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(value);
  else
    return std::bit_cast<T>(static_cast<Bits<sizeof(T)>>(value));
}
/// Results that are narrower than their register are sign-extended or zero-extended.
template <class Register, class V>
void set(Register& to, V value) {
  if constexpr (std::is_same_v<Register, bool>)
    to = static_cast<bool>(value);
  else if constexpr (std::is_floating_point_v<V> || std::is_class_v<V>)
    to = static_cast<Register>(std::bit_cast<Bits<sizeof(V)>>(value));
  else if constexpr (std::is_signed_v<V>)
    to = static_cast<Register>(static_cast<std::make_signed_t<Register>>(value));
  else
    to = static_cast<Register>(value);
}

// ---- conversions of floats

inline float to_float(f16 value) {
  const u32 sign = (value.bits & 0x8000u) << 16;
  const u32 exponent = value.bits >> 10 & 31;
  const u32 mantissa = value.bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  return sign != 0 ? -magnitude : magnitude;
}
inline float to_float(bf16 value) { return std::bit_cast<float>(u32{value.bits} << 16); }

/// Rounded to the nearest, ties to even; NaN is the canonical NaN of the instruction.
template <class To>
To round_to(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 magnitude = bits & 0x7fffffffu;
  const u32 sign = bits >> 16 & 0x8000u;
  if constexpr (!is_half<To>) return static_cast<To>(value);
  if (magnitude > 0x7f800000u) return get<To>(0x7fffu);
  if constexpr (std::is_same_v<To, bf16>)
    return {static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
  if (magnitude >= 0x47800000u) return get<To>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal
    const float units = std::bit_cast<float>(magnitude) * 16777216.0F;
    return get<To>(sign | static_cast<u32>(std::nearbyint(units)));
  }
  const u32 rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return get<To>(sign | (rounded - (112u << 23)) >> 13);
}

template <class T>
auto wide(T value) {
  if constexpr (is_half<T>)
    return to_float(value);
  else
    return value;
}

/// .ftz: subnormal inputs and results are zeros of their sign.
inline float flush(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0F, value) : value;
}

}  // namespace ringcomm::ptx
