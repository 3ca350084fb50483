#pragma once

#include "kernels/common/elements.h"

// The conversions of kernels/common/elements.h for which GPUs have instructions, with their bits.

namespace ringcomm::cuda {

inline std::uint16_t fp32_to_bfloat16(float value) {
  const auto bits = bits_as<std::uint32_t>(quiet(value));
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline std::uint32_t fp32_to_bfloat16s(float low, float high) {
  return fp32_to_bfloat16(low) | std::uint32_t{fp32_to_bfloat16(high)} << 16;
}

inline float float16_to_fp32(std::uint16_t half) {
  const std::uint32_t shifted = (half & 0x7fffu) << 13;
  const std::uint32_t exponent = shifted & 0x0f800000u;
  const std::uint32_t sign = (half & 0x8000u) << 16;
  if (exponent == 0) {
    const float magnitude = bits_as<float>(shifted + (113u << 23)) - bits_as<float>(113u << 23);
    return bits_as<float>(bits_as<std::uint32_t>(magnitude) | sign);
  }
  const std::uint32_t bias = (112u << 23) + (exponent == 0x0f800000u ? 112u << 23 : 0u);
  return bits_as<float>((shifted + bias) | sign);
}
inline std::uint16_t fp32_to_float16(float value) {
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
}
inline std::uint32_t fp32_to_float16s(float low, float high) {
  return fp32_to_float16(low) | std::uint32_t{fp32_to_float16(high)} << 16;
}

}  // namespace ringcomm::cuda
