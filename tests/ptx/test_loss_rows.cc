// Cross-entropy's kernel for clusters of blocks: loss and gradient against float64, for every
// option that it has, rows that begin anywhere, and any division of a row over blocks.
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/losses/loss_call.h"
#include "loss_case.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

TEST_CASE("loss rows: rows of any width that begin anywhere, over any number of blocks") {
  for (const bool is_float : {false, true})
    for (const unsigned blocks : {1U, 2U, 4U, 8U})
      for (const int width : {1, 7, 8, 17, 64, 129, is_float ? 140 : 280}) {
        const unsigned element_bytes = is_float ? 4 : 2;
        const auto lead = static_cast<unsigned>(width) * element_bytes * blocks % 16;
        run_and_check({.is_float = is_float,
                       .width = width,
                       .lead_bytes = lead,
                       .gap_bytes = width % 2 == 0 ? 0 : 3 * element_bytes,
                       .cluster_blocks = blocks,
                       .num_clusters = 1 + blocks % 3});
      }
}

TEST_CASE("loss rows: the longest row that the registers of the threads hold") {
  const int threads = cuda::kLossThreads;
  run_and_check({.width = 8 * (threads * 8 * 4 - 2), .cluster_blocks = 4});
  run_and_check(
      {.is_float = true, .width = 4 * (threads * 8 * 2 - 2), .lead_bytes = 4, .cluster_blocks = 2});
}

TEST_CASE("loss rows: every option, alone and together") {
  for (const bool is_float : {false, true})
    for (int choice = 0; choice < 48; ++choice) {
      LossOptions options{.is_float = is_float, .width = 151, .lead_bytes = 4};
      options.label_smoothing = choice % 2 == 1 ? 0.1F : 0;
      options.z_loss = choice / 2 % 2 == 1 ? 0.01F : 0;
      options.logit_scale = choice / 4 % 2 == 1 ? 0.7F : 1;
      options.padding = choice / 8 % 2 == 1 ? 30 : 0;
      options.divisor = static_cast<Divisor>(choice / 16);
      options.has_weights = options.label_smoothing == 0 && choice % 3 == 0;
      options.cluster_blocks = 1U << choice % 4;
      options.num_clusters = 2;
      run_and_check(options);
    }
}

TEST_CASE("loss rows: more rows than slots, all kinds of targets") {
  for (const unsigned clusters : {1U, 3U})
    for (const int num_tokens : {0, 1, 2, 3, 4, 20}) {
      run_and_check({.width = 75,
                     .divisor = Divisor::kOne,
                     .num_tokens = num_tokens,
                     .cluster_blocks = 2,
                     .num_clusters = clusters});
    }
}

TEST_CASE("loss rows: large logits keep the digits of their differences") {
  LossCase test({.is_float = true, .width = 300, .label_smoothing = 0.1F, .cluster_blocks = 2});
  for (int row = 0; row < 7; ++row)
    for (int i = 0; i < 300; ++i) test.set(row, i, 1e4F + static_cast<float>(i % 9));
  test.run();
  test.check();
}

TEST_CASE("loss rows: masked logits have no part, and a row of one kind is uniform") {
  for (const bool is_float : {false, true})
    for (const float low : {-kInf, -3.3e38F}) {
      LossCase test(
          {.is_float = is_float, .width = 200, .divisor = Divisor::kOne, .cluster_blocks = 2});
      // One block's share of the row, all but one logit, and for the lowest number all.
      for (int i = 0; i < 200; ++i) {
        test.set(0, i, i < 100 ? low : 1.0F);
        test.set(1, i, i == 150 ? 1.0F : low);
        test.set(3, i, std::isinf(low) ? 2.0F : low);
      }
      test.set_target(0, 120);
      test.set_target(1, 150);
      test.run();
      CHECK(test.by_token(0, 0) == doctest::Approx(std::log(100.0)));
      CHECK(test.by_token(0, 1) == 0);
      CHECK(test.by_token(0, 3) == doctest::Approx(std::log(200.0)));
      CHECK(test.logit(0, 99) == 0);
      CHECK(test.logit(0, 100) == doctest::Approx(0.01).epsilon(0.005));
      CHECK(test.logit(1, 150) == 0);
      CHECK(test.logit(3, 0) == doctest::Approx(0.005).epsilon(0.005));
    }
}

TEST_CASE("loss rows: what is not a number stays in its row") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float special : {nan, kInf}) {
    LossCase test({.width = 100, .divisor = Divisor::kOne, .cluster_blocks = 2});
    test.set(0, 60, special);
    test.set(2, 60, special);  // ignored
    for (int i = 0; i < 100; ++i) test.set(1, i, -kInf);
    test.run();
    for (const int row : {0, 1}) {
      CHECK(std::isnan(test.by_token(0, row)));
      for (int i = 0; i < 100; ++i) CHECK(std::isnan(test.logit(row, i)));
    }
    for (const int row : {2, 3})
      for (int i = 0; i < 100; ++i) CHECK(std::isfinite(test.logit(row, i)));
    CHECK(test.by_token(0, 2) == 0);
    CHECK(test.logit(2, 60) == 0);
    CHECK(std::isnan(test.loss()));
  }
}

TEST_CASE("loss rows: a target that is no class makes its own row NaN, but for padding") {
  for (const std::int64_t target : {std::int64_t{-1}, std::int64_t{90}, std::int64_t{1} << 40}) {
    LossCase test({.width = 100, .padding = 10, .divisor = Divisor::kOne, .cluster_blocks = 2});
    test.set_target(3, target);
    test.run();
    CHECK(std::isnan(test.by_token(0, 3)));
    for (int i = 0; i < 90; ++i) CHECK(std::isnan(test.logit(3, i)));
    for (int i = 90; i < 100; ++i) CHECK(test.logit(3, i) == 0);
    for (const int row : {0, 1, 4}) CHECK(std::isfinite(test.by_token(0, row)));
    test.check_guards();
  }
}

TEST_CASE("loss rows: nothing counts") {
  LossCase test({.width = 50, .num_tokens = 3, .cluster_blocks = 2});
  for (int row = 0; row < 3; ++row) test.set_target(row, kIgnore);
  test.run();
  CHECK(test.denominator() == 0);
  CHECK(std::isnan(test.loss()));
  for (int row = 0; row < 3; ++row)
    for (int i = 0; i < 50; ++i) CHECK(test.logit(row, i) == 0);
}

}  // namespace
