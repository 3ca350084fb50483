#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/common/tables.h"
#include "kernels/common/types.h"
#include "kernels/reductions/reduce_op.h"
#include "operator_case.h"
#include "reduce_oracle.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using cpu::Kernels;
using CombineFn = decltype(ReduceOp::combine);
using oracle::Bytes;

constexpr std::size_t kMaxElems = 4099;
// Nothing; a tail alone; around one vector and one unrolled step at every width; many steps with
// and without a tail.
constexpr std::size_t kSizes[] = {0, 1, 7, 63, 64, 65, 1000, kMaxElems};
constexpr int kNumSrcs[] = {1, 2, 3, 5, 8};  // copy; the two-source path; the n-ary one
constexpr int kDivisors[] = {1, 3, 1000};    // none; inexact; outside of int8
constexpr int kNoAlias = -1;

CombineFn combine_of(const Kernels& kernels, Reduction reduction, DType dtype) {
  return kernels.reductions[static_cast<int>(reduction)][static_cast<int>(dtype)].combine;
}

template <class Visit>
void for_each_pair(Visit visit) {
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int r = 0; r < kNumReductions; ++r)
      visit(static_cast<Reduction>(r), static_cast<DType>(d));
  }
}

void put(Bytes& bytes, std::size_t offset, std::uint64_t bits, std::size_t num_bytes) {
  std::memcpy(bytes.data() + offset, &bits, num_bytes);
}

// Bits of the values where formats break: zeros, infinities, NaN (quiet and signalling, payload,
// sign), the smallest and largest subnormal, the smallest and largest normal, and one.
std::vector<std::uint64_t> special_bits(int exponent_bits, int mantissa_bits) {
  const std::uint64_t infinity = ((std::uint64_t{1} << exponent_bits) - 1) << mantissa_bits;
  const std::uint64_t normal = std::uint64_t{1} << mantissa_bits;
  const std::uint64_t one = ((std::uint64_t{1} << (exponent_bits - 1)) - 1) << mantissa_bits;
  std::vector<std::uint64_t> bits = {0,          infinity, infinity | normal >> 1, infinity | 1, 1,
                                     normal - 1, normal,   infinity - 1,           one};
  const std::uint64_t sign = std::uint64_t{1} << (exponent_bits + mantissa_bits);
  for (std::size_t i = 0, n = bits.size(); i < n; ++i) bits.push_back(bits[i] | sign);
  return bits;
}

// Elements of one source: a third special values, a third any bits, and a third near one, where
// sums round often instead of returning the larger operand.
Bytes random_source(DType dtype, std::mt19937_64& random) {
  const std::size_t width = element_bytes(dtype);
  if (dtype == DType::kSoftmaxStats)
    return oracle::collect(kMaxElems, [&](std::size_t) {
      return oracle::exact_stats(static_cast<std::uint32_t>(random()));
    });
  const int mantissa_bits = dtype == DType::kFloat64   ? 52
                            : dtype == DType::kFloat32 ? 23
                            : dtype == DType::kFloat16 ? 10
                                                       : 7;
  const int exponent_bits = static_cast<int>(8 * width) - 1 - mantissa_bits;
  std::vector<std::uint64_t> special = {0, 1, 2, ~std::uint64_t{0},
                                        std::uint64_t{1} << (8 * width - 1)};
  if (oracle::is_float(dtype)) special = special_bits(exponent_bits, mantissa_bits);
  Bytes bytes(kMaxElems * width);
  for (std::size_t i = 0; i < kMaxElems; ++i) {
    std::uint64_t bits = random();
    const auto kind = random() % 3;
    if (kind == 0) bits = special[random() % special.size()];
    if (kind == 1 && oracle::is_float(dtype)) {
      const std::uint64_t exponent = (std::uint64_t{1} << (exponent_bits - 1)) - 4 + random() % 7;
      bits = (bits & ~(((std::uint64_t{1} << exponent_bits) - 1) << mantissa_bits)) |
             exponent << mantissa_bits;
    }
    if (dtype == DType::kBool)
      bits = kind == 0 ? bits : bits % 2;  // also bytes that are neither 0 nor 1
    put(bytes, i * width, bits, width);
  }
  return bytes;
}

std::vector<Bytes> random_sources(DType dtype, int num_srcs) {
  std::mt19937_64 random(static_cast<unsigned>(num_srcs) * 100 + static_cast<unsigned>(dtype));
  std::vector<Bytes> srcs;
  for (int s = 0; s < num_srcs; ++s) srcs.push_back(random_source(dtype, random));
  return srcs;
}

/// How one call is laid out in memory.
struct Layout {
  std::size_t num_elems = 0;
  int to_alias = kNoAlias;  // the source that `to` is
  bool has_also_to = false;
  int also_alias = kNoAlias;
  std::size_t offset_bytes = 0;  // of every array from its 64-byte boundary
};

// Calls `combine` on a copy of `srcs`; whether it left `expected` where it should and everything
// else as it was.
bool stores_expected(CombineFn combine, DType dtype, const std::vector<Bytes>& srcs,
                     const Bytes& expected, const Layout& layout, int divisor) {
  const std::size_t num_bytes = layout.num_elems * element_bytes(dtype);
  std::vector<testing::Guarded> arrays(  // the sources, to, also_to
      srcs.size() + 2, testing::Guarded(num_bytes, layout.offset_bytes));
  std::vector<const void*> pointers;
  for (std::size_t s = 0; s < srcs.size(); ++s) {
    if (num_bytes > 0) std::memcpy(arrays[s].data(), srcs[s].data(), num_bytes);
    pointers.push_back(arrays[s].data());
  }
  const std::size_t to =
      layout.to_alias == kNoAlias ? srcs.size() : static_cast<std::size_t>(layout.to_alias);
  const std::size_t also =
      layout.also_alias == kNoAlias ? srcs.size() + 1 : static_cast<std::size_t>(layout.also_alias);
  combine(arrays[to].data(), layout.has_also_to ? arrays[also].data() : nullptr, pointers.data(),
          static_cast<int>(srcs.size()), layout.num_elems, divisor);
  for (std::size_t k = 0; k < arrays.size(); ++k) {
    const bool is_result = k == to || (layout.has_also_to && k == also);
    const bool is_right = is_result         ? arrays[k].holds_begin_of(expected)
                          : k < srcs.size() ? arrays[k].holds_begin_of(srcs[k])
                                            : arrays[k].is_untouched();
    if (!is_right || !arrays[k].is_guarded()) return false;
  }
  return true;
}

// Every aliasing of one size, with and without the second store, from aligned and unaligned
// addresses.
std::vector<Layout> layouts_of(std::size_t num_elems, int num_srcs, DType dtype) {
  std::vector<Layout> layouts;
  for (int alias = kNoAlias; alias < num_srcs; ++alias) {
    for (const std::size_t offset_bytes : {std::size_t{0}, element_bytes(dtype)}) {
      layouts.push_back({num_elems, alias, false, kNoAlias, offset_bytes});
      layouts.push_back({num_elems, alias, true, kNoAlias, offset_bytes});
    }
    layouts.push_back({num_elems, kNoAlias, true, alias, 0});
    if (alias != kNoAlias && num_srcs > 1)
      layouts.push_back({num_elems, alias, true, (alias + 1) % num_srcs, 0});
  }
  return layouts;
}

void check_pair(Reduction reduction, DType dtype, const std::vector<Bytes>& srcs, int divisor) {
  const Bytes expected = oracle::reduce(reduction, dtype, srcs, kMaxElems, divisor);
  const int num_srcs = static_cast<int>(srcs.size());
  for (const Kernels* kernels : testing::kernel_levels()) {
    const CombineFn combine = combine_of(*kernels, reduction, dtype);
    for (const std::size_t num_elems : kSizes) {
      for (const Layout& layout : layouts_of(num_elems, num_srcs, dtype)) {
        if (stores_expected(combine, dtype, srcs, expected, layout, divisor)) continue;
        FAIL_CHECK(kernels->level << ": " << name_of(reduction) << " " << name_of(dtype) << ", "
                                  << num_srcs << " sources, " << num_elems << " elements, divisor "
                                  << divisor << ", to is source " << layout.to_alias
                                  << ", also_to is source " << layout.also_alias
                                  << (layout.has_also_to ? "" : " (none)") << ", offset "
                                  << layout.offset_bytes);
        return;
      }
    }
  }
}

// One thread, and the most work of all.
TEST_CASE("every level gives the oracle's bits" * doctest::skip(testing::kHasThreadSanitizer)) {
  for_each_pair([](Reduction reduction, DType dtype) {
    if (!oracle::has_meaning(reduction, dtype)) return;
    for (const int num_srcs : kNumSrcs) {
      const std::vector<Bytes> srcs = random_sources(dtype, num_srcs);
      for (const int divisor : kDivisors) {
        if (divisor > 1 && dtype == DType::kBool)
          continue;  // an average of truth values has no meaning
        check_pair(reduction, dtype, srcs, divisor);
      }
    }
  });
}

// A single source is widened, rounded and packed: all 65,536 values stay as they are. Products with
// every 16-bit float round at every distance from a tie, and into and out of the subnormals.
TEST_CASE("16-bit floats survive the way to fp32 and back, and products round to nearest even") {
  constexpr std::size_t kNumValues = 65536;
  std::mt19937_64 random(7);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (int divisor = 0; divisor <= 8; ++divisor) {
      Bytes all(kNumValues * 2), factor(kNumValues * 2);
      const std::uint64_t bits = random();
      for (std::size_t i = 0; i < kNumValues; ++i) {
        put(all, i * 2, i, 2);
        put(factor, i * 2, bits, 2);
      }
      std::vector<Bytes> srcs = {all, factor};
      if (divisor == 0) srcs.pop_back();
      const Bytes expected =
          oracle::reduce(Reduction::kProduct, dtype, srcs, kNumValues, std::max(1, divisor));
      for (const Kernels* kernels : testing::kernel_levels()) {
        CAPTURE(kernels->level);
        const CombineFn combine = combine_of(*kernels, Reduction::kProduct, dtype);
        CHECK(stores_expected(combine, dtype, srcs, expected, {.num_elems = kNumValues},
                              std::max(1, divisor)));
      }
    }
}

TEST_CASE("zeros of either sign and NaN in minima and maxima") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> srcs = {{0.0F, -0.0F, nan, 1.0F}, {-0.0F, 0.0F, 1.0F, nan}};
  const void* pointers[2] = {srcs[0].data(), srcs[1].data()};
  for (const Kernels* kernels : testing::kernel_levels()) {
    for (const Reduction reduction : {Reduction::kMin, Reduction::kMax}) {
      float result[4] = {};
      combine_of(*kernels, reduction, DType::kFloat32)(result, nullptr, pointers, 2, 4, 1);
      CHECK_FALSE(std::signbit(result[0]));  // of equals the first stays
      CHECK(std::signbit(result[1]));
      CHECK(std::isnan(result[2]));
      CHECK(std::isnan(result[3]));
    }
  }
}

// The checks above mean something only if they fail on a wrong result.
TEST_CASE("negative control: a wrong kernel is noticed") {
  const std::vector<Bytes> srcs = random_sources(DType::kBFloat16, 3);
  const Bytes expected = oracle::reduce(Reduction::kSum, DType::kBFloat16, srcs, kMaxElems, 1);
  const CombineFn sum = combine_of(cpu::kBaselineKernels, Reduction::kSum, DType::kBFloat16);
  const Layout layout{.num_elems = 65, .to_alias = 1};
  REQUIRE(stores_expected(sum, DType::kBFloat16, srcs, expected, layout, 1));

  SUBCASE("one bit of the last element") {
    Bytes wrong = expected;
    wrong[2 * 64] ^= 1;
    CHECK_FALSE(stores_expected(sum, DType::kBFloat16, srcs, wrong, layout, 1));
  }
  SUBCASE("rounded at every step") {
    const Bytes first_two =
        oracle::reduce(Reduction::kSum, DType::kBFloat16, {srcs[0], srcs[1]}, kMaxElems, 1);
    const Bytes stepwise =
        oracle::reduce(Reduction::kSum, DType::kBFloat16, {first_two, srcs[2]}, kMaxElems, 1);
    CHECK_FALSE(
        stores_expected(sum, DType::kBFloat16, srcs, stepwise, {.num_elems = kMaxElems}, 1));
  }
  SUBCASE("another reduction") {
    const CombineFn max = combine_of(cpu::kBaselineKernels, Reduction::kMax, DType::kBFloat16);
    CHECK_FALSE(stores_expected(max, DType::kBFloat16, srcs, expected, layout, 1));
  }
  SUBCASE("a store past the end") {
    const CombineFn too_long = [](void* to, void* also_to, const void* const* from, int n,
                                  std::size_t num_elems, int) {
      combine_of(cpu::kBaselineKernels, Reduction::kSum, DType::kBFloat16)(to, also_to, from, n,
                                                                           num_elems + 1, 1);
    };
    CHECK_FALSE(stores_expected(too_long, DType::kBFloat16, srcs, expected, layout, 1));
  }
}

TEST_CASE("the registry has every operator and refuses what has no meaning") {
  for_each_pair([](Reduction reduction, DType dtype) {
    CAPTURE(name_of(reduction));
    CAPTURE(name_of(dtype));
    const ReduceOp* op = cpu::find_reduce_op(reduction, dtype);
    CHECK((op != nullptr) == oracle::has_meaning(reduction, dtype));
    for (const Kernels* kernels : testing::kernel_levels()) {
      CHECK((combine_of(*kernels, reduction, dtype) != nullptr) ==
            oracle::has_meaning(reduction, dtype));
    }
    if (op == nullptr) return;
    CHECK(op->element_bytes == element_bytes(dtype));
    const bool is_of_level =
        op->combine == combine_of(*cpu::find_kernels(cpu::simd_level()), reduction, dtype);
    CHECK(is_of_level);
  });
}

TEST_CASE("RINGCOMM_SIMD chooses the level") {
  const std::string best = testing::kernel_levels().back()->level;
  CHECK(cpu::choose_simd_level(nullptr) == best);
  CHECK(cpu::choose_simd_level("") == best);
  CHECK(std::string(cpu::choose_simd_level("baseline")) == "baseline");
  const char* const requested = std::getenv("RINGCOMM_SIMD");
  CHECK(std::string(cpu::simd_level()) == cpu::choose_simd_level(requested));
  CHECK_THROWS_WITH_AS(
      cpu::choose_simd_level("sse9"),
      "RINGCOMM_SIMD=\"sse9\" is not an instruction set: expected avx512, avx2 or baseline",
      std::invalid_argument);
  for (const char* level : {"avx2", "avx512"}) {
    if (cpu::find_kernels(level) == nullptr) {
      CHECK_THROWS_AS(cpu::choose_simd_level(level), std::invalid_argument);
    }
  }
}

}  // namespace
