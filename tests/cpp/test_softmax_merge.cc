// Rows in parts: merging the stats of parts, directly, and by an all_reduce with every algorithm
// and transport; and the cluster whose blocks hold a row.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "collective_case.h"
#include "kernels/common/tables.h"
#include "kernels/losses/loss_call.h"
#include "memory_messages.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using oracle::Bytes;
using oracle::kNoLogits;

bool is_same(const SoftmaxStats& a, const SoftmaxStats& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

/// Throws unless they are equal except for the rounding of the sums of `num_parts` parts.
void expect_near(const SoftmaxStats& a, const SoftmaxStats& b, int num_parts) {
  const auto are_near = [num_parts](float x, float y, float size) {
    return x == y || std::fabs(x - y) <= static_cast<float>(num_parts) * 4e-6F * size;
  };
  expect(a.max == b.max, "the same maximum");
  expect(a.argmax == b.argmax, "the same argmax");
  expect(are_near(a.sum, b.sum, b.sum), "the same sum");
  expect(are_near(a.entropy, b.entropy, b.sum - b.entropy), "the same entropy");
  expect(are_near(a.target, b.target, std::fabs(b.target)), "the same target");
  expect(are_near(a.weighted, b.weighted, 1e4F), "the same weighted sum");
}

// ---- a row in parts

SoftmaxStats stats_of(const std::vector<float>& row, std::size_t begin, std::size_t end,
                      std::size_t target) {
  SoftmaxStats stats = cpu::kernels().softmax[cpu::float_dtype_idx(DType::kFloat32)].stats(
      {.logits = row.data() + begin,
       .num_elems = end - begin,
       .target_idx =
           target >= begin && target < end ? static_cast<std::int64_t>(target - begin) : -1,
       .wants_weighted = true,
       .wants_more = true});
  if (end > begin) stats.argmax += static_cast<std::int32_t>(begin);
  return stats;
}

/// Merges two at random, neighbours or not, in either order, until one is left.
SoftmaxStats merged_anyhow(std::vector<SoftmaxStats> parts, std::mt19937& random) {
  while (parts.size() > 1) {
    std::shuffle(parts.begin(), parts.end(), random);
    const SoftmaxStats last = parts.back();
    parts.pop_back();
    parts.back() = merge(parts.back(), last);
  }
  return parts[0];
}

TEST_CASE("any split of a row, merged in any order, has the stats of the row") {
  constexpr std::size_t kSize = 3000;
  std::mt19937 random(5);
  for (int repeat = 0; repeat < 200; ++repeat) {
    // Offsets between blocks, so that the maxima of parts differ; ties of the largest.
    std::vector<float> row;
    const auto offset = static_cast<float>(random() % 2000) - 1000;
    for (std::size_t i = 0; i < kSize; ++i)
      row.push_back(i % 7 == 0 ? -std::numeric_limits<float>::infinity()
                               : offset + static_cast<float>((i / 500) % 4) * 3 +
                                     static_cast<float>(random() % 64) / 16);
    const std::size_t target = 1 + random() % (kSize / 7) * 7;
    std::vector<std::size_t> ends = {0, kSize};
    for (auto cuts = random() % 12; cuts > 0; --cuts) ends.push_back(random() % (kSize + 1));
    ends.push_back(ends.back());  // an empty part
    std::sort(ends.begin(), ends.end());
    std::vector<SoftmaxStats> parts;
    for (std::size_t i = 1; i < ends.size(); ++i)
      parts.push_back(stats_of(row, ends[i - 1], ends[i], target));
    SoftmaxStats whole = stats_of(row, 0, kSize, target), merged = merged_anyhow(parts, random);
    CHECK(whole.weighted == -std::numeric_limits<float>::infinity());
    CHECK(merged.weighted == whole.weighted);
    CHECK_NOTHROW(expect_near(merged, whole, static_cast<int>(parts.size())));
  }
}

TEST_CASE("a part without logits is neutral on both sides; of ties the lower index counts") {
  const SoftmaxStats some = {
      .max = 3, .sum = 2.5F, .target = -1, .weighted = 7, .entropy = -0.5F, .argmax = 12};
  CHECK(is_same(merge(kNoLogits, kNoLogits), kNoLogits));
  CHECK(is_same(merge(kNoLogits, some), some));
  CHECK(is_same(merge(some, kNoLogits), some));
  SoftmaxStats other = some;
  other.argmax = 4;
  CHECK(merge(some, other).argmax == 4);
  CHECK(merge(other, some).argmax == 4);
  other.max = 2;
  CHECK(merge(some, other).argmax == 12);
  CHECK(merge(other, some).argmax == 12);
}

TEST_CASE("a NaN in a part is a NaN in the merged stats") {
  const float inf = std::numeric_limits<float>::infinity();
  const SoftmaxStats some = {
      .max = 3, .sum = 2, .target = 0, .weighted = 0, .entropy = 0, .argmax = 1};
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), inf})
    for (const float rest : {-inf, 1.0F}) {
      const std::vector<float> row = {rest, value, rest};
      const SoftmaxStats part = stats_of(row, 0, 3, 0);
      for (const SoftmaxStats& whole : {merge(part, some), merge(some, part)}) {
        CHECK(std::isnan(whole.sum));
        CHECK(whole.max == (value == inf ? inf : 3));
      }
    }
}

// ---- as a reduction

SoftmaxStats random_stats(std::uint32_t seed) {
  std::mt19937 random(seed);
  if (random() % 5 == 0) return kNoLogits;
  const auto next = [&random] { return static_cast<float>(random()) / 4294967296.0F; };
  return {.max = std::floor(40 * next()) / 2,
          .sum = 1 + 100 * next(),
          .target = random() % 2 == 0 ? next() : 0.0F,
          .weighted = 1000 * next(),
          .entropy = -100 * next(),
          .argmax = static_cast<std::int32_t>(random() % 1000)};
}

/// For stats with rounded sums: compares with the oracle, and stores the output in `result`.
void run_rounded(Communicator& communicator, Algorithm algorithm, std::size_t num_elems,
                 Bytes& result) {
  const auto part = [&](int rank, std::size_t i) {
    return random_stats(static_cast<std::uint32_t>(i) * 8 + static_cast<std::uint32_t>(rank));
  };
  const Bytes input =
      oracle::collect(num_elems, [&](std::size_t i) { return part(communicator.rank(), i); });
  result.assign(input.size(), 0);
  const void* inputs[] = {input.data()};
  void* outputs[] = {result.data()};
  communicator.run({{.num_elems = num_elems,
                     .op = OpKind::kAllReduce,
                     .dtype = DType::kSoftmaxStats,
                     .reduction = Reduction::kMerge,
                     .algorithm = algorithm},
                    inputs,
                    outputs},
                   testing::kPatient);
  for (std::size_t i = 0; i < num_elems; ++i) {
    std::vector<SoftmaxStats> parts;
    for (int rank = 0; rank < communicator.world_size(); ++rank) parts.push_back(part(rank, i));
    expect_near(oracle::element<SoftmaxStats>(result, i), oracle::merged_stats(parts),
                communicator.world_size());
  }
}

// Nothing; fewer than ranks; several each; in several pieces, slots and envelopes, none of which a
// multiple of 24 bytes fills.
TEST_CASE("all_reduce of stats with every algorithm on every carrier") {
  std::vector<Algorithm> algorithms = kAlgorithms;
  algorithms.push_back(Algorithm::kAuto);
  for (const std::string placement : {"a", "aa", "aaa", "aaaa", "ab", "abc", "abcd", "abb", "abba"})
    for (const bool is_rank_ordered : {false, true}) {
      CAPTURE(is_rank_ordered);
      CaseTable table{.counts = {0, 1, 5, 1000},
                      .ops = {OpKind::kAllReduce},
                      .algorithms = algorithms,
                      .dtypes = {DType::kSoftmaxStats},
                      .reductions = {Reduction::kMerge},
                      .in_place = {}};
      if (!testing::kHasThreadSanitizer && is_rank_ordered == (placement.size() % 2 == 1))
        table.counts.push_back(100'001);
      std::vector<std::vector<Bytes>> results(placement.size(),
                                              std::vector<Bytes>(algorithms.size()));
      run_placed(
          placement,
          [&](Communicator& communicator) {
            run_cases(communicator, table);
            auto& mine = results[static_cast<std::size_t>(communicator.rank())];
            for (std::size_t i = 0; i < algorithms.size(); ++i)
              run_rounded(communicator, algorithms[i], 1003, mine[i]);
          },
          {.is_rank_ordered = is_rank_ordered}, std::chrono::microseconds(50));
      for (const auto& result : results) CHECK(result == results[0]);
    }
}

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
