// A residual and the norm of a row against double, with bounds from the roundings on the way, and
// the same bits at every SIMD level.
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "kernels/common/tables.h"
#include "kernels/common/types.h"
#include "operator_case.h"
#include "reduce_oracle.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using cpu::Kernels;
using oracle::Bytes;
using testing::Floats;

constexpr double kUnit = 0x1p-24;  // a rounding of fp32, relative
constexpr float kEps = 1e-5F;

struct Row {
  Row(DType type, std::size_t num_elems, unsigned seed) : dtype(type) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto make = [&] {
      Floats values(num_elems);
      for (float& value : values) value = normal(random);
      return testing::encoded(values, dtype);
    };
    x = make();
    residual = make();
    weight = make();
  }
  std::size_t size() const { return x.size() / element_bytes(dtype); }
  double at(const Bytes& bytes, std::size_t i) const { return testing::decoded(bytes, i, dtype); }

  DType dtype;
  Bytes x, residual, weight;
};

/// In vectors of exactly the row's size, so that the sanitizers see what is beyond.
Row normed(const Kernels& kernels, Row row) {
  const std::size_t num_elems = row.size();
  kernels.add_rms_norm[cpu::float_dtype_idx(row.dtype)]({.x = row.x.data(),
                                                         .residual = row.residual.data(),
                                                         .weight = row.weight.data(),
                                                         .num_elems = num_elems,
                                                         .eps = kEps});
  return row;
}

double rounding_of(DType dtype) {
  return dtype == DType::kFloat32 ? kUnit : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

void check_against_double(const Row& before, const Row& after) {
  const double rounding = rounding_of(before.dtype);
  double squares = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const double sum = before.at(before.x, i) + before.at(before.residual, i);
    const double found = after.at(after.residual, i);
    CHECK(std::abs(found - sum) <= std::abs(sum) * (rounding + 1.01 * kUnit) + 0x1p-25);
    squares += found * found;
  }
  const double scale = 1 / std::sqrt(squares / static_cast<double>(before.size()) + kEps);
  const double in_fp32 = (12.0 + static_cast<double>(before.size()) / 64) * kUnit;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const double exact = after.at(after.residual, i) * scale * before.at(before.weight, i);
    CHECK(std::abs(after.at(after.x, i) - exact) <=
          std::abs(exact) * (rounding * 1.01 + in_fp32) + 0x1p-25);
  }
}

TEST_CASE("rows are normed as in double, with the same bits at every level") {
  const Kernels* const baseline = cpu::find_kernels("baseline");
  for (const DType dtype : cpu::kFloatDTypes)
    for (const std::size_t num_elems : {1, 3, 15, 16, 17, 63, 64, 65, 127, 130, 1000, 4096}) {
      CAPTURE(name_of(dtype));
      CAPTURE(num_elems);
      const Row before(dtype, num_elems, static_cast<unsigned>(num_elems));
      const Row after = normed(*baseline, before);
      check_against_double(before, after);
      CHECK(after.weight == before.weight);
      for (const Kernels* kernels : testing::kernel_levels()) {
        const Row same = normed(*kernels, before);
        CHECK(same.x == after.x);
        CHECK(same.residual == after.residual);
      }
    }
}

TEST_CASE("a zero row stays zero, and a NaN makes its row NaN") {
  for (const Kernels* kernels : testing::kernel_levels()) {
    std::vector<float> x(70), residual(70), weight(70, 2);
    const auto run = [&] {
      kernels->add_rms_norm[cpu::float_dtype_idx(DType::kFloat32)]({.x = x.data(),
                                                                    .residual = residual.data(),
                                                                    .weight = weight.data(),
                                                                    .num_elems = 70,
                                                                    .eps = kEps});
    };
    run();
    for (const float value : x) CHECK(value == 0);
    x[69] = std::numeric_limits<float>::quiet_NaN();
    run();
    for (const float value : x) CHECK(std::isnan(value));
  }
}

}  // namespace
