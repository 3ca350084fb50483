// Collectives over several hosts against the oracle, and the bytes that cross between them.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>
#include <vector>

#include "collective_case.h"
#include "hosts_ranks.h"
#include "sanitizers.h"
#include "third_party/doctest/doctest.h"
#include "transport/messages/exchange.h"

namespace {

using namespace ringcomm;
using testing::Case;
using testing::expect;
using testing::MemoryNetwork;
using testing::run_case;
using testing::run_hosts_ranks;

constexpr OpKind kOps[] = {OpKind::kAllReduce, OpKind::kReduce,    OpKind::kReduceScatter,
                           OpKind::kAllGather, OpKind::kBroadcast, OpKind::kGather,
                           OpKind::kScatter,   OpKind::kAllToAll};
// Even, interleaved, uneven in all orders, one rank alone, more ranks than the other host twice.
const std::vector<std::string> kPlacements{"aabb", "abab",   "abbccc", "cbcabc",
                                           "aab",  "abbbbb", "abcabd"};

// For an all_reduce that does not go through the leaders: above 1 MiB between two hosts.
constexpr std::size_t kLongElems = 270'011;

bool rooted(OpKind op) {
  return op == OpKind::kReduce || op == OpKind::kBroadcast || op == OpKind::kGather ||
         op == OpKind::kScatter;
}

Case case_of(OpKind op, std::uint32_t salt, std::size_t num_elems, int world_size) {
  return {.op = op,
          .root = rooted(op) ? static_cast<int>(salt) % world_size : -1,
          .num_elems = num_elems,
          .is_in_place = salt % 3 == 0,
          .salt = salt};
}

TEST_CASE("hosts: every collective, shards even and uneven, wherever the ranks are") {
  for (const std::string& placement : kPlacements) {
    CAPTURE(placement);
    MemoryNetwork network(static_cast<int>(placement.size()), std::chrono::microseconds(100));
    run_hosts_ranks(network, placement, [&](Communicator& communicator) {
      expect(communicator.transport_description().find("between them") != std::string::npos,
             communicator.transport_description());
      std::uint32_t salt = 0;
      for (const std::size_t num_elems : {0U, 1U, 5U, 7U, 1001U, 17'011U}) {
        for (const OpKind op : kOps) {
          // No longer through the leaders.
          const bool is_long = op == OpKind::kAllReduce && num_elems > 10'000;
          Case c = case_of(op, ++salt, is_long ? kLongElems : num_elems, communicator.world_size());
          run_case(communicator, c);
          c.is_uneven = has_shards(op);
          if (c.is_uneven) run_case(communicator, c);
        }
        testing::barrier(communicator);
      }
    });
    CHECK(network.num_misfits() == 0);
  }
}

TEST_CASE("hosts: every reduction and dtype that has one") {
  MemoryNetwork network(3);
  run_hosts_ranks(network, "aba", [&](Communicator& communicator) {
    std::uint32_t salt = 0;
    for (int d = 0; d < kNumDTypes; ++d)
      for (int r = 0; r < kNumReductions; ++r)
        for (const OpKind op : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter}) {
          const auto dtype = static_cast<DType>(d);
          const auto reduction = static_cast<Reduction>(r);
          if (!oracle::has_meaning(reduction, dtype)) continue;
          Case c = case_of(op, ++salt, 131, 3);
          c.dtype = dtype;
          c.reduction = reduction;
          run_case(communicator, c);
        }
  });
}

// More than the maximum of others' data that a rank stages.
TEST_CASE("hosts: large buffers in pieces" * doctest::skip(testing::kHasThreadSanitizer)) {
  MemoryNetwork network(3);
  run_hosts_ranks(network, "abb", [&](Communicator& communicator) {
    std::uint32_t salt = 0;
    for (const OpKind op : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter}) {
      Case c = case_of(op, ++salt, op == OpKind::kReduceScatter ? 700'003 : 2'200'001, 3);
      c.dtype = DType::kInt32;
      run_case(communicator, c);
    }
  });
}

// The limits at which the code takes another way, in bytes: what an envelope carries, what is
// received before the next shard is sent, what has a tag of its size, what goes through leaders of
// two and of three hosts, and what is staged at a time in groups of 3 to 6 ranks.
constexpr std::size_t kLimits[] = {sizeof(MessageEnvelope::data), std::size_t{256} << 10,
                                   MessageTags::kMaxSized,        (std::size_t{2} << 20) / 3,
                                   (std::size_t{4} << 20) / 3,    (std::size_t{4} << 20) / 5,
                                   (std::size_t{4} << 20) / 6};
constexpr std::size_t kWord = sizeof(std::int64_t);

// Nothing, little, or one side or the other of a limit: for each pair something else.
std::size_t mixed_elems(std::uint32_t salt, int from, int to) {
  const std::uint32_t random =
      testing::mixed(salt * 64U + static_cast<std::uint32_t>(from * 8 + to));
  if (random % 4 == 0) return random / 4 % 2;
  return kLimits[1 + random % 2] / kWord + random / 8 % 2;
}

// With a shard over 1 MiB transports of two hosts waited for each other in a circle. How often each
// layout gets other shards: RINGCOMM_HOSTS_ROUNDS (`.ci/run stress`).
TEST_CASE("hosts: shards on both sides of every limit end on every layout" *
          doctest::skip(testing::kHasThreadSanitizer)) {
  const char* asked = std::getenv("RINGCOMM_HOSTS_ROUNDS");
  const auto num_rounds = static_cast<std::uint32_t>(asked != nullptr ? std::atoi(asked) : 1);
  const auto run_round = [&](Communicator& communicator, std::uint32_t salt) {
    for (const bool is_in_place : {false, true})
      run_case(communicator, {.op = OpKind::kAllToAll,
                              .dtype = DType::kInt64,
                              .num_elems = MessageTags::kMaxSized / kWord + 1,
                              .is_in_place = is_in_place,
                              .salt = salt});
    for (std::uint32_t idx = 0; idx < 3; ++idx)
      run_case(communicator, {.op = OpKind::kAllToAll,
                              .dtype = DType::kInt64,
                              .is_in_place = idx % 2 == 1,
                              .salt = 3 * salt + idx,
                              .is_uneven = true,
                              .elems_of = [&](int from, int to) {
                                return mixed_elems(3 * salt + idx, from, to);
                              }});
    for (const OpKind op : kOps)
      for (std::size_t idx = 0; idx < std::size(kLimits); ++idx) {
        // All of them, or for each operation another.
        if (num_rounds == 1 && idx != static_cast<std::size_t>(op) % std::size(kLimits)) continue;
        for (const std::size_t more : {0U, 1U}) {
          Case c = case_of(op, salt + static_cast<std::uint32_t>(more), kLimits[idx] / kWord + more,
                           communicator.world_size());
          c.dtype = DType::kInt64;
          run_case(communicator, c);
        }
      }
  };
  for (const std::string placement : {"aaab", "aaba", "aaabbb", "aabb", "aab", "aaaab", "aabbcc"}) {
    CAPTURE(placement);
    // Ranks of their own for each round, so that the bound of a hang is that of one.
    for (std::uint32_t salt = 0; salt < num_rounds; ++salt) {
      MemoryNetwork network(static_cast<int>(placement.size()));
      run_hosts_ranks(network, placement,
                      [&](Communicator& communicator) { run_round(communicator, salt); });
      CHECK(network.num_misfits() == 0);
    }
  }
}

TEST_CASE("hosts: random floats have the same bits on all ranks, short and long") {
  const std::string placement = "abbab";
  for (const std::size_t num_elems : {std::size_t{1003}, kLongElems}) {
    std::vector<oracle::Bytes> results(placement.size());
    MemoryNetwork network(static_cast<int>(placement.size()));
    run_hosts_ranks(network, placement, [&](Communicator& communicator) {
      testing::CaseBuffers buffers({.num_elems = num_elems, .is_random = true}, communicator.rank(),
                                   communicator.world_size());
      communicator.run(buffers.call(), testing::kPatient);
      results[static_cast<std::size_t>(communicator.rank())] = buffers.result();
    });
    for (const oracle::Bytes& result : results) CHECK(result == results[0]);
  }
}

// The oracle reduces in the order of the ranks.
TEST_CASE("hosts: in the order of the ranks, to the last bit") {
  MemoryNetwork network(5);
  run_hosts_ranks(
      network, "abcab",
      [&](Communicator& communicator) {
        std::uint32_t salt = 0;
        for (const OpKind op : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter})
          for (const std::size_t num_elems : {7U, 40'011U})
            for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg}) {
              Case c = case_of(op, ++salt, num_elems, 5);
              c.reduction = reduction;
              c.is_random = true;
              run_case(communicator, c);
            }
      },
      {.is_rank_ordered = true});
}

TEST_CASE("hosts: an algorithm that is asked for by name is one of ranks") {
  MemoryNetwork network(4);
  run_hosts_ranks(network, "aabb", [&](Communicator& communicator) {
    for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing}) {
      run_case(communicator, {.algorithm = algorithm, .num_elems = 1003});
      expect(communicator.stats().counts(OpKind::kAllReduce, algorithm).num_calls == 1,
             "counted under its name");
    }
    run_case(communicator, {.num_elems = 1003});
    expect(communicator.stats().counts(OpKind::kAllReduce, Algorithm::kHierarchical).num_calls == 1,
           "counted as hierarchical");
  });
}

// docs/design/messages.md has the formulas. Two hosts of two ranks; envelopes are not data.
TEST_CASE("hosts: what crosses between the hosts") {
  constexpr std::size_t kElems = 270'000;
  constexpr std::uint64_t kBytes = kElems * sizeof(float);
  struct Expectation {
    OpKind op;
    std::uint64_t bytes;  // sent by all ranks, of data too long for an envelope
  };
  for (const Expectation& expectation : {
           Expectation{OpKind::kAllReduce, 2 * kBytes},      // of the buffer: 2(H - 1)
           Expectation{OpKind::kReduceScatter, 4 * kBytes},  // of a shard: N(H - 1)
           Expectation{OpKind::kAllGather, 4 * kBytes},      // the same
           Expectation{OpKind::kBroadcast, kBytes},          // H - 1
           Expectation{OpKind::kReduce, kBytes},             // H - 1
           Expectation{OpKind::kGather, 2 * kBytes},         // of a shard, between hosts
           Expectation{OpKind::kScatter, 2 * kBytes},        // the same
           Expectation{OpKind::kAllToAll, 8 * kBytes},       // pairs of ranks on two hosts
       }) {
    MemoryNetwork network(4);
    run_hosts_ranks(network, "abba", [&](Communicator& communicator) {
      run_case(
          communicator,
          {.op = expectation.op, .root = rooted(expectation.op) ? 2 : -1, .num_elems = kElems});
    });
    std::uint64_t delivered = 0;
    for (int rank = 0; rank < 4; ++rank) delivered += network.delivered_bytes(rank);
    CAPTURE(name_of(expectation.op));
    CHECK(delivered >= expectation.bytes);
    CHECK(delivered <= expectation.bytes + 16 * 4096);  // envelopes
  }
}

}  // namespace
