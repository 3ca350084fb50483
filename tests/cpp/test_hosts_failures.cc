// Ranks on several hosts whose calls differ, or that die, leave, are late or fail: all ranks get
// the error.
#include <atomic>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "collective_case.h"
#include "hosts_ranks.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace std::chrono_literals;
using testing::Case;
using testing::error_of;
using testing::expect;
using testing::expect_error;
using testing::kPatient;
using testing::MemoryNetwork;
using testing::run_hosts_ranks;
using testing::within;

Error failure_of(Communicator& communicator, const Case& c, const WaitLimits& limits = kPatient) {
  testing::CaseBuffers buffers(c, communicator.rank(), communicator.world_size());
  return error_of([&] { communicator.run(buffers.call(), limits); });
}

const std::vector<Case> kCalls = {
    {.op = OpKind::kAllReduce, .num_elems = 10},
    {.op = OpKind::kAllReduce, .num_elems = 11},
    {.op = OpKind::kAllReduce, .num_elems = 270'000},
    {.op = OpKind::kAllReduce, .algorithm = Algorithm::kRing, .num_elems = 30'000},
    {.op = OpKind::kBroadcast, .root = 0, .num_elems = 3000},
    {.op = OpKind::kBroadcast, .root = 2, .num_elems = 3000},
    {.op = OpKind::kReduce, .root = 1, .num_elems = 3000},
    {.op = OpKind::kReduce, .root = 3, .num_elems = 3000},
    {.op = OpKind::kReduceScatter, .num_elems = 300},
    {.op = OpKind::kReduceScatter, .num_elems = 5000},
    {.op = OpKind::kAllGather, .num_elems = 5000},
    {.op = OpKind::kAllToAll, .num_elems = 20},
    {.op = OpKind::kAllToAll, .num_elems = 2000},
    {.op = OpKind::kGather, .root = 3, .num_elems = 20},
    {.op = OpKind::kScatter, .root = 3, .num_elems = 20},
    {.op = OpKind::kScatter, .root = 0, .num_elems = 20},
};

// A rank that only sends may hear of another rank's call in its next one.
Error failure_of_this_or_next(Communicator& communicator, const Case& c) {
  testing::CaseBuffers buffers(c, communicator.rank(), communicator.world_size());
  try {
    communicator.run(buffers.call(), kPatient);
  } catch (const Error& error) {
    return error;
  }
  return failure_of(communicator, kCalls[0]);
}

// Whatever the two calls, and whether one host makes the other call or one rank of it.
TEST_CASE("hosts: calls that differ") {
  const std::string placement = "abbca";
  for (std::size_t idx = 0; idx < 4 * kCalls.size(); ++idx) {
    const std::size_t usual = idx / 4;
    const std::size_t odd = (usual + (idx % 2 == 0 ? 1 : 9) + usual % 5) % kCalls.size();
    const bool is_whole_host = idx % 4 < 2;
    CAPTURE(kCalls[usual].to_text());
    CAPTURE(kCalls[odd].to_text());
    MemoryNetwork network(5, 100us);
    run_hosts_ranks(network, placement, [&](Communicator& communicator) {
      const int rank = communicator.rank();
      const bool is_odd = rank == 1 || (is_whole_host && rank == 2);
      const Case& c = kCalls[is_odd ? odd : usual];
      expect_error(failure_of_this_or_next(communicator, c), ErrorKind::kMismatch);
      // The group refuses further calls with the first cause.
      expect_error(failure_of(communicator, kCalls[0]), ErrorKind::kMismatch);
    });
    CHECK(network.num_misfits() == 0);
  }
}

TEST_CASE("hosts: both calls are named, and the ranks in the group's numbers") {
  for (const std::string placement : {"abab", "aaab", "baaa"}) {
    MemoryNetwork network(4);
    run_hosts_ranks(network, placement, [&](Communicator& communicator) {
      const bool is_odd = communicator.rank() == 3;
      const Case c{.op = is_odd ? OpKind::kBroadcast : OpKind::kReduce, .root = 0, .num_elems = 10};
      expect_error(failure_of_this_or_next(communicator, c), ErrorKind::kMismatch,
                   {"broadcast #0", "reduce #0"});
    });
  }
}

// Inside a host (ranks 1 and 3), where a digest of the sizes is compared, and between two.
TEST_CASE("hosts: shards that do not fit, in the group's numbers") {
  for (const int odd : {3, 0}) {
    MemoryNetwork network(4);
    run_hosts_ranks(network, "abcb", [&](Communicator& communicator) {
      const std::size_t num_elems = communicator.rank() == odd ? 20 : 24;
      for (const OpKind op : {OpKind::kAllGather, OpKind::kReduceScatter})
        expect_error(failure_of(communicator, {.op = op, .num_elems = num_elems}),
                     ErrorKind::kMismatch,
                     {odd == 0 ? "80 bytes" : "#0", odd == 0 ? "96 bytes" : "bytes",
                      "rank " + std::to_string(odd)});
    });
    CHECK(network.num_misfits() == 0);
  }
}

// Rank 0 is alone on its host: its connections close.
TEST_CASE("hosts: a rank dies") {
  for (const std::size_t num_elems : {10U, 270'000U}) {
    MemoryNetwork network(5, 200us);
    std::atomic<int> num_told = 0;
    run_hosts_ranks(network, "abbcc", [&](Communicator& communicator) {
      const Case c{.num_elems = num_elems};
      for (int i = 0; i < 3; ++i) testing::run_case(communicator, c);
      if (communicator.rank() == 0) {
        network.kill(0);
        testing::wait_until([&] { return num_told == 4; }, "all to be told");
        return;
      }
      const Error error = failure_of(communicator, c);
      ++num_told;
      expect_error(error, ErrorKind::kPeerDied, {"rank 0", "died"});
      expect(error.info().rank == 0, "the dead rank to be blamed");
    });
  }
}

TEST_CASE("hosts: a rank leaves") {
  for (const auto& [placement, leaver] :
       {std::pair("abba", 0), std::pair("abba", 1), std::pair("abba", 2), std::pair("aabc", 2)}) {
    MemoryNetwork network(4);
    run_hosts_ranks(network, placement, [&, leaver = leaver](Communicator& communicator) {
      const Case c{.num_elems = 100};
      testing::run_case(communicator, c);
      if (communicator.rank() == leaver) return;
      expect_error(failure_of(communicator, c), ErrorKind::kPeerDied,
                   {"rank " + std::to_string(leaver), "destroyed the group"});
    });
  }
}

TEST_CASE("hosts: a rank is late") {
  for (const int late : {0, 1, 2}) {
    MemoryNetwork network(3);
    std::atomic<int> num_told = 0;
    run_hosts_ranks(network, "abb", [&](Communicator& communicator) {
      const Case c{.num_elems = 100};
      testing::run_case(communicator, c);
      if (communicator.rank() == late) {
        testing::wait_until([&] { return num_told == 2; }, "all to be told");
        expect_error(failure_of(communicator, c), ErrorKind::kTimeout, {"200 ms"});
        return;
      }
      const Error error = failure_of(communicator, c, within(200ms));
      ++num_told;
      expect_error(error, ErrorKind::kTimeout, {"200 ms"});
    });
  }
}

TEST_CASE("hosts: a rank fails") {
  MemoryNetwork network(4);
  run_hosts_ranks(network, "abba", [&](Communicator& communicator) {
    if (communicator.rank() == 2) {
      communicator.abort("enough");
      return;
    }
    expect_error(failure_of(communicator, {.op = OpKind::kAllGather, .num_elems = 5}),
                 ErrorKind::kAborted, {"rank 2", "enough"});
  });
}

// Rank 1 has made the group, and waits for rank 0 in the memory of their host.
TEST_CASE("hosts: a rank that cannot make the group tells its host which rank is to blame") {
  const std::string placement = "aab";
  for (int round = 0; round < 6; ++round) {
    testing::MemoryStore store;
    MemoryNetwork network(3);
    testing::run_threads(3, [&](int rank) {
      const auto messages = [&](const std::string&,
                                const LookForRanks&) -> std::unique_ptr<Messenger> {
        if (rank != 0) return network.join(rank);
        throw Error({.kind = ErrorKind::kPeerDied, .rank = 2}, "rank 2 died");
      };
      const Error error = error_of([&] {
        Communicator communicator(store, rank, 3,
                                  {.host_id = {placement[static_cast<std::size_t>(rank)]}},
                                  testing::kBound, messages);
        testing::barrier(communicator);
      });
      expect_error(error, ErrorKind::kPeerDied, {"rank 2 died"});
      expect(error.info().rank == 2, "the dead rank to be blamed");
    });
  }
}

TEST_CASE("hosts: groups made again over one store") {
  testing::MemoryStore store;
  const std::string placement = "aab";
  for (int round = 0; round < 4; ++round) {
    MemoryNetwork network(3);
    testing::run_threads(3, [&](int rank) {
      Communicator communicator(store, rank, 3,
                                {.one_shot_max_bytes = round < 2 ? 0U : 4096U,
                                 .host_id = {placement[static_cast<std::size_t>(rank)]}},
                                testing::kBound, [&](const std::string&, const LookForRanks&) {
                                  return network.join(rank);
                                });
      testing::barrier(communicator);
      if (round % 2 == 0) communicator.abort("enough");
    });
  }
}

}  // namespace
