// Collectives over several hosts: sizes around every limit, the bytes that cross between hosts, and
// roots that get ahead. Their other results: test_collectives.cc.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "memory_messages.h"
#include "third_party/doctest/doctest.h"
#include "transport/messages/exchange.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using testing::error_of;
using namespace std::chrono_literals;

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
    for (std::size_t idx = 0; idx < std::size(kLimits); ++idx) {
      // All of them, or for each operation another.
      std::vector<OpKind> ops = testing::kAllOps;
      std::erase_if(ops, [&](OpKind op) {
        return num_rounds == 1 && idx != static_cast<std::size_t>(op) % std::size(kLimits);
      });
      testing::run_cases(communicator, {.counts = {kLimits[idx] / kWord, kLimits[idx] / kWord + 1},
                                        .ops = ops,
                                        .dtypes = {DType::kInt64},
                                        .in_place = {}});
    }
  };
  for (const std::string placement : {"aaab", "aaba", "aaabbb", "aabb", "aab", "aaaab", "aabbcc"}) {
    // Ranks of their own for each round, so that the bound of a hang is that of one.
    for (std::uint32_t salt = 0; salt < num_rounds; ++salt)
      run_placed(placement, [&](Communicator& communicator) { run_round(communicator, salt); });
  }
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
    run_placed(network, "abba", [&](Communicator& communicator) {
      run_case(communicator, {.op = expectation.op,
                              .root = testing::rooted(expectation.op) ? 2 : -1,
                              .num_elems = kElems});
    });
    std::uint64_t delivered = 0;
    for (int rank = 0; rank < 4; ++rank) delivered += network.delivered_bytes(rank);
    CAPTURE(name_of(expectation.op));
    CHECK(delivered >= expectation.bytes);
    CHECK(delivered <= expectation.bytes + 16 * 4096);  // envelopes
  }
}

// ---- Small calls with a root, which does not wait for its readers: how far it gets ahead of them,
// and what they receive when it has gone on, died or left.

Case broadcast_of(int root, std::uint32_t salt, std::size_t num_elems = 300) {
  return {.op = OpKind::kBroadcast, .root = root, .num_elems = num_elems, .salt = salt};
}

// The reader waits until the root has returned from a call that the reader has not begun: so the
// root does not wait for it. One envelope is the most that is on its way.
TEST_CASE("hosts: a root is one call ahead of its reader, and not more") {
  for (const std::string placement : {"ab", "aab", "abb"}) {
    std::atomic<std::uint32_t> num_sent = 0;
    run_placed(placement, [&](Communicator& communicator) {
      const int rank = communicator.rank();
      const bool is_with_root = placement[static_cast<std::size_t>(rank)] == placement[0];
      run_case(communicator, broadcast_of(0, 0));
      for (std::uint32_t i = 1; i < 200; ++i) {
        if (!is_with_root) {
          wait_until([&] { return num_sent >= i; }, "the root to go on");
          expect(num_sent <= i, "the root to be one call ahead");
        }
        run_case(communicator, broadcast_of(0, i));
        if (rank == 0) ++num_sent;
      }
    });
  }
}

// Each rank as the root in turn, other calls in between, and each rank late at times.
TEST_CASE("hosts: roots in turn, among other calls") {
  constexpr OpKind kOps[] = {OpKind::kBroadcast, OpKind::kBroadcast, OpKind::kReduce,
                             OpKind::kScatter,   OpKind::kAllReduce, OpKind::kBroadcast,
                             OpKind::kGather,    OpKind::kAllToAll,  OpKind::kAllGather};
  for (const std::string placement : {"ab", "abc", "abcd", "abcde", "aab", "abba", "abbca"}) {
    const int world_size = static_cast<int>(placement.size());
    run_placed(
        placement,
        [&](Communicator& communicator) {
          for (std::uint32_t salt = 0; salt < 150; ++salt) {
            const OpKind op = kOps[salt % std::size(kOps)];
            if (salt % 7 == static_cast<std::uint32_t>(communicator.rank()))
              std::this_thread::sleep_for(300us);
            // Within an envelope, beside it, and nothing.
            const std::size_t num_elems = salt % 5 == 0 ? 20'000 : salt % 11 == 0 ? 0 : 100 + salt;
            run_case(communicator,
                     {.op = op,
                      .root = testing::rooted(op) ? static_cast<int>(salt / 2) % world_size : -1,
                      .num_elems = num_elems,
                      .salt = salt});
          }
        },
        {}, 30us);
  }
}

// What it has sent arrives, and the call after it raises.
TEST_CASE("hosts: a root sends and dies or leaves") {
  for (const bool dies : {true, false}) {
    CAPTURE(dies);
    MemoryNetwork network(2);
    std::atomic<bool> has_gone = false;
    std::atomic<bool> is_told = false;
    run_placed(network, "ab", [&](Communicator& communicator) {
      run_case(communicator, broadcast_of(0, 0));
      if (communicator.rank() == 0) {
        run_case(communicator, broadcast_of(0, 1));
        if (dies) network.kill(0);
        has_gone = true;
        if (dies) wait_until([&] { return is_told.load(); }, "the reader to be told");
        return;
      }
      wait_until([&] { return has_gone.load(); }, "the root to go");
      if (!dies) std::this_thread::sleep_for(20ms);  // and to close its connections
      run_case(communicator, broadcast_of(0, 1));
      const Error error = error_of([&] { run_case(communicator, broadcast_of(0, 2)); });
      is_told = true;
      expect_error(error, ErrorKind::kPeerDied, {"rank 0", dies ? "died" : "destroyed the group"});
    });
  }
}

TEST_CASE("hosts: a reader dies behind its root") {
  MemoryNetwork network(3);
  std::atomic<bool> is_dead = false;
  std::atomic<int> num_told = 0;
  run_placed(network, "abc", [&](Communicator& communicator) {
    run_case(communicator, broadcast_of(0, 0));
    if (communicator.rank() == 1) {
      network.kill(1);
      is_dead = true;
      wait_until([&] { return num_told == 2; }, "the others to be told");
      return;
    }
    wait_until([&] { return is_dead.load(); }, "a death");
    const Error error = error_of([&] {
      for (std::uint32_t i = 1;; ++i) run_case(communicator, broadcast_of(0, i));
    });
    ++num_told;
    expect_error(error, ErrorKind::kPeerDied, {"rank 1", "died"});
  });
}

}  // namespace
