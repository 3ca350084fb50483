#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

#include "ptx/types.h"

namespace ringcomm::ptx {

// ---- types of operands

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

// ---- arithmetic

/// Results of 32 bits that are NaN have the bits of a GPU's.
template <class T>
T canonical(T value) {
  if constexpr (std::is_same_v<T, float>)
    return value == value ? value : std::bit_cast<float>(0x7fffffffu);
  else
    return value;
}

/// function(operands) for each half of a pair; 16-bit floats are computed as float and rounded.
template <class T, class F, class... More>
T each(const F& function, T a, More... more) {
  if constexpr (is_pair<T>)
    return {each(function, a.low, more.low...), each(function, a.high, more.high...)};
  else if constexpr (is_half<T>)
    return round_to<T>(static_cast<float>(function(wide(a), wide(more)...)));
  else
    return canonical(static_cast<T>(function(a, more...)));
}

/// Integers wrap.
template <class T, class F>
T each_wrapping(const F& function, T a, T b) {
  return each(
      [&](auto x, auto y) {
        using X = decltype(x);
        if constexpr (std::is_integral_v<X>)
          return static_cast<X>(function(static_cast<u64>(x), static_cast<u64>(y)));
        else
          return function(x, y);
      },
      a, b);
}
template <class T>
T add(T a, T b) {
  return each_wrapping(std::plus<>(), a, b);
}
template <class T>
T sub(T a, T b) {
  return each_wrapping(std::minus<>(), a, b);
}
template <class T>
T mul(T a, T b) {
  return each_wrapping(std::multiplies<>(), a, b);
}

template <class T>
using Wider = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, s32, u32>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, s64, u64>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;
template <class T>
Wider<T> mul_wide(T a, T b) {
  return static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b);
}
template <class T>
T mul_hi(T a, T b) {
  return static_cast<T>(mul_wide(a, b) >> (8 * sizeof(T)));
}

/// The product is exact in double for 16-bit floats.
template <class T>
T fma(T a, T b, T c) {
  if constexpr (is_pair<T>)
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
  else if constexpr (is_half<T>)
    return round_to<T>(static_cast<float>(double{wide(a)} * double{wide(b)} + double{wide(c)}));
  else
    return canonical(std::fma(a, b, c));
}

/// A division by zero gives all ones, as the hardware's code does; PTX leaves it open.
template <class T>
T div(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return b == 0 ? static_cast<T>(-1) : static_cast<T>(a / b);
  else
    return canonical(a / b);
}
template <class T>
T rem(T a, T b) {
  return b == 0 ? a : static_cast<T>(a % b);
}

template <class T>
bool is_nan(T value) {
  return value != value;
}
/// -0 is less than +0, and a number is preferred to NaN.
template <class T>
T lesser(T a, T b) {
  if (is_nan(a)) return b;
  if (is_nan(b)) return a;
  if constexpr (std::is_floating_point_v<T>)
    if (a == b) return std::signbit(a) ? a : b;
  return b < a ? b : a;
}
template <class T>
T greater(T a, T b) {
  if (is_nan(a)) return b;
  if (is_nan(b)) return a;
  if constexpr (std::is_floating_point_v<T>)
    if (a == b) return std::signbit(a) ? b : a;
  return a < b ? b : a;
}
template <class T>
T min(T a, T b) {
  return each([](auto x, auto y) { return lesser(x, y); }, a, b);
}
template <class T>
T max(T a, T b) {
  return each([](auto x, auto y) { return greater(x, y); }, a, b);
}
/// .NaN: one NaN makes the result NaN.
template <class T>
T min_nan(T a, T b) {
  return each([](auto x, auto y) { return is_nan(x) ? x : is_nan(y) ? y : lesser(x, y); }, a, b);
}
template <class T>
T max_nan(T a, T b) {
  return each([](auto x, auto y) { return is_nan(x) ? x : is_nan(y) ? y : greater(x, y); }, a, b);
}

template <class T>
T neg(T a) {
  if constexpr (is_pair<T>)
    return {neg(a.low), neg(a.high)};
  else if constexpr (is_half<T>)
    return {static_cast<u16>(a.bits ^ 0x8000u)};
  else if constexpr (std::is_floating_point_v<T>)
    return -a;
  else
    return sub(T{0}, a);
}
template <class T>
T abs(T a) {
  if constexpr (is_pair<T>)
    return {abs(a.low), abs(a.high)};
  else if constexpr (is_half<T>)
    return {static_cast<u16>(a.bits & 0x7fffu)};
  else if constexpr (std::is_floating_point_v<T>)
    return std::fabs(a);
  else
    return a < 0 ? neg(a) : a;
}
template <class T>
T copysign(T sign, T value) {
  return std::copysign(value, sign);
}

// Approximations of the hardware are computed exactly.
template <class T>
T rcp(T a) {
  return canonical(T{1} / a);
}
template <class T>
T sqrt(T a) {
  return canonical(std::sqrt(a));
}
template <class T>
T rsqrt(T a) {
  return canonical(T{1} / std::sqrt(a));
}
template <class T>
T ex2(T a) {
  return each([](auto x) { return std::exp2(x); }, a);
}
template <class T>
T lg2(T a) {
  return canonical(std::log2(a));
}
template <class T>
T tanh(T a) {
  return each([](auto x) { return std::tanh(x); }, a);
}
inline float sin(float a) { return canonical(std::sin(a)); }
inline float cos(float a) { return canonical(std::cos(a)); }

// ---- comparisons

/// False where an operand is NaN.
template <class T, class F>
bool ordered(const F& compare, T a, T b) {
  return !is_nan(wide(a)) && !is_nan(wide(b)) && compare(wide(a), wide(b));
}
/// True where an operand is NaN.
template <class T, class F>
bool unordered(const F& compare, T a, T b) {
  return is_nan(wide(a)) || is_nan(wide(b)) || compare(wide(a), wide(b));
}
struct Always {
  template <class T>
  bool operator()(T, T) const {
    return true;
  }
};
struct Never {
  template <class T>
  bool operator()(T, T) const {
    return false;
  }
};

// ---- bits

template <class T>
T bit_and(T a, T b) {
  return static_cast<T>(a & b);
}
template <class T>
T bit_or(T a, T b) {
  return static_cast<T>(a | b);
}
template <class T>
T bit_xor(T a, T b) {
  return static_cast<T>(a ^ b);
}
template <class T>
T bit_not(T a) {
  if constexpr (std::is_same_v<T, bool>)
    return !a;
  else
    return static_cast<T>(~a);
}

/// Shifts by more than the width give 0, or the sign.
template <class T>
T shl(T a, u32 num_bits) {
  return num_bits >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << num_bits);
}
template <class T>
T shr(T a, u32 num_bits) {
  if (num_bits >= 8 * sizeof(T)) return std::is_signed_v<T> && a < 0 ? static_cast<T>(-1) : T{0};
  return static_cast<T>(a >> num_bits);
}
/// Funnel shifts: the high word of high:low << n, or the low word of high:low >> n.
inline u32 shf_l(u32 low, u32 high, u32 num_bits) {
  return static_cast<u32>((u64{high} << 32 | low) << num_bits >> 32);
}
inline u32 shf_r(u32 low, u32 high, u32 num_bits) {
  return static_cast<u32>((u64{high} << 32 | low) >> num_bits);
}
inline u32 wrap(u32 num_bits) { return num_bits & 31; }
inline u32 clamp(u32 num_bits) { return std::min(num_bits, 32u); }

template <class T>
T bfi(T field, T into, u32 position, u32 length) {
  constexpr u32 kBits = 8 * sizeof(T);
  position &= 255;
  length = std::min(length & 255, position < kBits ? kBits - position : 0);
  if (length == 0) return into;
  const T ones = static_cast<T>(static_cast<T>(~T{0}) >> (kBits - length));
  return static_cast<T>((into & ~(ones << position)) | (field & ones) << position);
}
/// Bits beyond the highest are its sign bit, or zeros.
template <class T>
T bfe(T a, u32 position, u32 length) {
  constexpr u32 kBits = 8 * sizeof(T);
  position &= 255;
  length &= 255;
  T result = 0;
  const u32 highest = std::min(position + length - 1, kBits - 1);
  const bool sign = std::is_signed_v<T> && length != 0 && (a >> highest & 1) != 0;
  for (u32 i = 0; i < kBits; ++i) {
    const bool bit = i < length && position + i < kBits ? (a >> (position + i) & 1) != 0 : sign;
    result = static_cast<T>(result | static_cast<T>(bit) << i);
  }
  return result;
}
inline u32 prmt(u32 a, u32 b, u32 selectors) {
  const u64 bytes = u64{b} << 32 | a;
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 selector = selectors >> (4 * i) & 15;
    u32 byte = static_cast<u32>(bytes >> (8 * (selector & 7))) & 255;
    if ((selector & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;  // its sign
    result |= byte << (8 * i);
  }
  return result;
}
/// Bit (a, b, c) of the table for each bit of the operands.
inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 result = 0;
  for (u32 i = 0; i < 8; ++i)
    if ((table >> i & 1) != 0)
      result |= ((i & 4) != 0 ? a : ~a) & ((i & 2) != 0 ? b : ~b) & ((i & 1) != 0 ? c : ~c);
  return result;
}
template <class T>
u32 popc(T a) {
  return static_cast<u32>(std::popcount(a));
}
template <class T>
u32 clz(T a) {
  return static_cast<u32>(std::countl_zero(static_cast<std::make_unsigned_t<T>>(a)));
}
template <class T>
T brev(T a) {
  T result = 0;
  for (u32 i = 0; i < 8 * sizeof(T); ++i) result = static_cast<T>(result << 1 | (a >> i & 1));
  return result;
}

// ---- cvt

/// .rni, .rzi, .rmi and .rpi: to the nearest integer, to zero, down and up.
inline double rni(double a) { return std::nearbyint(a); }
inline double rzi(double a) { return std::trunc(a); }
inline double rmi(double a) { return std::floor(a); }
inline double rpi(double a) { return std::ceil(a); }

/// Integers saturate; NaN is 0.
template <class To>
To to_integer(double value) {
  if (is_nan(value)) return 0;
  if (value <= static_cast<double>(std::numeric_limits<To>::min()))
    return std::numeric_limits<To>::min();
  if (value >= static_cast<double>(std::numeric_limits<To>::max()))
    return std::numeric_limits<To>::max();
  return static_cast<To>(value);
}
template <class To, class From>
To cvt(From value) {
  if constexpr (is_half<To>)
    return round_to<To>(static_cast<float>(wide(value)));
  else
    return static_cast<To>(wide(value));
}
template <class To, class From>
To cvt_sat(From value) {
  if (std::cmp_less(value, std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (std::cmp_greater(value, std::numeric_limits<To>::max()))
    return std::numeric_limits<To>::max();
  return static_cast<To>(value);
}
template <class To>
To pack(float high, float low) {
  using Half = decltype(To::low);
  return {round_to<Half>(low), round_to<Half>(high)};
}

}  // namespace ringcomm::ptx
