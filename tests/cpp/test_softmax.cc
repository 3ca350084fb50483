// Stats and gradients of rows of logits against double, with bounds from the roundings on the way,
// and the same bits at every SIMD level. Of one file, since all cases use its oracle and its rows.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/common/tables.h"
#include "kernels/common/types.h"
#include "operator_case.h"
#include "reduce_oracle.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using cpu::Kernels;
using oracle::Bytes;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kUnit = 0x1p-24;      // a rounding of fp32, relative
constexpr double kSmallest = 1.2e-38;  // exponentials below the smallest normal number are 0
// Nothing; a tail; around the partial sums' lanes; around a block; several blocks and a tail.
constexpr std::size_t kSizes[] = {0, 1, 3, 63, 64, 65, 1023, 1024, 1025, 5000};

// ---- rows in memory

struct Options {
  float logit_scale = 1;
  float softcap = 0;
  bool has_weight = false;
  bool wants_weighted = false;
  bool wants_more = false;
};
const Options kPlain{};
const Options kAllOptions[] = {
    kPlain,
    {.wants_more = true},
    {.logit_scale = 0.3F, .wants_weighted = true, .wants_more = true},
    {.softcap = 7, .has_weight = true, .wants_weighted = true},
    {.logit_scale = -1.7F,
     .softcap = 30,
     .has_weight = true,
     .wants_weighted = true,
     .wants_more = true},
};

struct Row {
  Row(const Floats& given, DType type, const Options& given_options)
      : dtype(type), options(given_options) {
    std::mt19937 random(3);
    values = decoded(encoded(given, dtype), dtype);
    for (std::size_t i = 0; i < given.size(); ++i)
      weights.push_back(static_cast<float>(random() % 1000) / 250.0F);
  }
  LogitRow over(const void* logits) const {
    return {.logits = logits,
            .num_elems = values.size(),
            .weight = options.has_weight ? weights.data() : nullptr,
            .target_idx = target_idx,
            .logit_scale = options.logit_scale,
            .softcap = options.softcap,
            .wants_weighted = options.wants_weighted,
            .wants_more = options.wants_more};
  }
  float weight(std::size_t i) const { return options.has_weight ? weights[i] : 1.0F; }

  DType dtype;
  Options options;
  Floats values;
  Floats weights;
  std::int64_t target_idx = -1;
};

constexpr std::size_t kOffBytes = 1;  // off any alignment

SoftmaxStats stats_of(const Kernels& kernels, const Row& row) {
  Guarded logits(encoded(row.values, row.dtype), kOffBytes);
  return kernels.softmax[cpu::float_dtype_idx(row.dtype)].stats(row.over(logits.data()));
}

Bytes grad_of(const Kernels& kernels, const Row& row, const LogitGrad& grad, bool is_in_place) {
  const Bytes content = encoded(row.values, row.dtype);
  Guarded logits(content, kOffBytes), other(content.size(), kOffBytes);
  Guarded& to = is_in_place ? logits : other;
  kernels.softmax[cpu::float_dtype_idx(row.dtype)].grad(row.over(logits.data()), grad, to.data());
  CHECK(to.is_guarded());
  if (!is_in_place) CHECK(logits.content() == content);
  return to.content();
}

// ---- the oracle: double, with the maximum sum of fp32 rounding errors

struct Bounded {
  double value = 0;
  double bound = 0;

  bool holds(float actual) const { return actual == value || std::fabs(actual - value) <= bound; }
};

void check_near(const char* what, float actual, const Bounded& expected) {
  if (expected.holds(actual)) return;
  CAPTURE(std::string(what));
  CAPTURE(expected.bound);
  CHECK(actual == doctest::Approx(expected.value).epsilon(0));
}

/// The rounding errors relative to z in units of kUnit: none, of the scale, or of scale, quotient,
/// tanh and product.
double roundings_of(const Options& options) {
  return options.softcap != 0 ? 9 : options.logit_scale != 1 ? 1 : 0;
}

double z_of(const Row& row, std::size_t i) {
  const double z = static_cast<double>(row.options.logit_scale) * row.values[i];
  const double cap = row.options.softcap;
  return cap != 0 ? cap * std::tanh(z / cap) : z;
}

struct Expected {
  explicit Expected(const Row& row) {
    const double own = roundings_of(row.options);
    for (std::size_t i = 0; i < row.values.size(); ++i) z.push_back(z_of(row, i));
    for (const double value : z) max = std::max(max, value);
    first = static_cast<std::size_t>(std::find(z.begin(), z.end(), max) - z.begin());
    // Sums: 64 lanes and a tree; what is scaled to a larger maximum is rounded once more by block.
    const auto n = static_cast<double>(z.size());
    const double adding = n / 64 + 8 + 5 * (n / 1024 + 1);
    for (std::size_t i = 0; i < z.size(); ++i) {
      const double d = z[i] - max, power = std::exp(d);
      const double of_power =
          power == 0 ? 0 : 5 + 2 * std::fabs(d) + own * (std::fabs(z[i]) + std::fabs(max));
      const double term = power == 0 ? 0 : power * d;
      sum.value += power;
      sum.bound += power * (of_power + adding) * kUnit + kSmallest;
      entropy.value += term;
      entropy.bound += (-term + power) * (of_power + adding) * kUnit + 100 * kSmallest;
      const double weighted_z = row.weight(i) * z[i];
      weighted.value += weighted_z;
      weighted.bound += std::fabs(weighted_z) * (adding + own + 1) * kUnit;
    }
  }

  std::vector<double> z;
  double max = -std::numeric_limits<double>::infinity();
  std::size_t first = 0;
  Bounded sum, entropy, weighted;
};

void check_stats(const SoftmaxStats& stats, const Row& row, const Expected& expected) {
  const double own = roundings_of(row.options) * kUnit;
  if (row.values.empty()) {
    CHECK(std::memcmp(&stats, &oracle::kNoLogits, sizeof stats) == 0);
    return;
  }
  check_near("max", stats.max, {expected.max, own * std::fabs(expected.max)});
  check_near("sum", stats.sum, expected.sum);
  const bool has_target = row.target_idx >= 0;
  const double target = has_target ? expected.z[static_cast<std::size_t>(row.target_idx)] : 0;
  check_near("target", stats.target, {target, own * std::fabs(target)});
  check_near("weighted", stats.weighted,
             row.options.wants_weighted ? expected.weighted : Bounded{});
  check_near("entropy", stats.entropy, row.options.wants_more ? expected.entropy : Bounded{});
  if (!row.options.wants_more) return;
  const auto argmax = static_cast<std::size_t>(stats.argmax);
  REQUIRE(argmax < expected.z.size());
  if (own == 0) CHECK(argmax == expected.first);
  CHECK(expected.z[argmax] >= expected.max - 2 * own * std::fabs(expected.max));
}

void check_grad(const Bytes& bytes, const Row& row, const LogitGrad& grad,
                const Expected& expected) {
  const double own = roundings_of(row.options), cap = row.options.softcap;
  for (std::size_t i = 0; i < row.values.size(); ++i) {
    const double z = expected.z[i], d = z - grad.max, power = std::exp(d);
    const double target = static_cast<std::int64_t>(i) == row.target_idx ? grad.target : 0;
    const double prob = power * grad.prob;
    const double smooth = grad.smooth * static_cast<double>(row.weight(i));
    const double terms = prob + std::fabs(smooth) + target;
    const double square = cap != 0 ? z * z / (cap * cap) : 0;
    const double slope = (1 - square) * row.options.logit_scale;
    // The slope is a difference of 1 and a square, whose roundings stay where it vanishes.
    const double of_slope = std::fabs(row.options.logit_scale) * (2 * (own + 2) * square + 3);
    const double of_prob = power == 0 ? 0 : prob * (5 + 2 * std::fabs(d) + own * std::fabs(z));
    double bound = (of_prob + 3 * terms) * std::fabs(slope) * kUnit + terms * of_slope * kUnit +
                   kSmallest * (1 + std::fabs(grad.prob));
    const double value = (prob - smooth - target) * slope;
    if (row.dtype == DType::kFloat16) bound += std::fabs(value) * 0x1.01p-11 + 0x1p-25;
    if (row.dtype == DType::kBFloat16) bound += std::fabs(value) * 0x1.01p-8;
    const float actual = decoded(bytes, i, row.dtype);
    check_near("gradient", actual, {value, bound});
  }
}

// ---- rows of values

struct Fill {
  const char* name;
  float (*value)(std::size_t i, std::mt19937& random);
};

float normal(std::mt19937& random) { return std::normal_distribution<float>()(random); }

const Fill kFills[] = {
    {"random", [](std::size_t, std::mt19937& random) { return 3 * normal(random); }},
    {"huge", [](std::size_t, std::mt19937& random) { return random() % 2 == 0 ? 1e4F : -1e4F; }},
    {"offset", [](std::size_t, std::mt19937& random) { return 1e4F + 4 * normal(random); }},
    {"constant", [](std::size_t, std::mt19937&) { return -2.5F; }},
    {"some -inf",
     [](std::size_t i, std::mt19937& random) { return i % 3 == 1 ? -kInf : normal(random); }},
    // A larger maximum in every block: all sums are scaled each time.
    {"rising", [](std::size_t i, std::mt19937&) { return static_cast<float>(i) / 100; }},
    {"falling", [](std::size_t i, std::mt19937&) { return -static_cast<float>(i) / 100; }},
};

Floats filled(const Fill& fill, std::size_t size) {
  std::mt19937 random(static_cast<unsigned>(size) + 5);
  Floats values;
  for (std::size_t i = 0; i < size; ++i) values.push_back(fill.value(i, random));
  return values;
}

template <class Visit>
void for_each_row(const Visit& visit) {
  for (const DType dtype : cpu::kFloatDTypes)
    for (const Fill& fill : kFills)
      for (const Options& options : kAllOptions)
        for (const std::size_t size : kSizes) {
          CAPTURE(std::string(name_of(dtype)));
          CAPTURE(std::string(fill.name));
          CAPTURE(size);
          CAPTURE(options.logit_scale);
          CAPTURE(options.softcap);
          Row row(filled(fill, size), dtype, options);
          // -infinity times a weight of 0 is NaN, here as in torch.
          if (row.options.softcap == 0 && fill.value == kFills[4].value)
            row.options.wants_weighted = false;
          if (size > 0) row.target_idx = static_cast<std::int64_t>(size - 1 - size / 3);
          visit(row);
        }
}

TEST_CASE("stats are those of double, with the same bits at every level") {
  for_each_row([](const Row& row) {
    const SoftmaxStats stats = stats_of(cpu::kBaselineKernels, row);
    check_stats(stats, row, Expected(row));
    for (const Kernels* kernels : kernel_levels()) {
      const SoftmaxStats others = stats_of(*kernels, row);
      CHECK(std::memcmp(&others, &stats, sizeof stats) == 0);
    }
  });
}

TEST_CASE("gradients are those of double, in place too, with the same bits at every level") {
  for_each_row([](const Row& row) {
    const Expected expected(row);
    const auto max = static_cast<float>(row.values.empty() ? 0 : expected.max);
    for (const float smooth : {0.0F, 0.01F}) {
      const LogitGrad grad = {.max = max, .prob = 0.4F, .smooth = smooth, .target = 0.75F};
      const Bytes bytes = grad_of(cpu::kBaselineKernels, row, grad, false);
      check_grad(bytes, row, grad, expected);
      for (const Kernels* kernels : kernel_levels())
        for (const bool is_in_place : {false, true}) {
          CHECK(grad_of(*kernels, row, grad, is_in_place) == bytes);
        }
    }
  });
}

TEST_CASE("the target is found in every block, and only where it is") {
  const Floats values = filled(kFills[0], 5000);
  for (const Kernels* kernels : kernel_levels())
    for (const std::int64_t target : {-1, 0, 1, 1023, 1024, 2047, 4095, 4096, 4999}) {
      Row row(values, DType::kFloat32, kPlain);
      row.target_idx = target;
      CAPTURE(target);
      const float expected = target < 0 ? 0.0F : values[static_cast<std::size_t>(target)];
      CHECK(stats_of(*kernels, row).target == expected);
      const Bytes grad = grad_of(*kernels, row, {.target = 1}, false);
      for (std::size_t i = 0; i < values.size(); ++i)
        if (oracle::element<float>(grad, i) != (static_cast<std::int64_t>(i) == target ? -1 : 0))
          FAIL_CHECK("gradient " << i);
    }
}

TEST_CASE("argmax is the first of equals, in and across blocks") {
  for (const Kernels* kernels : kernel_levels())
    for (const DType dtype : cpu::kFloatDTypes)
      for (const std::size_t first : {0U, 17U, 63U, 1023U, 1024U, 4990U}) {
        Floats values(5000, 1.0F);
        for (const std::size_t i : {first, first + 1, std::size_t{4999}}) values[i] = 2;
        const Row row(values, dtype, {.wants_more = true});
        CHECK(stats_of(*kernels, row).argmax == static_cast<std::int32_t>(first));
      }
}

// ---- what is not finite

TEST_CASE("rows of -infinity have no sum; NaN and infinity go into it") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Kernels* kernels : kernel_levels())
    for (const DType dtype : cpu::kFloatDTypes)
      for (const std::size_t size : {1U, 65U, 5000U}) {
        CAPTURE(size);
        const Options options{.wants_more = true};
        const SoftmaxStats none = stats_of(*kernels, Row(Floats(size, -kInf), dtype, options));
        CHECK(none.max == -kInf);
        CHECK(none.sum == 0);
        CHECK(none.entropy == 0);
        CHECK(none.argmax == 0);
        for (const float special : {nan, -nan, kInf})
          for (const float other : {-1.0F, -kInf})
            for (const std::size_t place : {std::size_t{0}, size / 2, size - 1}) {
              Floats values(size, other);
              values[place] = special;
              const Row row(values, dtype, options);
              const SoftmaxStats stats = stats_of(*kernels, row);
              CHECK(std::isnan(stats.sum));
              CHECK(stats.max == (special == kInf ? kInf : size == 1 ? -kInf : other));
              const Bytes grad = grad_of(*kernels, row, {.max = 0, .prob = 1}, false);
              CHECK(grad == grad_of(cpu::kBaselineKernels, row, {.max = 0, .prob = 1}, false));
            }
      }
}

// The value of masks: the lowest fp32 number.
TEST_CASE("blocks of the lowest number count for nothing") {
  const float lowest = std::numeric_limits<float>::lowest();
  for (const Kernels* kernels : kernel_levels())
    for (const std::size_t begin : {0U, 1024U}) {
      Floats values(3072, lowest);
      std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(begin), 1024, 3e4F);
      const Row row(values, DType::kFloat32, {.wants_more = true});
      const SoftmaxStats stats = stats_of(*kernels, row);
      CHECK(stats.sum == 1024);
      CHECK(stats.entropy == 0);
      const Row masked(Floats(4096, lowest), DType::kFloat32, row.options);
      const Row seen(Floats(8, 3e38F), DType::kFloat32, row.options);
      for (const Row* other : {&row, &seen}) {
        const SoftmaxStats a = stats_of(*kernels, masked), b = stats_of(*kernels, *other);
        for (const SoftmaxStats& both : {merge(a, b), merge(b, a)}) {
          CHECK(both.sum == b.sum);
          CHECK(both.entropy == 0);
        }
      }
    }
}

// ---- the functions

double ulps_between(float actual, double expected) {
  const int exponent = std::max(std::ilogb(expected), -126);
  return std::fabs(actual - expected) / std::ldexp(1.0, exponent - 23);
}

TEST_CASE("exp is right within 1.1 ulp, and tanh within 1.7") {
  std::mt19937 random(11);
  constexpr std::size_t kNumValues = 200'000;
  double worst_exp = 0, worst_tanh = 0;
  Floats values;
  for (std::size_t i = 0; i < kNumValues; ++i)
    values.push_back(-87.336F * static_cast<float>(random()) / 4294967296.0F);
  values.push_back(0);
  const Row row(values, DType::kFloat32, kPlain);
  for (const Kernels* kernels : kernel_levels()) {
    const Bytes exps = grad_of(*kernels, row, {.max = 0, .prob = 1}, false);
    for (std::size_t i = 0; i < values.size(); ++i)
      worst_exp = std::max(worst_exp, ulps_between(oracle::element<float>(exps, i),
                                                   std::exp(static_cast<double>(values[i]))));
  }
  const SoftmaxOps& best = kernel_levels().back()->softmax[cpu::float_dtype_idx(DType::kFloat32)];
  for (std::size_t i = 0; i < kNumValues; ++i) {
    const float magnitude = std::ldexp(1 + static_cast<float>(random()) / 4294967296.0F,
                                       static_cast<int>(random() % 24) - 20);
    const float x = random() % 2 == 0 ? magnitude : -magnitude;
    const SoftmaxStats stats = best.stats(
        {.logits = &x, .num_elems = 1, .weight = nullptr, .target_idx = 0, .softcap = 1});
    worst_tanh =
        std::max(worst_tanh, ulps_between(stats.target, std::tanh(static_cast<double>(x))));
  }
  CHECK(worst_exp < 1.1);   // 0.98 when this was written
  CHECK(worst_tanh < 1.7);  // 1.48
}

}  // namespace
