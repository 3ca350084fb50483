#pragma once

// The passes over weights and their gradients, written once and compiled for each level by its own
// source file (see kernels/common/simd.h for the rules).

#include "kernels/common/float_vectors.h"

// Below the target pragma.
#include "kernels/updates/stochastic_rounding.h"

namespace ringcomm::cpu {
namespace {

// ---- formats: how a vector of weights, or its first `num`, becomes fp32, and how fp32 is written
// ---- back

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

  [[gnu::always_inline]] static Fp32 load(const WeightJob& job, std::size_t i, std::size_t num) {
    return Array::load(job.weight + i * kElementBytes, num);
  }
  [[gnu::always_inline]] static void store(const WeightJob& job, std::size_t i, std::size_t num,
                                           const Fp32& v, std::uint32_t) {
    Array::store(job.weight + i * kElementBytes, v, num);
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
  [[gnu::always_inline]] static void store(const WeightJob& job, std::size_t i, std::size_t num,
                                           const Fp32& v, std::uint32_t key) {
    const Word random = rounding_bits_from(key, job.first_elem + i);
    const Word cut = (bits_as<Word>(canonical_nan<float>(v)) + random) >> 16;
    store_bytes(job.weight + i * kElementBytes, __builtin_convertvector(cut, HalfWord),
                num * kElementBytes);
  }
};

/// The lower half of the bits as a signed number is what the upper one, rounded, lacks.
struct SplitPlace {
  static constexpr std::size_t kElementBytes = 2;

  [[gnu::always_inline]] static Fp32 load(const WeightJob& job, std::size_t i, std::size_t num) {
    const std::size_t offset = i * kElementBytes, num_bytes = num * kElementBytes;
    const auto high = load_bytes<HalfWord>(job.weight + offset, num_bytes);
    const auto low = load_bytes<HalfVec<std::int16_t>>(job.low + offset, num_bytes);
    return bits_as<Fp32>((__builtin_convertvector(high, Word) << 16) +
                         bits_as<Word>(__builtin_convertvector(low, Vec<std::int32_t>)));
  }
  [[gnu::always_inline]] static void store(const WeightJob& job, std::size_t i, std::size_t num,
                                           const Fp32& v, std::uint32_t) {
    const std::size_t offset = i * kElementBytes, num_bytes = num * kElementBytes;
    const Word bits = bits_as<Word>(canonical_nan<float>(v));
    store_bytes(job.weight + offset, __builtin_convertvector((bits + 0x8000u) >> 16, HalfWord),
                num_bytes);
    store_bytes(job.low + offset, __builtin_convertvector(bits & 0xffffu, HalfWord), num_bytes);
  }
};

// The elements of one fp32 sum: 8 elements per lane and a tree of 6 steps, with an error of at most
// 9e-7.
constexpr std::size_t kSquaresBlock = 8 * kSumLanes;

template <class Grad>
[[gnu::always_inline]] inline Fp32 gradient_of(const WeightStep& s, const char* grad,
                                               std::size_t num) {
  return clamped(Grad::load(grad, num) * s.scale, s.clip_value);
}

template <class Grad>
[[gnu::always_inline]] inline Fp32 update_of(const WeightStep& s, const WeightJob& job,
                                             std::size_t i, std::size_t num) {
  const Fp32 grad = gradient_of<Grad>(s, job.grad + i * Grad::kElementBytes, num);
  if (job.col_factor == nullptr) return grad;
  return grad * job.row_factor * Float32Array::load(job.col_factor + i * sizeof(float), num);
}

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
                                                 std::size_t i, std::size_t num = kLanes) {
  const Fp32 update = update_of<Grad>(s, job, i, num);
  const Fp32 weight = descended(Place::load(job, i, num), update, s.lr_minus, s.decay);
  Place::store(job, i, num, weight, s.key);
}

template <class Place, class Grad>
void update_weights(const WeightStep& step, const WeightRun& run) {
  // Copies, because the compiler must assume that stores alias the originals.
  const WeightStep s = step;
  const WeightJob job = job_of(run);
  const std::size_t num_elems = run.num_elems;
  std::size_t i = 0;
  for (; num_elems - i >= kLanes; i += kLanes) update_vector<Place, Grad>(s, job, i);
  if (i < num_elems) update_vector<Place, Grad>(s, job, i, num_elems - i);
}

// Masks the lanes without an element: an infinite factor would turn their zeros into NaN.
[[gnu::always_inline]] inline Fp32 first_lanes(const Fp32& v, std::size_t num_lanes) {
  if (num_lanes == kLanes) return v;
  Fp32 kept = {};
  for (std::size_t lane = 0; lane < num_lanes; ++lane) kept[lane] = v[lane];
  return kept;
}

/// Adds the squares of a vector, element `begin + i` of the run and `i` of the sums.
template <class Place, class Grad>
[[gnu::always_inline]] inline void square_vector(const WeightStep& s, const WeightJob& job,
                                                 std::size_t begin, std::size_t i, Partial& updates,
                                                 Partial& weights, std::size_t num = kLanes) {
  const Fp32 update = update_of<Grad>(s, job, begin + i, num);
  const Fp32 weight = Place::load(job, begin + i, num);
  updates.add(i, first_lanes(update * update, num));
  weights.add(i, weight * weight);
}

template <class Place, class Grad>
RunSquares squares_of(const WeightStep& step, const WeightRun& run) {
  const WeightStep s = step;
  const WeightJob job = job_of(run);
  RunSquares sums;
  for (std::size_t begin = 0; begin < run.num_elems; begin += kSquaresBlock) {
    const std::size_t left = run.num_elems - begin;
    const std::size_t num_elems = left < kSquaresBlock ? left : kSquaresBlock;
    Partial updates = {}, weights = {};
    std::size_t i = 0;
    for (; num_elems - i >= kLanes; i += kLanes)
      square_vector<Place, Grad>(s, job, begin, i, updates, weights);
    if (i < num_elems)
      square_vector<Place, Grad>(s, job, begin, i, updates, weights, num_elems - i);
    sums.update += updates.total();
    sums.weight += weights.total();
  }
  return sums;
}

/// Returns the squares of a vector, and adds them to the sums `to`.
template <class Grad>
[[gnu::always_inline]] inline Fp32 squares_to(const WeightStep& s, const char* from, char* to,
                                              std::size_t num = kLanes) {
  const Fp32 value = gradient_of<Grad>(s, from, num);
  const Fp32 squares = first_lanes(value * value, num);
  store_bytes(to, load_bytes<Fp32>(to, num * sizeof(float)) + squares, num * sizeof(float));
  return squares;
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
    for (; end - i >= kLanes; i += kLanes)
      partial.add(i, squares_to<Grad>(s, from + i * Grad::kElementBytes, to + i * sizeof(float)));
    if (i < end)
      partial.add(
          i, squares_to<Grad>(s, from + i * Grad::kElementBytes, to + i * sizeof(float), end - i));
    sum += partial.total();
  }
  return sum;
}

template <class Grad>
[[gnu::always_inline]] inline void add_to(const char* from, char* to, std::size_t num = kLanes) {
  const Fp32 sum = load_bytes<Fp32>(to, num * sizeof(float)) + Grad::load(from, num);
  store_bytes(to, sum, num * sizeof(float));
}

template <class Grad>
void add(const void* grad, std::size_t num_elems, float* sums) {
  const char* from = static_cast<const char*>(grad);
  char* to = reinterpret_cast<char*>(sums);
  std::size_t i = 0;
  for (; num_elems - i >= kLanes; i += kLanes)
    add_to<Grad>(from + i * Grad::kElementBytes, to + i * sizeof(float));
  if (i < num_elems)
    add_to<Grad>(from + i * Grad::kElementBytes, to + i * sizeof(float), num_elems - i);
}

}  // namespace
}  // namespace ringcomm::cpu
