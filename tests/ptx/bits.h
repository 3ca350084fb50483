#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "ptx/memory.h"

/// Instructions on bits: logic, shifts, fields, bytes, counts.
namespace ringcomm::ptx {

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

}  // namespace ringcomm::ptx
