// Results of every collective against the oracle, over shared memory, messages and hosts; bytes
// counted, and what a call leaves alone. By the kernels of GPUs: test_gpu_kernels.cc.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collective_case.h"
#include "memory_messages.h"
#include "third_party/doctest/doctest.h"
#include "transport/shm/context.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

// For an all_reduce that does not go through the leaders: above 1 MiB between two hosts.
constexpr std::size_t kLongElems = 270'011;

TEST_CASE("every collective and algorithm in shared memory, worlds 1 to 8") {
  for (int world_size = 1; world_size <= 8; ++world_size)
    run_placed(std::string(static_cast<std::size_t>(world_size), 'a'),
               [&](Communicator& communicator) {
                 run_cases(communicator, testing::every_collective(world_size));
               });
}

// Late messages overtake each other. The longest counts do not fit an envelope.
TEST_CASE("every collective and algorithm over messages, worlds 2 to 5") {
  for (const char* placement : {"ab", "abc", "abcd", "abcde"})
    for (const int delay_us : {0, 300})
      run_placed(
          placement,
          [&](Communicator& communicator) {
            run_cases(communicator, testing::every_collective(communicator.world_size(), {40'001}));
          },
          {}, std::chrono::microseconds(delay_us));
}

// Even, interleaved, uneven in all orders, one rank alone, more ranks than the other host twice.
TEST_CASE("every collective and algorithm over hosts, wherever the ranks are") {
  for (const char* placement : {"aabb", "abab", "abbccc", "cbcabc", "aab", "abbbbb", "abcabd"})
    run_placed(
        placement,
        [&](Communicator& communicator) {
          expect(communicator.transport_description().find("between them") != std::string::npos,
                 communicator.transport_description());
          CaseTable table = testing::every_collective(communicator.world_size(), {17'011});
          table.in_place = {};
          run_cases(communicator, table);
          run_cases(communicator, {.counts = {kLongElems}, .ops = {OpKind::kAllReduce}});
        },
        {}, std::chrono::microseconds(100));
}

TEST_CASE("every reduction and dtype that has one") {
  for (const char* placement : {"aaaa", "abc", "aba"})
    run_placed(placement, [](Communicator& communicator) {
      CaseTable table = testing::every_collective(communicator.world_size());
      table.counts = {131};
      table.dtypes = testing::all_of<DType>(kNumDTypes);
      table.reductions = testing::all_of<Reduction>(kNumReductions);
      run_cases(communicator, table);
    });
}

// ---- sizes at which a call takes another way

TEST_CASE("one_shot ends at fewer bytes with more ranks") {
  CHECK(one_shot_max_bytes(2) == 256 << 10);
  CHECK(one_shot_max_bytes(4) == 48 << 10);
  for (int world_size = 5; world_size <= 256; ++world_size) {
    const std::size_t limit = one_shot_max_bytes(world_size);
    CHECK(limit <= one_shot_max_bytes(world_size - 1));
    CHECK(limit * static_cast<std::size_t>(world_size) <= 256 << 10);
    CHECK(limit >= 1024);
  }
}

// Sizes: one phase, one element more or less, several phases and a rest.
TEST_CASE("collectives in one piece and in several" * doctest::skip(testing::kHasThreadSanitizer)) {
  constexpr std::size_t kElems = kPhaseBytes / sizeof(std::int32_t);
  // A line less, for the table of sizes.
  constexpr std::size_t kShareElems = kElems - kLineBytes / sizeof(std::int32_t);
  constexpr std::size_t kTwoShotElems = kElems / 3 * 3;
  run_ranks(3, [&](Communicator& communicator) {
    const auto run = [&](const std::vector<OpKind>& ops, const std::vector<std::size_t>& counts,
                         Algorithm algorithm = Algorithm::kAuto) {
      run_cases(
          communicator,
          {.counts = counts, .ops = ops, .algorithms = {algorithm}, .dtypes = {DType::kInt32}});
    };
    run({OpKind::kAllReduce}, {kElems - 1, kElems, kElems + 1}, Algorithm::kOneShot);
    run({OpKind::kAllReduce}, {kTwoShotElems - 1, kTwoShotElems, kTwoShotElems + 1, 2 * kElems + 5},
        Algorithm::kTwoShot);
    run({OpKind::kAllReduce}, {2 * kElems + 5}, Algorithm::kRing);
    run({OpKind::kReduce, OpKind::kAllGather}, {kElems + 1, 2 * kElems + 1});
    run({OpKind::kBroadcast, OpKind::kReduceScatter}, {kElems / 2, kElems / 2 + 1, 3 * kElems});
    run({OpKind::kGather}, {kShareElems, kShareElems + 1, 3 * kShareElems});
    run({OpKind::kScatter, OpKind::kAllToAll}, {kShareElems / 2, kShareElems / 2 + 1, kElems});
  });
}

// One slot's worth per chunk, one element more or less, many slots.
TEST_CASE("rings of several slots" * doctest::skip(testing::kHasThreadSanitizer)) {
  for (const std::size_t world_size : {2U, 3U})
    run_ranks(static_cast<int>(world_size), [&](Communicator& communicator) {
      std::vector<std::size_t> counts;
      for (const std::size_t num_slices : {1U, 2U, 5U})
        for (const std::size_t extra_elems : {0U, 1U, 3U})
          counts.push_back(num_slices * testing::kRingSlotBytes / sizeof(float) * world_size - 1 +
                           extra_elems);
      run_cases(communicator,
                {.counts = counts, .ops = {OpKind::kAllReduce}, .algorithms = {Algorithm::kRing}});
    });
}

// Over messages from 1 MiB on: rings and chains, in slices of 1 MiB. Over hosts: more than a rank
// stages of others' data.
TEST_CASE("large calls over messages and hosts, in pieces") {
  const std::vector<OpKind> ops = {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter,
                                   OpKind::kAllGather, OpKind::kBroadcast};
  for (const char* placement : {"ab", "abc", "abcd"}) {
    if (testing::kHasThreadSanitizer && std::string(placement) != "ab") break;
    run_placed(
        placement,
        [&](Communicator& communicator) {
          run_cases(
              communicator,
              {.counts = {(1 << 20) + 7}, .ops = ops, .dtypes = {DType::kInt32}, .in_place = {}});
        },
        {}, std::chrono::microseconds(50));
  }
  if (testing::kHasThreadSanitizer) return;
  run_placed("abb", [&](Communicator& communicator) {
    CaseTable table{.counts = {2'200'001},
                    .ops = {OpKind::kAllReduce, OpKind::kReduce},
                    .dtypes = {DType::kInt32},
                    .in_place = {false}};
    run_cases(communicator, table);
    table.counts = {700'003};
    table.ops = {OpKind::kReduceScatter};
    run_cases(communicator, table);
  });
}

// ---- the same bits everywhere

TEST_CASE("random floats have the same bits on all ranks") {
  std::vector<Algorithm> algorithms = kAlgorithms;
  algorithms.push_back(Algorithm::kAuto);
  for (const std::string placement : {"aaaa", "abcd", "abbab"})
    for (const Case& c : CaseTable{.counts = {1003, 20'011, kLongElems},
                                   .ops = {OpKind::kAllReduce},
                                   .algorithms = algorithms,
                                   .reductions = {Reduction::kSum, Reduction::kAvg},
                                   .in_place = {false},
                                   .is_random = true}
                             .of(4)) {
      if (c.num_elems == kLongElems && c.algorithm != Algorithm::kAuto) continue;
      CAPTURE(c.to_text());
      std::vector<oracle::Bytes> results(placement.size());
      run_placed(placement, [&](Communicator& communicator) {
        testing::CaseBuffers buffers(c, communicator.rank(), communicator.world_size());
        communicator.run(buffers.call(), testing::kPatient);
        // The boards reduce in rank order like the oracle; the others do not.
        if (placement == "aaaa" && c.algorithm != Algorithm::kRing) buffers.check();
        results[static_cast<std::size_t>(communicator.rank())] = buffers.result();
      });
      for (const oracle::Bytes& result : results) CHECK(result == results[0]);
    }
}

TEST_CASE("in rank order every algorithm gives the left-to-right sum, to the last bit") {
  constexpr std::size_t kLargest =
      testing::kHasThreadSanitizer ? 4003 : 2 * testing::kRingSlotBytes / sizeof(float) + 5;
  // A ring of several slices.
  constexpr std::size_t kMany = testing::kHasThreadSanitizer ? 300'001 : 1'200'001;
  // 16-bit types in the oracle round once per step. The oracle of test_order() in
  // test_collectives.py does not.
  const CaseTable table{.counts = {0, 1, 31, 1001},
                        .ops = {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter},
                        .algorithms = kAlgorithms,
                        .dtypes = {DType::kFloat32, DType::kFloat64},
                        .reductions = {Reduction::kSum, Reduction::kAvg},
                        .in_place = {},
                        .is_random = true};
  for (const std::string placement : {"aa", "aaa", "aaaaa", "abcd", "abcab"})
    run_placed(
        placement,
        [&](Communicator& communicator) {
          run_cases(communicator, table);
          CaseTable large = table;
          large.counts = {placement == "abcd" ? kMany : kLargest};
          large.dtypes = {DType::kFloat32};
          large.reductions = {placement == "aa" ? Reduction::kAvg : Reduction::kSum};
          run_cases(communicator, large);
        },
        {.is_rank_ordered = true}, std::chrono::microseconds(100));
}

// ---- bytes

std::uint64_t sent_by(Communicator& communicator, const Case& c, Algorithm counted) {
  const Stats::Counts before = communicator.stats().counts(c.op, counted);
  run_case(communicator, c);
  const Stats::Counts after = communicator.stats().counts(c.op, counted);
  expect(after.num_calls == before.num_calls + 1, "one more call of " + c.to_text());
  return after.sent_bytes - before.sent_bytes;
}

// Over messages the others send along trees: test_messages.cc has what they do.
TEST_CASE("the bytes of a call are those of its formula") {
  for (const char* placement : {"aa", "aaa", "aaaa", "abcd"}) {
    const bool is_memory = placement[0] == placement[1];
    run_placed(placement, [&](Communicator& communicator) {
      const auto world = static_cast<std::uint64_t>(communicator.world_size());
      const std::size_t num_elems = world * 1000;
      const std::uint64_t num_bytes = num_elems * sizeof(float);
      const bool is_root = communicator.rank() == 1;
      const auto check = [&](OpKind op, Algorithm algorithm, std::uint64_t expected) {
        const Algorithm counted = op == OpKind::kAllReduce ? algorithm : Algorithm::kDirect;
        const Case c{
            .op = op, .algorithm = algorithm, .root = rooted(op) ? 1 : -1, .num_elems = num_elems};
        const std::uint64_t sent = sent_by(communicator, c, counted);
        expect(sent == expected, std::to_string(expected) + " bytes, not " + std::to_string(sent) +
                                     ", of " + c.to_text());
      };
      check(OpKind::kAllReduce, Algorithm::kOneShot, (world - 1) * num_bytes);
      check(OpKind::kAllReduce, Algorithm::kTwoShot, 2 * (world - 1) * num_bytes / world);
      check(OpKind::kAllReduce, Algorithm::kRing, 2 * (world - 1) * num_bytes / world);
      if (!is_memory) return;
      check(OpKind::kReduceScatter, Algorithm::kAuto, (world - 1) * num_bytes);
      check(OpKind::kAllGather, Algorithm::kAuto, (world - 1) * num_bytes);
      check(OpKind::kBroadcast, Algorithm::kAuto, is_root ? (world - 1) * num_bytes : 0);
      check(OpKind::kReduce, Algorithm::kAuto, is_root ? 0 : num_bytes);
      check(OpKind::kGather, Algorithm::kAuto, is_root ? 0 : num_bytes);
      check(OpKind::kScatter, Algorithm::kAuto, is_root ? (world - 1) * num_bytes : 0);
      check(OpKind::kAllToAll, Algorithm::kAuto, (world - 1) * num_bytes);
    });
  }
}

TEST_CASE("where the ranks do not divide the count, the bytes of all add up") {
  for (const Algorithm algorithm : {Algorithm::kTwoShot, Algorithm::kRing}) {
    for (const std::size_t num_elems : {1U, 5U, 1003U, 300'001U}) {
      std::atomic<std::uint64_t> total = 0;
      run_ranks(3, [&](Communicator& communicator) {
        total += sent_by(communicator, {.algorithm = algorithm, .num_elems = num_elems}, algorithm);
      });
      CHECK(total == 2 * 2 * num_elems * sizeof(float));
    }
  }
}

// The bytes that this rank copies: its staged data, and the data that it copies from staging to its
// results.
TEST_CASE("the copied bytes of a call are those of its formula") {
  run_ranks(2, [&](Communicator& communicator) {
    constexpr std::uint64_t kBytes = 4000;
    const bool is_root = communicator.rank() == 0;
    const auto check = [&](OpKind op, Algorithm algorithm, bool is_in_place,
                           std::uint64_t expected) {
      const Algorithm counted = op == OpKind::kAllReduce ? algorithm : Algorithm::kDirect;
      const std::uint64_t before = communicator.stats().counts(op, counted).copied_bytes;
      run_case(communicator, {.op = op,
                              .algorithm = algorithm,
                              .root = rooted(op) ? 0 : -1,
                              .num_elems = kBytes / sizeof(float),
                              .is_in_place = is_in_place});
      const std::uint64_t copied = communicator.stats().counts(op, counted).copied_bytes - before;
      expect(copied == expected, std::to_string(expected) + " bytes copied, not " +
                                     std::to_string(copied) + ", of " + name_of(op));
    };
    check(OpKind::kAllReduce, Algorithm::kOneShot, false, kBytes);
    check(OpKind::kAllReduce, Algorithm::kTwoShot, false, kBytes + kBytes / 2);
    check(OpKind::kAllReduce, Algorithm::kRing, false, kBytes + kBytes / 2);
    check(OpKind::kReduceScatter, Algorithm::kAuto, false, kBytes);
    check(OpKind::kAllGather, Algorithm::kAuto, false, 3 * kBytes);
    check(OpKind::kAllGather, Algorithm::kAuto, true, 2 * kBytes);
    check(OpKind::kBroadcast, Algorithm::kAuto, false, kBytes);
    check(OpKind::kReduce, Algorithm::kAuto, false, is_root ? 0 : kBytes);
    check(OpKind::kGather, Algorithm::kAuto, false, is_root ? 2 * kBytes : kBytes);
    check(OpKind::kScatter, Algorithm::kAuto, false, is_root ? 2 * kBytes : kBytes);
    check(OpKind::kAllToAll, Algorithm::kAuto, false, 3 * kBytes);
    check(OpKind::kAllToAll, Algorithm::kAuto, true, 2 * kBytes);
  });
}

TEST_CASE("an all_reduce that asks for no algorithm gets one, and is counted under it") {
  run_ranks(2, [&](Communicator& communicator) {
    sent_by(communicator, {.num_elems = 10}, Algorithm::kOneShot);
    sent_by(communicator, {.num_elems = 100'000}, Algorithm::kTwoShot);
  });
  run_placed("aa",
             [&](Communicator& communicator) {
               sent_by(communicator, {.num_elems = 10}, Algorithm::kRing);
             },
             {.algorithm = Algorithm::kRing});
  run_placed("aabb", [&](Communicator& communicator) {
    for (const Algorithm algorithm : kAlgorithms)
      sent_by(communicator, {.algorithm = algorithm, .num_elems = 1003}, algorithm);
    sent_by(communicator, {.num_elems = 1003}, Algorithm::kHierarchical);
  });
}

}  // namespace
