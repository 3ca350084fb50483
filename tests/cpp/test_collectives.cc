// Results of every collective against the oracle, bytes counted, and what a call leaves alone.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "collective_case.h"
#include "sanitizers.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"
#include "transport/shm/context.h"

namespace {

using namespace ringcomm;
using testing::Case;
using testing::expect;
using testing::kAlgorithms;
using testing::kPhaseBytes;
using testing::rooted;
using testing::run_case;
using testing::run_ranks;

constexpr OpKind kOthers[] = {OpKind::kReduce,    OpKind::kReduceScatter, OpKind::kAllGather,
                              OpKind::kBroadcast, OpKind::kGather,        OpKind::kScatter,
                              OpKind::kAllToAll};

// Nothing; fewer elements than ranks; one each; a longer chunk; many, and odd.
std::set<std::size_t> small_counts(int world_size) {
  const auto world = static_cast<std::size_t>(world_size);
  return {0, 1, world - 1, world, world + 1, 1001};
}

TEST_CASE("all_reduce of every algorithm, worlds 1 to 8") {
  for (int world_size = 1; world_size <= 8; ++world_size) {
    CAPTURE(world_size);
    run_ranks(world_size, [&](Communicator& communicator) {
      std::uint32_t salt = 0;
      for (const Algorithm algorithm : kAlgorithms)
        for (const std::size_t num_elems : small_counts(world_size))
          for (const bool is_in_place : {false, true})
            run_case(communicator, {.algorithm = algorithm,
                                    .num_elems = num_elems,
                                    .is_in_place = is_in_place,
                                    .salt = ++salt});
    });
  }
}

TEST_CASE("one_shot ends at fewer bytes with more ranks, or where a tuning says") {
  const auto limit_of = [](int world_size, std::size_t asked) {
    std::size_t limit = 0;
    while (choose_all_reduce(limit + 1, world_size, asked) == Algorithm::kOneShot) ++limit;
    return limit;
  };
  CHECK(limit_of(2, 0) == 256 << 10);
  CHECK(limit_of(4, 0) == 48 << 10);
  for (int world_size = 5; world_size <= 256; ++world_size) {
    const std::size_t limit = limit_of(world_size, 0);
    CHECK(limit <= limit_of(world_size - 1, 0));
    CHECK(limit * static_cast<std::size_t>(world_size) <= 256 << 10);
    CHECK(limit >= 1024);
  }
  for (const int world_size : {2, 64}) CHECK(limit_of(world_size, 5000) == 5000);
}

TEST_CASE("all_reduce of every reduction and dtype that has one") {
  run_ranks(4, [&](Communicator& communicator) { testing::run_every_reduction(communicator); });
}

TEST_CASE("the other collectives, worlds 1 to 8") {
  testing::run_cases_of_worlds(kOthers, small_counts, false);
}

TEST_CASE("the other collectives in bytes, in halves, and averaged") {
  run_ranks(3, [&](Communicator& communicator) {
    std::uint32_t salt = 0;
    for (const OpKind op : kOthers)
      for (const DType dtype : {DType::kByte, DType::kBFloat16, DType::kInt64, DType::kBool}) {
        if (dtype == DType::kByte && testing::reduces(op)) continue;
        const bool is_average = dtype == DType::kBFloat16 && testing::reduces(op);
        run_case(communicator, {.op = op,
                                .dtype = dtype,
                                .reduction = is_average ? Reduction::kAvg : Reduction::kMax,
                                .root = rooted(op) ? 1 : -1,
                                .num_elems = 517,
                                .salt = ++salt});
      }
  });
}

// Sizes: one phase, one element more or less, several phases and a rest.
TEST_CASE("collectives in one piece and in several" * doctest::skip(testing::kHasThreadSanitizer)) {
  constexpr std::size_t kPhaseElems = kPhaseBytes / sizeof(std::int32_t);
  run_ranks(3, [&](Communicator& communicator) {
    std::uint32_t salt = 0;
    const auto run = [&](OpKind op, Algorithm algorithm, std::size_t num_elems) {
      ++salt;
      run_case(communicator, {.op = op,
                              .dtype = DType::kInt32,
                              .algorithm = algorithm,
                              .root = rooted(op) ? 2 : -1,
                              .num_elems = num_elems,
                              .is_in_place = salt % 2 == 0,
                              .salt = salt});
    };
    for (const std::size_t num_elems : {kPhaseElems - 1, kPhaseElems, kPhaseElems + 1})
      run(OpKind::kAllReduce, Algorithm::kOneShot, num_elems);
    const std::size_t two_shot_elems = kPhaseElems / 3 * 3;
    for (const std::size_t num_elems : {two_shot_elems - 1, two_shot_elems, two_shot_elems + 1})
      run(OpKind::kAllReduce, Algorithm::kTwoShot, num_elems);
    run(OpKind::kAllReduce, Algorithm::kTwoShot, 2 * kPhaseElems + 5);
    run(OpKind::kAllReduce, Algorithm::kRing, 2 * kPhaseElems + 5);
    run(OpKind::kReduce, Algorithm::kAuto, 2 * kPhaseElems + 1);
    run(OpKind::kAllGather, Algorithm::kAuto, kPhaseElems + 1);
    for (const std::size_t num_elems : {kPhaseElems / 2, kPhaseElems / 2 + 1, 3 * kPhaseElems})
      run(OpKind::kBroadcast, Algorithm::kAuto, num_elems);
    for (const std::size_t num_elems : {kPhaseElems / 2, kPhaseElems / 2 + 1})
      run(OpKind::kReduceScatter, Algorithm::kAuto, num_elems);
    // A line less, for the table of sizes.
    constexpr std::size_t kShareElems = kPhaseElems - kLineBytes / sizeof(std::int32_t);
    for (const std::size_t num_elems : {kShareElems, kShareElems + 1, 3 * kShareElems})
      run(OpKind::kGather, Algorithm::kAuto, num_elems);
    for (const OpKind op : {OpKind::kScatter, OpKind::kAllToAll})
      for (const std::size_t num_elems : {kShareElems / 2, kShareElems / 2 + 1, kPhaseElems})
        run(op, Algorithm::kAuto, num_elems);
  });
}

// One slot's worth per chunk, one element more or less, many slots.
TEST_CASE("rings of several slots" * doctest::skip(testing::kHasThreadSanitizer)) {
  for (const std::size_t world_size : {2U, 3U})
    run_ranks(static_cast<int>(world_size), [&](Communicator& communicator) {
      std::uint32_t salt = 0;
      for (const std::size_t num_slices : {1U, 2U, 5U})
        for (const std::size_t extra_elems : {0U, 1U, 3U}) {
          const std::size_t full_elems =
              num_slices * testing::kRingSlotBytes / sizeof(float) * world_size;
          run_case(communicator, {.algorithm = Algorithm::kRing,
                                  .num_elems = full_elems - 1 + extra_elems,
                                  .is_in_place = salt % 2 == 0,
                                  .salt = ++salt});
        }
    });
}

// ---- the same bits everywhere

TEST_CASE("random floats have the same bits on all ranks") {
  constexpr int kWorld = 4;
  for (const Algorithm algorithm : kAlgorithms) {
    for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg}) {
      std::array<oracle::Bytes, kWorld> results;
      const Case c{
          .reduction = reduction, .algorithm = algorithm, .num_elems = 20'011, .is_random = true};
      run_ranks(kWorld, [&](Communicator& communicator) {
        testing::CaseBuffers buffers(c, communicator.rank(), kWorld);
        communicator.run(buffers.call(), testing::kPatient);
        // The boards reduce in rank order like the oracle; the ring does not.
        if (algorithm != Algorithm::kRing) buffers.check();
        results[static_cast<std::size_t>(communicator.rank())] = buffers.result();
      });
      for (int rank = 1; rank < kWorld; ++rank) CHECK(results[0] == results[rank]);
    }
  }
}

TEST_CASE("in rank order every algorithm gives the left-to-right sum, to the last bit") {
  constexpr unsigned kLargest =
      testing::kHasThreadSanitizer ? 4003 : 2 * testing::kRingSlotBytes / sizeof(float) + 5;
  // 16-bit types in the oracle round once per step. The oracle of test_order() in
  // test_collectives.py does not.
  for (const DType dtype : {DType::kFloat32, DType::kFloat64})
    for (const int world_size : {2, 3, 5}) {
      run_ranks(world_size,
                [&](Communicator& communicator) {
                  std::uint32_t salt = 0;
                  for (const Algorithm algorithm : kAlgorithms)
                    for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg})
                      for (const std::size_t num_elems : {0U, 1U, 31U, 1001U, kLargest})
                        run_case(communicator, {.dtype = dtype,
                                                .reduction = reduction,
                                                .algorithm = algorithm,
                                                .num_elems = num_elems,
                                                .is_in_place = salt % 2 == 0,
                                                .is_random = true,
                                                .salt = ++salt});
                },
                {.is_rank_ordered = true});
    }
}

// ---- bytes

std::uint64_t sent_by(Communicator& communicator, const Case& c, Algorithm counted) {
  const Stats::Counts before = communicator.stats().counts(c.op, counted);
  run_case(communicator, c);
  const Stats::Counts after = communicator.stats().counts(c.op, counted);
  expect(after.num_calls == before.num_calls + 1, "one more call of " + c.to_text());
  return after.sent_bytes - before.sent_bytes;
}

TEST_CASE("the bytes of a call are those of its formula") {
  for (const int world_size : {2, 3, 4}) {
    run_ranks(world_size, [&](Communicator& communicator) {
      const auto world = static_cast<std::uint64_t>(world_size);
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
  run_ranks(2,
            [&](Communicator& communicator) {
              sent_by(communicator, {.num_elems = 10}, Algorithm::kRing);
            },
            {.algorithm = Algorithm::kRing});
}

}  // namespace
