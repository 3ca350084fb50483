#pragma once

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

#include "ptx/operands.h"

/// Arithmetic, comparisons and cvt.
namespace ringcomm::ptx {

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
