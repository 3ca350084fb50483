#pragma once

// The passes over a row of logits, written once and compiled for each level by its own source file
// (see kernels/common/simd.h for the rules).
//
// A row is read once, in blocks that stay in the L1 cache as fp32: converted, scaled and capped
// there, and passed over twice (the largest, then the exponentials).

#include "kernels/common/float_vectors.h"

namespace ringcomm::cpu {
namespace {

// 4 KiB of fp32. Half or twice as much changes nothing measurable.
constexpr std::size_t kBlockElems = 1024;
constexpr float kInfinity = __builtin_inff();

[[gnu::always_inline]] inline Fp32 larger(const Fp32& a, const Fp32& b) { return a > b ? a : b; }

/// e^x for x <= 0 within about an ulp; 0 where that is less than the smallest normal number. NaN
/// stays.
///
/// x = k ln 2 + r with |r| <= ln 2 / 2, and e^r by the polynomial of Cephes' expf. Adding 1.5 *
/// 2^23 rounds to a whole number and leaves it in the low bits, which are shifted into the
/// exponent.
[[gnu::always_inline]] inline Fp32 exp_of(const Fp32& x) {
  const Fp32 rounder = all(12582912.0F);
  const Fp32 shifted = multiply_add(x, all(1.44269504088896341F), rounder);
  const Fp32 k = shifted - rounder;
  Fp32 r = multiply_add(k, all(-0.693359375F), x);
  r = multiply_add(k, all(2.12194440e-4F), r);
  Fp32 p = multiply_add(all(1.9875691500e-4F), r, all(1.3981999507e-3F));
  p = multiply_add(p, r, all(8.3334519073e-3F));
  p = multiply_add(p, r, all(4.1665795894e-2F));
  p = multiply_add(p, r, all(1.6666665459e-1F));
  p = multiply_add(p, r, all(5.0000001201e-1F));
  p = multiply_add(p, r * r, r) + 1.0F;
  // Unsigned, because the sum wraps around where x is out of range.
  const Word scaled = bits_as<Word>(p) + (bits_as<Word>(shifted) << 23);
  const Fp32 lowest = all(-87.3365F);
  return x >= lowest ? bits_as<Fp32>(scaled) : (x < lowest ? Fp32{} : x);
}

/// e^-2|x|, from which tanh x and its derivative are computed.
[[gnu::always_inline]] inline Fp32 tanh_power(const Fp32& x) {
  return exp_of((x < 0.0F ? -x : x) * -2.0F);
}

/// tanh x: by a polynomial where 1 - e^-2|x| would cancel.
[[gnu::always_inline]] inline Fp32 tanh_of(const Fp32& x, const Fp32& power) {
  const Fp32 magnitude = x < 0.0F ? -x : x;
  const Fp32 large = (1.0F - power) / (1.0F + power);
  const Fp32 square = x * x;
  Fp32 p = multiply_add(all(-5.70498872745e-3F), square, all(2.06390887954e-2F));
  p = multiply_add(p, square, all(-5.37397155531e-2F));
  p = multiply_add(p, square, all(1.33314422036e-1F));
  p = multiply_add(p, square, all(-3.33332819422e-1F));
  const Fp32 small = multiply_add(p * square, x, x);
  return magnitude < 0.625F ? small : (x < 0.0F ? -large : large);
}

/// The derivative of tanh x, sech^2 x. 1 - tanh^2 x would cancel where x is large.
[[gnu::always_inline]] inline Fp32 tanh_slope(const Fp32& power) {
  const Fp32 sum = 1.0F + power;
  return 4.0F * power / (sum * sum);
}

struct alignas(64) Block {
  float z[kBlockElems];
};

/// One vector of a block.
[[gnu::always_inline]] inline Fp32 vector_of(const Block& block, std::size_t i) {
  return load_bytes<Fp32>(reinterpret_cast<const char*>(block.z + i));
}

/// Writes z of up to kBlockElems elements starting at `from`, padded with -infinity to a multiple
/// of kSumLanes; returns the number of kSumLanes. With a softcap, `slopes` receives the softcap's
/// derivatives unless it is null.
template <class Array>
[[gnu::always_inline]] inline std::size_t load_block(const LogitRow& row, const char* from,
                                                     std::size_t num_elems, Block& block,
                                                     Block* slopes = nullptr) {
  std::size_t i = 0;
  for (; num_elems - i >= kLanes; i += kLanes)
    store_bytes(reinterpret_cast<char*>(block.z + i), Array::load(from + i * Array::kElementBytes));
  const std::size_t padded = (num_elems + kSumLanes - 1) / kSumLanes * kSumLanes;
  if (i < num_elems)
    store_bytes(reinterpret_cast<char*>(block.z + i),
                Array::load(from + i * Array::kElementBytes, num_elems - i));
  if (row.logit_scale != 1.0F)
    for (i = 0; i < num_elems; ++i) block.z[i] *= row.logit_scale;
  if (row.softcap != 0.0F) {
    for (i = 0; i < padded; i += kLanes) {
      const Fp32 x = vector_of(block, i) / row.softcap;
      const Fp32 power = tanh_power(x);
      store_bytes(reinterpret_cast<char*>(block.z + i), tanh_of(x, power) * row.softcap);
      if (slopes != nullptr) store_bytes(reinterpret_cast<char*>(slopes->z + i), tanh_slope(power));
    }
  }
  for (i = num_elems; i < padded; ++i) block.z[i] = -kInfinity;
  return padded;
}

/// Prefetches the lines after a block during its computation: the processor does not prefetch that
/// far, and would wait a third of the time. Past a row's end these are the next row's lines, or
/// unused.
template <class Array>
[[gnu::always_inline]] inline void prefetch(const char* block, std::size_t i) {
  const char* next = block + (kBlockElems + i) * Array::kElementBytes;
  for (std::size_t offset = 0; offset < kSumLanes * Array::kElementBytes; offset += 64)
    __builtin_prefetch(next + offset);
}

[[gnu::always_inline]] inline float largest_of(const Block& block, std::size_t padded) {
  Fp32 largest[kNumParts];
  for (std::size_t v = 0; v < kNumParts; ++v) largest[v] = all(-kInfinity);
  for (std::size_t i = 0; i < padded; i += kSumLanes)
    for (std::size_t v = 0; v < kNumParts; ++v)
      largest[v] = larger(vector_of(block, i + v * kLanes), largest[v]);
  for (std::size_t v = 1; v < kNumParts; ++v) largest[0] = larger(largest[v], largest[0]);
  float result = largest[0][0];
  for (std::size_t lane = 1; lane < kLanes; ++lane)
    result = largest[0][lane] > result ? largest[0][lane] : result;
  return result;
}

/// Sums relative to a smaller maximum become those relative to a larger one. There is nothing to
/// change before the first logit.
[[gnu::always_inline]] inline void raise_max(float from, float to, bool wants_more, Partial& sum,
                                             Partial& entropy) {
  if (from == -kInfinity) return;
  const Fp32 distance = all(from - to);
  const Fp32 factor = exp_of(distance);
  for (std::size_t v = 0; v < kNumParts; ++v) {
    // For the lowest fp32 logits, which masks use, sum * distance would be -infinity, and 0 times
    // it NaN.
    if (wants_more)
      entropy.part[v] =
          factor == 0.0F ? Fp32{} : factor * multiply_add(sum.part[v], distance, entropy.part[v]);
    sum.part[v] = sum.part[v] * factor;
  }
}

template <class Array, bool kWantsMore>
[[gnu::always_inline]] inline void add_exponentials(const char* from, const Block& block,
                                                    std::size_t padded, float max, Partial& sum,
                                                    Partial& entropy) {
  // If all logits so far are -infinity, their distance to the largest is undefined.
  const Fp32 reference = all(max == -kInfinity ? 0.0F : max);
  for (std::size_t i = 0; i < padded; i += kSumLanes) {
    prefetch<Array>(from, i);
    for (std::size_t v = 0; v < kNumParts; ++v) {
      const Fp32 distance = vector_of(block, i + v * kLanes) - reference;
      const Fp32 power = exp_of(distance);
      sum.part[v] = sum.part[v] + power;
      if (kWantsMore)  // 0 times -infinity is 0 here
        entropy.part[v] = entropy.part[v] + (power == 0.0F ? Fp32{} : power * distance);
    }
  }
}

/// Changes the block.
[[gnu::always_inline]] inline float weighted_sum(const float* weight, std::size_t num_elems,
                                                 std::size_t padded, Block& block) {
  Partial weighted = {};
  for (std::size_t i = num_elems; i < padded; ++i) block.z[i] = 0;
  if (weight != nullptr)
    for (std::size_t i = 0; i < num_elems; ++i) block.z[i] *= weight[i];
  for (std::size_t i = 0; i < padded; i += kSumLanes)
    for (std::size_t v = 0; v < kNumParts; ++v)
      weighted.part[v] = weighted.part[v] + vector_of(block, i + v * kLanes);
  return weighted.total();
}

template <class Array>
[[gnu::always_inline]] inline std::int32_t first_index_of(const LogitRow& row, float max,
                                                          std::size_t begin, Block& block) {
  const std::size_t left = row.num_elems - begin;
  const std::size_t num_elems = left < kBlockElems ? left : kBlockElems;
  load_block<Array>(row, static_cast<const char*>(row.logits) + begin * Array::kElementBytes,
                    num_elems, block);
  for (std::size_t i = 0; i < num_elems; ++i)
    if (block.z[i] == max) return static_cast<std::int32_t>(begin + i);
  return 0;
}

template <class Array>
SoftmaxStats stats_of(const LogitRow& given) {
  const LogitRow row = given;  // a copy: stores could change it, for all that the compiler knows
  Block block;
  Partial sum = {}, entropy = {};
  double weighted = 0;  // of logits around 1e4, whose sum is a million times what the loss needs
  SoftmaxStats stats = kNoLogits;
  std::size_t max_begin = 0;
  for (std::size_t begin = 0; begin < row.num_elems; begin += kBlockElems) {
    const std::size_t left = row.num_elems - begin;
    const std::size_t num_elems = left < kBlockElems ? left : kBlockElems;
    const char* from = static_cast<const char*>(row.logits) + begin * Array::kElementBytes;
    const std::size_t padded = load_block<Array>(row, from, num_elems, block);
    const float largest = largest_of(block, padded);
    if (largest > stats.max) {
      raise_max(stats.max, largest, row.wants_more, sum, entropy);
      stats.max = largest;
      max_begin = begin;
    }
    if (row.wants_more)
      add_exponentials<Array, true>(from, block, padded, stats.max, sum, entropy);
    else
      add_exponentials<Array, false>(from, block, padded, stats.max, sum, entropy);
    const std::int64_t target = row.target_idx - static_cast<std::int64_t>(begin);
    if (row.target_idx >= 0 && target >= 0 && target < static_cast<std::int64_t>(num_elems))
      stats.target = block.z[target];
    if (row.wants_weighted)
      weighted += weighted_sum(row.weight != nullptr ? row.weight + begin : nullptr, num_elems,
                               padded, block);
  }
  stats.sum = sum.total();
  stats.weighted = static_cast<float>(weighted);
  stats.entropy = entropy.total();
  if (row.wants_more && row.num_elems > 0)
    stats.argmax = first_index_of<Array>(row, stats.max, max_begin, block);
  return stats;
}

/// The gradients of a block's logits, in place of z. `target` is in the block, or negative;
/// `slopes` as load_block() has filled it.
template <class Array>
[[gnu::always_inline]] inline void differentiate(const LogitRow& row, const LogitGrad& grad,
                                                 const char* from, const float* weight,
                                                 std::int64_t target, std::size_t num_elems,
                                                 Block& block, const Block& slopes) {
  float target_part = 0;
  if (target >= 0)
    target_part = grad.target * ((row.softcap != 0.0F ? slopes.z[target] : 1.0F) * row.logit_scale);
  for (std::size_t i = 0; i < num_elems; i += kLanes) {
    if (i % kSumLanes == 0) prefetch<Array>(from, i);
    const Fp32 z = vector_of(block, i);
    Fp32 result = exp_of(z - grad.max) * grad.prob;
    if (grad.smooth != 0.0F) {
      Fp32 weights = all(1.0F);
      const std::size_t left = num_elems - i;
      if (weight != nullptr)
        __builtin_memcpy(&weights, weight + i, (left < kLanes ? left : kLanes) * sizeof(float));
      result = result - weights * grad.smooth;
    }
    if (row.softcap != 0.0F) result = result * vector_of(slopes, i);
    store_bytes(reinterpret_cast<char*>(block.z + i), result * row.logit_scale);
  }
  if (target >= 0) block.z[target] -= target_part;
}

/// Stores a block as the logits' type, the last vector in part.
template <class Array>
[[gnu::always_inline]] inline void store_block(const Block& block, std::size_t num_elems,
                                               char* to) {
  std::size_t i = 0;
  for (; num_elems - i >= kLanes; i += kLanes)
    Array::store(to + i * Array::kElementBytes, vector_of(block, i));
  if (i < num_elems)
    Array::store(to + i * Array::kElementBytes, vector_of(block, i), num_elems - i);
}

template <class Array>
void grad_of(const LogitRow& given, const LogitGrad& given_grad, void* to) {
  const LogitRow row = given;
  const LogitGrad grad = given_grad;
  Block block, slopes;
  for (std::size_t begin = 0; begin < row.num_elems; begin += kBlockElems) {
    const std::size_t left = row.num_elems - begin;
    const std::size_t num_elems = left < kBlockElems ? left : kBlockElems;
    const std::size_t offset = begin * Array::kElementBytes;
    const char* from = static_cast<const char*>(row.logits) + offset;
    load_block<Array>(row, from, num_elems, block, &slopes);
    const std::int64_t target = row.target_idx - static_cast<std::int64_t>(begin);
    const bool is_here =
        row.target_idx >= 0 && target >= 0 && target < static_cast<std::int64_t>(num_elems);
    differentiate<Array>(row, grad, from, row.weight != nullptr ? row.weight + begin : nullptr,
                         is_here ? target : -1, num_elems, block, slopes);
    store_block<Array>(block, num_elems, static_cast<char*>(to) + offset);
  }
}

}  // namespace
}  // namespace ringcomm::cpu
