#include <cstdint>

#include "kernels/losses/loss_call.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;

TEST_CASE("loss plan: the smallest cluster whose registers and shared memory hold a row") {
  const auto blocks_for = [](std::int64_t row_bytes, bool is_aligned) {
    const auto plan = cuda::plan_loss(row_bytes, is_aligned);
    if (!plan.has_value()) return 0U;
    const auto num_vectors = (row_bytes + 15) / 16 + (is_aligned ? 0 : 1);
    CHECK(plan->segment_vectors * plan->cluster_blocks >= num_vectors);
    CHECK(plan->segment_vectors <= cuda::kLossThreads * cuda::kVectorsPerThread);
    CHECK(plan->shared_bytes() <= 227 << 10);
    return plan->cluster_blocks;
  };
  CHECK(blocks_for(2 * 8192, true) == 0);
  CHECK(blocks_for(2 * 32000, true) == 1);
  CHECK(blocks_for(2 * 32768, true) == 1);
  CHECK(blocks_for(2 * 32768, false) == 2);
  CHECK(blocks_for(2 * 50257, false) == 2);
  CHECK(blocks_for(2 * 128256, true) == 4);
  CHECK(blocks_for(2 * 151936, true) == 8);
  CHECK(blocks_for(4 * 128256, true) == 8);
  CHECK(blocks_for(2 * 262144, true) == 8);
  CHECK(blocks_for(2 * 262144, false) == 0);
}

}  // namespace
