// The passes over weights of every format: updates to the last bit against one element at a time by
// the C library, sums of squares against double; with the same bits at every SIMD level.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/common/tables.h"
#include "kernels/common/types.h"
#include "kernels/updates/stochastic_rounding.h"
#include "kernels/updates/weight_update.h"
#include "operator_case.h"
#include "reduce_oracle.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using cpu::Kernels;
using oracle::Bytes;

// Nothing; a tail alone; around one vector of every width; around a block of sums; several.
constexpr std::size_t kSizes[] = {0, 1, 3, 4, 5, 8, 15, 16, 17, 511, 512, 513, 1031};
constexpr std::size_t kMaxElems = 1031;
constexpr std::uint64_t kSeed = (std::uint64_t{5} << 40) + 77;
// The lower half of the elements' numbers runs over within a vector.
constexpr std::uint64_t kFirstElem = (std::uint64_t{1} << 32) - 21;

constexpr WeightFormat kFormats[] = {WeightFormat::kFloat32, WeightFormat::kFloat16,
                                     WeightFormat::kBFloat16, WeightFormat::kStochastic,
                                     WeightFormat::kSplit};

// ---- the oracle, one element at a time

std::uint32_t bits_of(float value) {
  if (std::isnan(value)) return 0x7fc00000;
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::uint32_t mixed(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  return x ^ (x >> 16);
}

std::uint32_t random_bits(std::uint64_t seed, std::uint64_t elem) {
  const std::uint32_t key =
      mixed(static_cast<std::uint32_t>(seed) + 0x9e3779b9) ^ static_cast<std::uint32_t>(seed >> 32);
  return mixed(mixed(static_cast<std::uint32_t>(elem) ^ key) +
               static_cast<std::uint32_t>(elem >> 32)) >>
         16;
}

DType dtype_of(WeightFormat format) {
  return format == WeightFormat::kFloat32   ? DType::kFloat32
         : format == WeightFormat::kFloat16 ? DType::kFloat16
                                            : DType::kBFloat16;
}

/// Weights, their low halves and gradients, as bytes.
struct Operands {
  WeightFormat format;
  DType grad_dtype;
  Bytes weight, grad;
  std::vector<std::int16_t> low;
  Floats col_factor;
  float row_factor = 1;

  float weight_at(std::size_t i) const {
    if (format != WeightFormat::kSplit) return decoded(weight, i, dtype_of(format));
    return float_of((std::uint32_t{oracle::element<std::uint16_t>(weight, i)} << 16) +
                    static_cast<std::uint32_t>(std::int32_t{low[i]}));
  }

  float update_at(const WeightStep& step, std::size_t i) const {
    float update = decoded(grad, i, grad_dtype) * step.scale;
    if (update > step.clip_value) update = step.clip_value;
    if (update < -step.clip_value) update = -step.clip_value;
    return col_factor.empty() ? update : update * row_factor * col_factor[i];
  }

  void put(std::size_t i, float value) {
    const std::uint32_t bits = bits_of(value);
    if (format == WeightFormat::kFloat32) return void(std::memcpy(weight.data() + i * 4, &bits, 4));
    std::uint16_t half = 0;
    if (format == WeightFormat::kFloat16 || format == WeightFormat::kBFloat16)
      half = oracle::format_of(dtype_of(format)).encode(float_of(bits));
    else if (format == WeightFormat::kStochastic)
      half = static_cast<std::uint16_t>((bits + random_bits(kSeed, kFirstElem + i)) >> 16);
    else
      half = static_cast<std::uint16_t>((bits + 0x8000) >> 16);
    std::memcpy(weight.data() + i * 2, &half, 2);
    if (format == WeightFormat::kSplit) low[i] = static_cast<std::int16_t>(bits & 0xffff);
  }

  WeightRun run(std::size_t num_elems) {
    return {.weight = weight.data(),
            .low = format == WeightFormat::kSplit ? low.data() : nullptr,
            .grad = grad.data(),
            .col_factor = col_factor.empty() ? nullptr : col_factor.data(),
            .row_factor = row_factor,
            .first_elem = kFirstElem,
            .num_elems = num_elems};
  }

  bool operator==(const Operands& other) const {
    return weight == other.weight && grad == other.grad && low == other.low;
  }
};

Operands operands(WeightFormat format, DType grad_dtype, bool has_factors, bool has_special) {
  std::mt19937 random(7);
  Floats weight = testing::random_floats(random, kMaxElems);
  Floats grad = testing::random_floats(random, kMaxElems);
  if (has_special) {
    testing::put_special(grad, 2);
    testing::put_special(weight, 6);
  }
  Operands x{.format = format,
             .grad_dtype = grad_dtype,
             .weight = encoded(weight, dtype_of(format)),
             .grad = encoded(grad, grad_dtype),
             .low = {},
             .col_factor = has_factors ? testing::random_floats(random, kMaxElems) : Floats{},
             .row_factor = has_factors ? 1.75F : 1.0F};
  for (std::size_t i = 0; i < kMaxElems; ++i) x.low.push_back(static_cast<std::int16_t>(random()));
  return x;
}

WeightStep step_of(bool is_clipped) {
  return {.scale = 0.7F,
          .clip_value = is_clipped ? 0.25F : std::numeric_limits<float>::infinity(),
          .lr_minus = -0.05F,
          .decay = 0.99F,
          .key = rounding_key(kSeed)};
}

/// Calls body(operands, index of their gradients' type) for every format and type.
template <class Body>
void for_all(bool has_special, const Body& body) {
  for (const WeightFormat format : kFormats)
    for (int grad_idx = 0; grad_idx < cpu::kNumFloatDTypes; ++grad_idx)
      for (const bool has_factors : {false, true}) {
        CAPTURE(static_cast<int>(format));
        CAPTURE(name_of(cpu::kFloatDTypes[grad_idx]));
        CAPTURE(has_factors);
        body(operands(format, cpu::kFloatDTypes[grad_idx], has_factors, has_special), grad_idx);
      }
}

const WeightOps& ops_of(const Kernels& kernels, const Operands& x, int grad_idx) {
  return kernels.weights[static_cast<int>(x.format)][grad_idx];
}

// ---- the cases

TEST_CASE("random bits are those of the formula") {
  // By numpy; see tests/python/ops/update_oracle.py.
  const struct {
    std::uint64_t seed, elem;
    std::uint32_t bits;
  } known[] = {{0, 0, 0x944f},
               {0, 1, 0xc67c},
               {1, 0, 0xd661},
               {kSeed, (std::uint64_t{1} << 32) + 3, 0xf551},
               {~std::uint64_t{0} >> 1, ~std::uint64_t{0}, 0x9594}};
  for (const auto& [seed, elem, bits] : known) {
    CHECK(random_bits(seed, elem) == bits);
    CHECK(rounding_bits<std::uint32_t>(rounding_key(seed), static_cast<std::uint32_t>(elem),
                                       static_cast<std::uint32_t>(elem >> 32)) == bits);
  }
}

TEST_CASE("updates of every size have the bits of the C library's, and touch no more") {
  for (const bool is_clipped : {false, true})
    for_all(true, [&](const Operands& before, int grad_idx) {
      const WeightStep step = step_of(is_clipped);
      for (const std::size_t num_elems : kSizes) {
        CAPTURE(num_elems);
        Operands expected = before;
        for (std::size_t i = 0; i < num_elems; ++i)
          expected.put(i, std::fmaf(before.update_at(step, i), step.lr_minus,
                                    before.weight_at(i) * step.decay));
        for (const Kernels* kernels : kernel_levels()) {
          Operands x = before;
          ops_of(*kernels, x, grad_idx).update(step, x.run(num_elems));
          CHECK(x == expected);
        }
      }
    });
}

TEST_CASE("weights rounded to nearest have the bits of the LOMO step of the fused update") {
  const UpdateSpec spec = {.lr = 0.05,
                           .weight_decay = 0.1,
                           .grad_scale = 0.7,
                           .coefficients = {0.25},
                           .step = 1,
                           .optimizer = Optimizer::kLomo};
  const UpdateScalars scalars = scalars_of(spec);
  const WeightStep step = {.scale = scalars.grad_scale,
                           .clip_value = scalars.clip_value,
                           .lr_minus = scalars.lr_minus,
                           .decay = scalars.decay};
  for_all(true, [&](const Operands& before, int grad_idx) {
    const bool is_plain =
        before.format != WeightFormat::kStochastic && before.format != WeightFormat::kSplit;
    if (!is_plain || !before.col_factor.empty()) return;
    Operands x = before, y = before;
    ops_of(cpu::kBaselineKernels, x, grad_idx).update(step, x.run(kMaxElems));
    cpu::kBaselineKernels.updates[static_cast<int>(spec.optimizer)][cpu::float_dtype_idx(
        dtype_of(y.format))][cpu::float_dtype_idx(y.grad_dtype)](
        scalars, {.param = y.weight.data(), .grad = y.grad.data()}, kMaxElems);
    CHECK(x == y);
  });
}

bool is_near(double actual, double expected) {
  return std::fabs(actual - expected) <= 1e-6 * expected;
}

TEST_CASE("sums of squares are those of double, with the same bits at every level") {
  for_all(false, [](Operands x, int grad_idx) {
    const WeightStep step = step_of(true);
    for (const std::size_t num_elems : kSizes) {
      CAPTURE(num_elems);
      RunSquares exact;
      for (std::size_t i = 0; i < num_elems; ++i) {
        exact.update += std::pow(x.update_at(step, i), 2);
        exact.weight += std::pow(static_cast<double>(x.weight_at(i)), 2);
      }
      const RunSquares first =
          ops_of(cpu::kBaselineKernels, x, grad_idx).squares(step, x.run(num_elems));
      CHECK(is_near(first.update, exact.update));
      CHECK(is_near(first.weight, exact.weight));
      for (const Kernels* kernels : kernel_levels()) {
        const RunSquares sums = ops_of(*kernels, x, grad_idx).squares(step, x.run(num_elems));
        CHECK(sums.update == first.update);
        CHECK(sums.weight == first.weight);
      }
    }
  });
}

TEST_CASE("gradients and their squares are added to what is there, and to no more") {
  for (int grad_idx = 0; grad_idx < cpu::kNumFloatDTypes; ++grad_idx)
    for (const std::size_t num_elems : kSizes) {
      CAPTURE(grad_idx);
      CAPTURE(num_elems);
      const WeightStep step = step_of(true);
      const Operands x =
          operands(WeightFormat::kFloat32, cpu::kFloatDTypes[grad_idx], false, false);
      Floats sums(kMaxElems, 0.5F), squares(kMaxElems, 0.5F);
      double exact = 0;
      for (std::size_t i = 0; i < num_elems; ++i) {
        const float update = x.update_at(step, i);
        sums[i] += decoded(x.grad, i, x.grad_dtype);
        squares[i] += update * update;
        exact += std::pow(update, 2);
      }
      for (const Kernels* kernels : kernel_levels()) {
        const GradOps& ops = kernels->grads[grad_idx];
        Floats actual(kMaxElems, 0.5F), actual_squares(kMaxElems, 0.5F);
        ops.add(x.grad.data(), num_elems, actual.data());
        CHECK(actual == sums);
        CHECK(
            is_near(ops.add_squares(step, x.grad.data(), num_elems, actual_squares.data()), exact));
        CHECK(actual_squares == squares);
      }
    }
}

TEST_CASE("gradients of other types have no update") {
  CHECK(cpu::float_dtype_idx(DType::kFloat64) < 0);
}

}  // namespace
