#pragma once

// The passes over weights and their gradients, written once and compiled for each level by its own
// source file (see kernels/common/simd.h for the rules).

#include "kernels/common/float_vectors.h"

// Below the target pragma.
#include "kernels/updates/stochastic_rounding.h"

namespace ringcomm::cpu {
namespace {

// ---- formats: how a vector of weights becomes fp32, and how fp32 is written back

/// A WeightRun as bytes.
struct WeightJob {
  char* weight;
  char* low;
  const char* grad;
  const char* col_factor;
  float row_factor;
  std::uint64_t first_elem;
};

template <class Array>
struct PlainPlace {
  static constexpr std::size_t kElementBytes = Array::kElementBytes;
  static constexpr bool kHasLow = false;

  [[gnu::always_inline]] static Fp32 load(const WeightJob& job, std::size_t i) {
    return Array::load(job.weight + i * kElementBytes);
  }
  [[gnu::always_inline]] static void store(const WeightJob& job, std::size_t i, const Fp32& v,
                                           std::uint32_t) {
    Array::store(job.weight + i * kElementBytes, v);
  }
};

/// The random bits of one vector's elements, starting with `first`.
[[gnu::always_inline]] inline Word rounding_bits_from(std::uint32_t key, std::uint64_t first) {
  Word elem_low = {};
  for (std::size_t lane = 0; lane < kLanes; ++lane) elem_low[lane] = static_cast<unsigned>(lane);
  const Word first_low = Word{} + static_cast<std::uint32_t>(first);
  elem_low = elem_low + first_low;
  // A comparison that holds is -1 in each bit: the lower half has run over.
  const Word carry = bits_as<Word>(elem_low < first_low);
  const Word elem_high = static_cast<std::uint32_t>(first >> 32) - carry;
  return rounding_bits<Word>(key, elem_low, elem_high);
}

/// Infinities have no bits below the upper 16, and the canonical NaN neither: nothing is carried.
struct StochasticPlace : PlainPlace<BFloat16Array> {
  [[gnu::always_inline]] static void store(const WeightJob& job, std::size_t i, const Fp32& v,
                                           std::uint32_t key) {
    const Word random = rounding_bits_from(key, job.first_elem + i);
    const Word cut = (bits_as<Word>(canonical_nan<float>(v)) + random) >> 16;
    store_bytes(job.weight + i * kElementBytes, __builtin_convertvector(cut, HalfWord));
  }
};

/// The lower half of the bits as a signed number is what the upper one, rounded, lacks.
struct SplitPlace {
  static constexpr std::size_t kElementBytes = 2;
  static constexpr bool kHasLow = true;

  [[gnu::always_inline]] static Fp32 load(const WeightJob& job, std::size_t i) {
    const auto high = load_bytes<HalfWord>(job.weight + i * kElementBytes);
    const auto low = load_bytes<HalfVec<std::int16_t>>(job.low + i * kElementBytes);
    return bits_as<Fp32>((__builtin_convertvector(high, Word) << 16) +
                         bits_as<Word>(__builtin_convertvector(low, Vec<std::int32_t>)));
  }
  [[gnu::always_inline]] static void store(const WeightJob& job, std::size_t i, const Fp32& v,
                                           std::uint32_t) {
    const Word bits = bits_as<Word>(canonical_nan<float>(v));
    store_bytes(job.weight + i * kElementBytes,
                __builtin_convertvector((bits + 0x8000u) >> 16, HalfWord));
    store_bytes(job.low + i * kElementBytes, __builtin_convertvector(bits & 0xffffu, HalfWord));
  }
};

// The elements of one fp32 sum: 8 elements per lane and a tree of 6 steps, with an error of at most
// 9e-7.
constexpr std::size_t kSquaresBlock = 8 * kSumLanes;

template <class Grad>
[[gnu::always_inline]] inline Fp32 gradient_of(const WeightStep& s, const char* grad) {
  return clamped(Grad::load(grad) * s.scale, s.clip_value);
}

template <class Grad>
[[gnu::always_inline]] inline Fp32 update_of(const WeightStep& s, const WeightJob& job,
                                             std::size_t i) {
  const Fp32 grad = gradient_of<Grad>(s, job.grad + i * Grad::kElementBytes);
  if (job.col_factor == nullptr) return grad;
  return grad * job.row_factor * load_bytes<Fp32>(job.col_factor + i * sizeof(float));
}

// Copies of the last elements, fewer than a vector, filled up with zeros.
template <class Place, class Grad>
struct Tail {
  [[gnu::always_inline]] Tail(const WeightJob& job, std::size_t i, std::size_t num_elems) {
    __builtin_memcpy(weight, job.weight + i * Place::kElementBytes,
                     num_elems * Place::kElementBytes);
    __builtin_memcpy(grad, job.grad + i * Grad::kElementBytes, num_elems * Grad::kElementBytes);
    if constexpr (Place::kHasLow) __builtin_memcpy(low, job.low + i * 2, num_elems * 2);
    if (job.col_factor != nullptr)
      __builtin_memcpy(col_factor, job.col_factor + i * sizeof(float), num_elems * sizeof(float));
    copy = {weight,         low,
            grad,           job.col_factor != nullptr ? col_factor : nullptr,
            job.row_factor, job.first_elem + i};
  }

  char weight[kVectorBytes] = {}, low[kVectorBytes] = {}, grad[kVectorBytes] = {},
       col_factor[kVectorBytes] = {};
  WeightJob copy;
};

[[gnu::always_inline]] inline WeightJob job_of(const WeightRun& run) {
  return {static_cast<char*>(run.weight),
          reinterpret_cast<char*>(run.low),
          static_cast<const char*>(run.grad),
          reinterpret_cast<const char*>(run.col_factor),
          run.row_factor,
          run.first_elem};
}

template <class Place, class Grad>
[[gnu::always_inline]] inline void update_vector(const WeightStep& s, const WeightJob& job,
                                                 std::size_t i) {
  const Fp32 update = update_of<Grad>(s, job, i);
  Place::store(job, i, descended(Place::load(job, i), update, s.lr_minus, s.decay), s.key);
}

template <class Place, class Grad>
void update_weights(const WeightStep& step, const WeightRun& run) {
  // Copies, because the compiler must assume that stores alias the originals.
  const WeightStep s = step;
  const WeightJob job = job_of(run);
  const std::size_t num_elems = run.num_elems;
  std::size_t i = 0;
  for (; num_elems - i >= kLanes; i += kLanes) update_vector<Place, Grad>(s, job, i);
  if (i == num_elems) return;
  const Tail<Place, Grad> tail(job, i, num_elems - i);
  update_vector<Place, Grad>(s, tail.copy, 0);
  __builtin_memcpy(job.weight + i * Place::kElementBytes, tail.weight,
                   (num_elems - i) * Place::kElementBytes);
  if constexpr (Place::kHasLow) __builtin_memcpy(job.low + i * 2, tail.low, (num_elems - i) * 2);
}

// Masks the lanes without an element: an infinite factor would turn their zeros into NaN.
[[gnu::always_inline]] inline Fp32 first_lanes(const Fp32& v, std::size_t num_lanes) {
  Fp32 kept = {};
  for (std::size_t lane = 0; lane < num_lanes; ++lane) kept[lane] = v[lane];
  return kept;
}

template <class Place, class Grad>
[[gnu::always_inline]] inline void square_vector(const WeightStep& s, const WeightJob& job,
                                                 std::size_t i, Fp32& of_updates,
                                                 Fp32& of_weights) {
  const Fp32 update = update_of<Grad>(s, job, i);
  const Fp32 weight = Place::load(job, i);
  of_updates = update * update;
  of_weights = weight * weight;
}

template <class Place, class Grad>
RunSquares squares_of(const WeightStep& step, const WeightRun& run) {
  const WeightStep s = step;
  const WeightJob job = job_of(run);
  RunSquares sums;
  Fp32 of_updates, of_weights;
  for (std::size_t begin = 0; begin < run.num_elems; begin += kSquaresBlock) {
    const std::size_t left = run.num_elems - begin;
    const std::size_t num_elems = left < kSquaresBlock ? left : kSquaresBlock;
    Partial updates = {}, weights = {};
    std::size_t i = 0;
    for (; num_elems - i >= kLanes; i += kLanes) {
      square_vector<Place, Grad>(s, job, begin + i, of_updates, of_weights);
      updates.add(i, of_updates);
      weights.add(i, of_weights);
    }
    if (i < num_elems) {
      const Tail<Place, Grad> tail(job, begin + i, num_elems - i);
      square_vector<Place, Grad>(s, tail.copy, 0, of_updates, of_weights);
      updates.add(i, first_lanes(of_updates, num_elems - i));
      weights.add(i, of_weights);
    }
    sums.update += updates.total();
    sums.weight += weights.total();
  }
  return sums;
}

template <class Grad>
double add_squares(const WeightStep& step, const void* grad, std::size_t num_elems,
                   float* col_sums) {
  const WeightStep s = step;
  const char* from = static_cast<const char*>(grad);
  char* to = reinterpret_cast<char*>(col_sums);
  double sum = 0;
  for (std::size_t begin = 0; begin < num_elems; begin += kSquaresBlock) {
    const std::size_t left = num_elems - begin;
    const std::size_t end = begin + (left < kSquaresBlock ? left : kSquaresBlock);
    Partial partial = {};
    std::size_t i = begin;
    for (; end - i >= kLanes; i += kLanes) {
      const Fp32 value = gradient_of<Grad>(s, from + i * Grad::kElementBytes);
      const Fp32 square = value * value;
      partial.add(i, square);
      store_bytes(to + i * sizeof(float), load_bytes<Fp32>(to + i * sizeof(float)) + square);
    }
    if (i < end) {
      char rest[kVectorBytes] = {};
      __builtin_memcpy(rest, from + i * Grad::kElementBytes, (end - i) * Grad::kElementBytes);
      const Fp32 value = gradient_of<Grad>(s, rest);
      const Fp32 square = first_lanes(value * value, end - i);
      partial.add(i, square);
      for (std::size_t lane = 0; lane < end - i; ++lane) col_sums[i + lane] += square[lane];
    }
    sum += partial.total();
  }
  return sum;
}

template <class Grad>
void add(const void* grad, std::size_t num_elems, float* sums) {
  const char* from = static_cast<const char*>(grad);
  char* to = reinterpret_cast<char*>(sums);
  std::size_t i = 0;
  for (; num_elems - i >= kLanes; i += kLanes)
    store_bytes(to + i * sizeof(float), load_bytes<Fp32>(to + i * sizeof(float)) +
                                            Grad::load(from + i * Grad::kElementBytes));
  if (i == num_elems) return;
  char rest[kVectorBytes] = {};
  __builtin_memcpy(rest, from + i * Grad::kElementBytes, (num_elems - i) * Grad::kElementBytes);
  const Fp32 values = Grad::load(rest);
  for (std::size_t lane = 0; lane < num_elems - i; ++lane) sums[i + lane] += values[lane];
}

}  // namespace
}  // namespace ringcomm::cpu
