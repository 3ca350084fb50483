// Small calls with a root between hosts, whose root does not wait for its readers: how far it gets
// ahead of them, what they receive when it has gone on, died or left, and calls that differ.
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "hosts_ranks.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace std::chrono_literals;
using testing::Case;
using testing::CaseBuffers;
using testing::error_of;
using testing::expect;
using testing::expect_error;
using testing::kPatient;
using testing::MemoryNetwork;
using testing::run_case;
using testing::run_hosts_ranks;
using testing::wait_until;

Case broadcast_of(int root, std::uint32_t salt, std::size_t num_elems = 300) {
  return {.op = OpKind::kBroadcast, .root = root, .num_elems = num_elems, .salt = salt};
}

// The reader waits until the root has returned from a call that the reader has not begun: so the
// root does not wait for it. One envelope is the most that is on its way.
TEST_CASE("hosts: a root is one call ahead of its reader, and not more") {
  for (const std::string placement : {"ab", "aab", "abb"}) {
    CAPTURE(placement);
    const int world_size = static_cast<int>(placement.size());
    MemoryNetwork network(world_size);
    std::atomic<std::uint32_t> num_sent = 0;
    run_hosts_ranks(network, placement, [&](Communicator& communicator) {
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
    CAPTURE(placement);
    const int world_size = static_cast<int>(placement.size());
    MemoryNetwork network(world_size, 30us);
    run_hosts_ranks(network, placement, [&](Communicator& communicator) {
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
    });
    CHECK(network.num_misfits() == 0);
  }
}

// What it has sent arrives, and the call after it raises.
TEST_CASE("hosts: a root sends and dies or leaves") {
  for (const bool dies : {true, false}) {
    CAPTURE(dies);
    MemoryNetwork network(2);
    std::atomic<bool> has_gone = false;
    std::atomic<bool> is_told = false;
    run_hosts_ranks(network, "ab", [&](Communicator& communicator) {
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
      CaseBuffers buffers(broadcast_of(0, 2), 1, 2);
      const Error error = error_of([&] { communicator.run(buffers.call(), kPatient); });
      is_told = true;
      expect_error(error, ErrorKind::kPeerDied, {"rank 0", dies ? "died" : "destroyed the group"});
    });
  }
}

TEST_CASE("hosts: a reader dies behind its root") {
  MemoryNetwork network(3);
  std::atomic<bool> is_dead = false;
  std::atomic<int> num_told = 0;
  run_hosts_ranks(network, "abc", [&](Communicator& communicator) {
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

// A rank that only sends may hear of the others' call in its next one.
std::optional<Error> failure_of(Communicator& communicator, const Case& c) {
  CaseBuffers buffers(c, communicator.rank(), communicator.world_size());
  try {
    communicator.run(buffers.call(), kPatient);
  } catch (const Error& error) {
    return error;
  }
  return {};
}

// Rank 2, a root that receives from both, waits for rank 0 first, which is the one to send.
TEST_CASE("hosts: a gather to another host than that of an all_reduce") {
  MemoryNetwork network(3);
  run_hosts_ranks(network, "aab", [&](Communicator& communicator) {
    const bool is_odd = communicator.rank() == 2;
    const Case c{.op = is_odd ? OpKind::kGather : OpKind::kAllReduce,
                 .root = is_odd ? 2 : -1,
                 .num_elems = 20};
    const std::optional<Error> error = failure_of(communicator, c);
    expect(error.has_value(), "an error");
    expect_error(*error, ErrorKind::kMismatch);
  });
}

// Whichever ranks make the other call, every rank has the error, and no wait is left: also where
// two ranks take each other for the root, or each itself.
TEST_CASE("hosts: any ranks with another root or call") {
  for (const std::string placement : {"ab", "abc", "abcd", "aabb", "abab"}) {
    const int world_size = static_cast<int>(placement.size());
    std::vector<Case> calls = {{.op = OpKind::kAllReduce, .num_elems = 10},
                               {.op = OpKind::kAllToAll, .num_elems = 20}};
    for (int root = 0; root < world_size; ++root) {
      calls.push_back(broadcast_of(root, 0));
      calls.push_back({.op = OpKind::kReduce, .root = root, .num_elems = 10});
    }
    for (std::size_t pair = 0; pair < calls.size() * calls.size(); ++pair) {
      const Case& usual = calls[pair / calls.size()];
      const Case& odd = calls[pair % calls.size()];
      if (&usual >= &odd) continue;
      for (int odd_ranks = 1; odd_ranks < (1 << world_size) - 1; ++odd_ranks) {
        // All of them have passed; with four ranks there are 1,890, of 15 ms each. In a tree, two
        // broadcasts are the calls where a header may not wait for the data.
        const bool is_of_trees = placement == "abcd" && usual.op == odd.op;
        if (world_size > 3 && !is_of_trees && (pair + static_cast<std::size_t>(odd_ranks)) % 11 > 0)
          continue;
        CAPTURE(placement);
        CAPTURE(usual.to_text());
        CAPTURE(odd.to_text());
        CAPTURE(odd_ranks);
        MemoryNetwork network(world_size);
        run_hosts_ranks(network, placement, [&](Communicator& communicator) {
          const Case& c = (odd_ranks >> communicator.rank() & 1) != 0 ? odd : usual;
          std::optional<Error> error = failure_of(communicator, c);
          if (!error) error = failure_of(communicator, calls[0]);
          expect(error.has_value(), "an error");
          expect_error(*error, ErrorKind::kMismatch);
        });
        CHECK(network.num_misfits() == 0);
      }
    }
  }
}

}  // namespace
