#pragma once

// float16 <-> fp32 in integer arithmetic, for levels without instructions for it. Exact for every
// input, subnormals, infinities and NaN included. One vector of memory becomes two of fp32: the
// even elements and the odd ones, which needs no shuffles.

#include "reduce/vectors.h"

namespace ringcomm::host {
namespace {

// Comparisons are of signed integers, which SSE2 has; none of the values reaches the sign bit.
using Bits = Vec<std::int32_t>;

[[gnu::always_inline]] inline Bits all_lanes(std::int32_t value) { return Bits{} + value; }

// `half` holds a float16 in the low 16 bits of each lane.
[[gnu::always_inline]] inline Vec<float> float16_to_fp32(const Bits& half) {
  const Bits shifted = (half & 0x7fff) << 13;
  const Bits exponent = shifted & 0x0f800000;
  // The bias changes from 15 to 127. For infinities and NaN another 112 is added, because their
  // exponent changes from 31 to 255.
  const Bits normal = shifted + (112 << 23) + ((exponent == 0x0f800000) & (112 << 23));
  // A subnormal is its mantissa times 2^-24. With the exponent of 2^-14 in front the mantissa
  // counts just that, and taking 2^-14 away leaves the value, exactly.
  const Bits two_to_minus_14 = all_lanes(113 << 23);
  const Vec<float> subnormal =
      bits_as<Vec<float>>(shifted + two_to_minus_14) - bits_as<Vec<float>>(two_to_minus_14);
  const Bits magnitude = exponent == 0 ? bits_as<Bits>(subnormal) : normal;
  // The sign is shifted as unsigned: a signed shift into the sign bit is an overflow to the
  // sanitizer.
  const auto sign = (bits_as<Vec<std::uint32_t>>(half) & 0x8000u) << 16;
  return bits_as<Vec<float>>(magnitude | bits_as<Bits>(sign));
}

// Rounds to nearest even; the inverse of the above. The result is in the low 16 bits of each lane.
[[gnu::always_inline]] inline Bits fp32_to_float16(const Vec<float>& value) {
  const Bits magnitude = bits_as<Bits>(value) & 0x7fffffff;
  const Bits sign = (bits_as<Bits>(value) >> 16) & 0x8000;
  // Values of 65536 and more, including infinity and NaN, are rounded like 65536 and become
  // infinity.
  const Bits limit = all_lanes(143 << 23);
  const Bits limited = magnitude < limit ? magnitude : limit;
  // Rounds by adding just under half of the last kept bit, or exactly half if that bit is odd. A
  // carry propagates into the exponent, up to infinity.
  const Bits normal = (limited - (112 << 23) + 0xfff + ((limited >> 13) & 1)) >> 13;
  // Below 2^-14 the last kept bit is 2^-24, which is that of a float in [0.5, 1): adding 0.5 makes
  // the processor round there, and taking the bits of 0.5 away leaves the count.
  const Bits half = all_lanes(126 << 23);
  const Bits subnormal =
      bits_as<Bits>(bits_as<Vec<float>>(magnitude) + bits_as<Vec<float>>(half)) - half;
  const Bits quiet = (magnitude > (255 << 23)) & 0x200;
  return sign | quiet | (magnitude < (113 << 23) ? subnormal : normal);
}

[[gnu::always_inline]] inline Accumulator<float, 2> widen_float16(const char* from) {
  const auto pairs = load_bytes<Vec<std::uint32_t>>(from);
  return {{float16_to_fp32(bits_as<Bits>(pairs & 0xffffu)),
           float16_to_fp32(bits_as<Bits>(pairs >> 16))}};
}

[[gnu::always_inline]] inline Vec<std::uint32_t> narrow_float16(const Accumulator<float, 2>& acc) {
  using Packed = Vec<std::uint32_t>;
  return bits_as<Packed>(fp32_to_float16(acc.part[0])) |
         (bits_as<Packed>(fp32_to_float16(acc.part[1])) << 16);
}

}  // namespace
}  // namespace ringcomm::host
