// How a group ends, over shared memory, over messages and over hosts: every rank gets an error of
// the right kind in bounded time, names in it.
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "collective_case.h"
#include "memory_messages.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using testing::error_of;
using namespace std::chrono_literals;

// ---- calls that differ

struct Call {
  Case c;
  std::string text;  // of every error about it and a neighbour
};

// Neighbours differ in one field of the header, in algorithms that wait for each other differently,
// or in all. Of the same operation there are calls of one envelope and of many slices.
const std::vector<Call>& calls() {
  static const std::vector<Call> all = {
      {{.op = OpKind::kBarrier}, "barrier #0"},
      {{.num_elems = 8}, "all_reduce #0 (sum, float32"},
      {{.dtype = DType::kInt32, .num_elems = 8}, "int32"},
      {{.reduction = Reduction::kMax, .num_elems = 8}, "(max"},
      {{.num_elems = 100}, "400 bytes"},
      {{.num_elems = 101}, "404 bytes"},
      {{.num_elems = 270'000}, "1080000 bytes"},
      {{.algorithm = Algorithm::kOneShot, .num_elems = 4000}, "one_shot"},
      {{.algorithm = Algorithm::kRing, .num_elems = 4000}, "ring"},
      {{.algorithm = Algorithm::kTwoShot, .num_elems = 4000}, "two_shot"},
      {{.algorithm = Algorithm::kRing, .num_elems = 30'000}, "120000 bytes"},
      {{.op = OpKind::kBroadcast, .root = 0, .num_elems = 3000}, "root 0"},
      {{.op = OpKind::kBroadcast, .root = 2, .num_elems = 3000}, "root 2"},
      {{.op = OpKind::kBroadcast, .root = 1, .num_elems = 300'000}, "broadcast #0"},
      {{.op = OpKind::kReduceScatter, .num_elems = 300'000}, "reduce_scatter #0"},
      {{.op = OpKind::kReduceScatter, .num_elems = 300}, "1200 bytes"},
      {{.op = OpKind::kReduce, .root = 1, .num_elems = 0}, "reduce #0"},
      {{.op = OpKind::kAllGather, .num_elems = 0}, "all_gather #0"},
      {{.op = OpKind::kReduce, .root = 1, .num_elems = 3000}, "root 1"},
      {{.op = OpKind::kReduce, .root = 3, .num_elems = 3000}, "root 3"},
      {{.op = OpKind::kAllGather, .num_elems = 20}, "80 bytes"},
      {{.op = OpKind::kAllGather, .num_elems = 300'000}, "1200000 bytes"},
      {{.op = OpKind::kAllToAll, .num_elems = 20}, "all_to_all #0"},
      {{.op = OpKind::kAllToAll, .num_elems = 2000}, "8000 bytes"},
      {{.op = OpKind::kGather, .root = 3, .num_elems = 20}, "gather #0"},
      {{.op = OpKind::kScatter, .root = 3, .num_elems = 20}, "scatter #0"},
      {{.op = OpKind::kScatter, .root = 0, .num_elems = 20}, "root 0"},
  };
  return all;
}

Error failure_of(Communicator& communicator, const Case& c, const WaitLimits& limits = kPatient) {
  return error_of([&] { run_case(communicator, c, limits); });
}

// Of several ranks' `usual` and some ranks' `odd` call.
void run_different(const std::string& placement, const std::string& odd_ranks, const Call& usual,
                   const Call& odd, std::chrono::microseconds max_delay = 100us) {
  CAPTURE(odd_ranks);
  CAPTURE(usual.c.to_text());
  CAPTURE(odd.c.to_text());
  const std::size_t num_hosts = std::set(placement.begin(), placement.end()).size();
  const bool is_mixed = num_hosts > 1 && num_hosts < placement.size();
  std::atomic<int> num_told = 0;
  run_placed(
      placement,
      [&](Communicator& communicator) {
        const bool is_odd =
            odd_ranks.find(std::to_string(communicator.rank())) != std::string::npos;
        const Case& mine = (is_odd ? odd : usual).c;
        std::optional<Error> error;
        try {
          run_case(communicator, mine);
          // A part that only sends may end before the failure is noticed, and so may one inside a
          // host. The next call raises it.
          expect(is_mixed || mine.root >= 0, "only of a tree some part to succeed");
        } catch (const Error& raised) {
          error = raised;
          expect(raised.info().op == name_of(mine.op) && raised.info().seq == 0, "its own call");
        }
        if (!error) error = failure_of(communicator, {.op = OpKind::kBarrier});
        // Where ranks of a host stand for others, an error may have no more than the names.
        expect_error(*error, ErrorKind::kMismatch,
                     is_mixed ? std::vector{name_of(usual.c.op) + std::string(" #0"),
                                            name_of(odd.c.op) + std::string(" #0")}
                              : std::vector{usual.text, odd.text});
        // A rank that leaves is another cause: none does before all know of the first one.
        ++num_told;
        wait_until([&] { return num_told == communicator.world_size(); }, "all to be told");
        // The first cause stays, word for word, whatever is called or fails later.
        communicator.abort("too late");
        expect_error(failure_of(communicator, {.num_elems = 10}), ErrorKind::kMismatch,
                     {error->what()});
        expect_error(error_of([&] { communicator.submit(Collective{}, kPatient, {}); }),
                     ErrorKind::kMismatch, {error->what()});
      },
      {}, max_delay);
  CHECK(num_told == static_cast<int>(placement.size()));
}

TEST_CASE("a rank that calls something else ends the group for all, with both calls named") {
  const std::size_t num = calls().size();
  for (std::size_t usual = 0; usual < num; ++usual)
    for (const auto& [placement, odd_ranks, distance] : {std::tuple("aaaa", "0", 1),
                                                         {"aaaa", "2", 1},
                                                         {"abcd", "2", 1},
                                                         {"abbca", "1", 1},
                                                         {"abbca", "12", 9},
                                                         {"aaab", "3", 1}})
      run_different(placement, odd_ranks, calls()[usual], calls()[(usual + distance) % num]);
}

// Rank 2, a root that receives from both, waits for rank 0 first, which is the one to send.
TEST_CASE("a gather to another host than that of an all_reduce") {
  run_different("aab", "2", {{.num_elems = 20}, ""},
                {{.op = OpKind::kGather, .root = 2, .num_elems = 20}, ""});
}

// Also where two ranks take each other for the root, or each itself.
TEST_CASE("whichever ranks have another root or call, all have the error, and no wait is left") {
  for (const std::string placement : {"ab", "abc", "abcd", "aabb", "abab"}) {
    const int world_size = static_cast<int>(placement.size());
    std::vector<Case> all = {{.num_elems = 10}, {.op = OpKind::kAllToAll, .num_elems = 20}};
    for (int root = 0; root < world_size; ++root) {
      all.push_back({.op = OpKind::kBroadcast, .root = root, .num_elems = 300});
      all.push_back({.op = OpKind::kReduce, .root = root, .num_elems = 10});
    }
    for (std::size_t pair = 0; pair < all.size() * all.size(); ++pair) {
      const Case& usual = all[pair / all.size()];
      const Case& odd = all[pair % all.size()];
      if (&usual >= &odd) continue;
      for (int set = 1; set < (1 << world_size) - 1; ++set) {
        // All of them have passed; with four ranks there are 1,890, of 15 ms each. In a tree, two
        // broadcasts are the calls where a header may not wait for the data.
        const bool is_of_trees = placement == "abcd" && usual.op == odd.op;
        if (world_size > 3 && !is_of_trees && (pair + static_cast<std::size_t>(set)) % 11 > 0)
          continue;
        std::string odd_ranks;
        for (int rank = 0; rank < world_size; ++rank)
          if ((set >> rank & 1) != 0) odd_ranks += std::to_string(rank);
        run_different(placement, odd_ranks, {usual, ""}, {odd, ""}, 0us);
      }
    }
  }
}

// Inside a host of several (ranks 1 and 3) a digest of the sizes is compared.
TEST_CASE("shards that do not fit are named with their rank and both sizes") {
  for (const auto& [placement, odd] : {std::pair("abc", 1), {"abcb", 3}, {"abcb", 0}})
    run_placed(placement, [odd = odd](Communicator& communicator) {
      const std::size_t num_elems = communicator.rank() == odd ? 20 : 24;
      for (const OpKind op : {OpKind::kAllGather, OpKind::kReduceScatter})
        expect_error(failure_of(communicator, {.op = op, .num_elems = num_elems}),
                     ErrorKind::kMismatch,
                     {odd == 3 ? "#0" : "80 bytes", odd == 3 ? "bytes" : "96 bytes",
                      "rank " + std::to_string(odd)});
    });
}

TEST_CASE("a call that others do not make at all is a mismatch too, by its number") {
  for (const char* placement : {"aaa", "abc", "aab"})
    run_placed(placement, [](Communicator& communicator) {
      testing::barrier(communicator);
      expect_error(error_of([&] {
                     if (communicator.rank() == 1) testing::barrier(communicator);
                     run_case(communicator, {.num_elems = 5});
                   }),
                   ErrorKind::kMismatch, {"all_reduce #1", "barrier #1"});
    });
}

TEST_CASE("submitted calls behind a failed one fail with it") {
  for (const char* placement : {"aa", "ab"})
    run_placed(placement, [](Communicator& communicator) {
      std::atomic<int> num_failed = 0;
      CaseBuffers small({.num_elems = 1}, communicator.rank(), 2);
      CaseBuffers large({.num_elems = 2}, communicator.rank(), 2);
      const auto count = [&](const std::exception_ptr& error) {
        if (error != nullptr) ++num_failed;
      };
      const bool is_first = communicator.rank() == 0;
      OrderedQueue::Request last;
      try {
        communicator.submit((is_first ? small : large).call(), kPatient, count);
        for (int i = 0; i < 3; ++i) last = communicator.submit(small.call(), kPatient, count);
      } catch (const Error&) {  // it had failed before the last was submitted
        return communicator.queue().drain({});
      }
      communicator.queue().wait(last, {});
      expect(num_failed == 4, "four failures");
    });
}

// ---- ranks that are late, die, leave or give up

// Of several hosts' ranks some wait for one that waits for the late one.
TEST_CASE(
    "a rank that does not arrive is a timeout that names it, and learns of it when it arrives") {
  for (const auto& [placement, late] :
       {std::pair("aaaa", 3), {"abc", 1}, {"abb", 0}, {"abb", 1}, {"abb", 2}}) {
    std::atomic<int> num_told = 0;
    run_placed(placement, [&, late = late,
                           is_mixed = *placement != placement[1] &&
                                      placement[1] == placement[2]](Communicator& communicator) {
      const int world_size = communicator.world_size();
      run_case(communicator, {.num_elems = 100});
      if (communicator.rank() != late) {
        const Error error = failure_of(communicator, {.num_elems = 1000}, within(200ms));
        expect_error(error, ErrorKind::kTimeout,
                     {"all_reduce #1", "200 ms", is_mixed ? "" : "rank " + std::to_string(late)});
        expect(is_mixed || error.info().rank == late, "the late rank to be blamed");
        ++num_told;
        return wait_until([&] { return num_told == world_size; }, "the late rank through");
      }
      wait_until([&] { return num_told == world_size - 1; }, "the others' time-outs");
      const Error error = error_of([&] {
        run_case(communicator, {.num_elems = 1000});  // all it needs may be there
        testing::barrier(communicator);
      });
      expect_error(error, ErrorKind::kTimeout, {"failed", "all_reduce #1", "200 ms"});
      ++num_told;
    });
  }
}

TEST_CASE("a timeout in the middle of a ring is reported to the neighbour") {
  std::atomic<bool> is_over = false;
  run_ranks(2, [&](Communicator& communicator) {
    const bool is_late = communicator.rank() == 1;
    const auto ring = [&] {
      run_case(communicator, {.algorithm = Algorithm::kRing, .num_elems = 4000},
               within(is_late ? std::chrono::milliseconds(testing::kBound) : 3000ms));
    };
    ring();
    if (is_late) wait_until([&] { return is_over.load(); }, "the time-out of rank 0");
    expect_error(error_of([&] {
                   ring();  // its headers may all be there, and then nothing
                   ring();
                 }),
                 ErrorKind::kTimeout, {"3000 ms"});
    is_over = true;
  });
}

TEST_CASE("a rank that destroys its side has left for the others, after its earlier calls") {
  for (const auto& [placement, leaver] :
       {std::pair("aaa", 1), {"abc", 1}, {"abba", 0}, {"abba", 1}, {"abba", 2}, {"aabc", 2}}) {
    std::atomic<int> num_told = 0;
    run_placed(placement, [&, leaver = leaver](Communicator& communicator) {
      run_case(communicator, {.algorithm = Algorithm::kRing, .num_elems = 1000});
      if (communicator.rank() == leaver) return;
      const Error error = failure_of(communicator, {.num_elems = 100});
      expect_error(error, ErrorKind::kPeerDied,
                   {"rank " + std::to_string(leaver), "has destroyed the group"});
      expect(error.info().rank == leaver, "the rank that left to be blamed");
      ++num_told;
      wait_until([&] { return num_told == communicator.world_size() - 1; }, "all told");
    });
  }
}

TEST_CASE("a rank that left is noticed by ranks that wait for another one") {
  std::atomic<bool> is_told = false;
  run_ranks(3, [&](Communicator& communicator) {
    testing::barrier(communicator);
    if (communicator.rank() == 2) return;  // leaves
    if (communicator.rank() == 0)          // computes, and is waited for first
      return wait_until([&] { return is_told.load(); }, "rank 1 told of the end of rank 2");
    const Error error = failure_of(communicator, {.op = OpKind::kBarrier});
    expect_error(error, ErrorKind::kPeerDied, {"rank 2", "has destroyed"});
    expect(error.info().rank == 2, "rank 2 to be blamed");
    is_told = true;
  });
}

TEST_CASE("abort wakes waiting threads of all ranks") {
  for (const char* placement : {"aaa", "abc", "abba"}) {
    std::atomic<bool> is_aborted = false;
    run_placed(placement, [&](Communicator& communicator) {
      testing::barrier(communicator);
      std::thread aborter;
      if (communicator.rank() == 0)
        aborter = std::thread([&] {
          std::this_thread::sleep_for(50ms);
          communicator.abort("because of the test");
          is_aborted = true;
        });
      if (communicator.rank() == 2)  // in its next call, however late
        wait_until([&] { return is_aborted.load(); }, "the abort");
      const auto begin = std::chrono::steady_clock::now();
      const Error error = error_of([&] {
        testing::barrier(communicator);
        testing::barrier(communicator);
      });
      if (aborter.joinable()) aborter.join();
      expect_error(error, ErrorKind::kAborted, {"because of the test"});
      expect(error.info().rank == 0, "rank 0 to be blamed");
      if (communicator.rank() != 0) expect_error(error, ErrorKind::kAborted, {"rank 0", "failed"});
      expect(std::chrono::steady_clock::now() - begin < 10s, "an end in time");
      expect_error(failure_of(communicator, {.op = OpKind::kBarrier}), ErrorKind::kAborted);
    });
  }
}

TEST_CASE("abort in a group of one") {
  run_ranks(1, [](Communicator& communicator) {
    testing::barrier(communicator);
    communicator.abort("alone");
    expect_error(failure_of(communicator, {.op = OpKind::kBarrier}), ErrorKind::kAborted,
                 {"rank 0/1", "alone"});
  });
}

// Over messages a thread of the queue waits, and the caller's ends it.
TEST_CASE("is_interrupted ends a wait, and the others' with it") {
  for (const char* placement : {"aaa", "abc", "abb"}) {
    const ErrorKind kind =
        *placement == placement[2] ? ErrorKind::kInterrupted : ErrorKind::kAborted;
    std::atomic<bool> is_over = false;
    run_placed(placement, [&](Communicator& communicator) {
      testing::barrier(communicator);
      if (communicator.rank() == 2)
        wait_until([&] { return is_over.load(); }, "the interrupted wait");
      const WaitLimits limits{.timeout = testing::kBound,
                              .is_interrupted = [&] { return communicator.rank() == 0; }};
      const Error error = error_of([&] {
        testing::barrier(communicator, limits);
        testing::barrier(communicator, limits);
      });
      expect_error(error, kind, {"interrupted by a signal"});
      if (communicator.rank() == 0) is_over = true;
    });
  }
}

TEST_CASE("is_interrupted is asked behind another thread's call too") {
  std::atomic<bool> is_over = false;
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      wait_until([&] { return is_over.load(); }, "the interrupted wait");
      expect_error(error_of([&] {
                     for (;;) testing::barrier(communicator);
                   }),
                   ErrorKind::kAborted, {"interrupted"});
      return;
    }
    std::exception_ptr ended;
    std::atomic<bool> is_running = false;
    const WaitLimits in_front{.timeout = testing::kBound, .is_interrupted = [&] {
                                is_running = true;
                                return false;
                              }};
    communicator.submit({{.op = OpKind::kBarrier}}, in_front,
                        [&](const std::exception_ptr& error) { ended = error; });
    wait_until([&] { return is_running.load(); }, "the call in front");
    const WaitLimits limits{.timeout = testing::kBound, .is_interrupted = [] { return true; }};
    expect_error(error_of([&] { testing::barrier(communicator, limits); }), ErrorKind::kAborted,
                 {"interrupted"});
    expect(ended != nullptr, "the call in front ended as well");
    is_over = true;
  });
}

// ---- groups that are not made, and those after them

// What the ranks of an attempt to make a group have in common.
struct Attempt {
  int failing;  // the rank whose store fails as it looks for the others: they have all found it
  std::atomic<int> num_ahead = 0;  // of the others' requests for what comes after
};
class AttemptStore final : public testing::ForwardingStore {
 public:
  AttemptStore(KeyValueStore& whole, Attempt& attempt, int rank)
      : ForwardingStore(whole), attempt_(attempt), rank_(rank), own_("/" + std::to_string(rank)) {}
  void set(const std::string& key, const std::string& value) override {
    look(key);
    has_set_ = true;
    ForwardingStore::set(key, value);
  }
  void set_first(const std::string& key, const std::string& value) override { set(key, value); }
  std::optional<std::string> try_get(const std::string& key) override {
    look(key);
    const bool is_of_another =
        key == "ringcomm/ranks" || (key.starts_with("ringcomm/rank/") && !key.ends_with(own_));
    if (rank_ == attempt_.failing && is_of_another && has_set_) {
      wait_until([&] { return attempt_.num_ahead > 0; }, "the others");
      throw Error({.kind = ErrorKind::kSystem, .rank = rank_}, "no store");
    }
    return ForwardingStore::try_get(key);
  }
  std::unique_ptr<KeyValueStore> clone() override { return std::make_unique<AttemptStore>(*this); }

 private:
  void look(const std::string& key) {
    if (key.starts_with("ringcomm/messages/")) ++attempt_.num_ahead;
  }

  Attempt& attempt_;
  int rank_;
  std::string own_;
  bool has_set_ = false;  // its record
};

// The others wait when it fails. They hear of that and try again, or meet its next attempt.
TEST_CASE("a group over messages after an attempt in which one rank failed before the others") {
  for (int failing = 0; failing < 3; ++failing) {
    testing::MemoryStore store;
    MemoryNetwork network(3);
    Attempt attempt{.failing = failing};
    testing::run_threads(3, [&](int rank) {
      AttemptStore own(store, attempt, rank);
      std::unique_ptr<Communicator> communicator;
      for (int turn = 0; communicator == nullptr; ++turn) {
        KeyValueStore& over = turn == 0 ? static_cast<KeyValueStore&>(own) : store;
        try {
          communicator =
              testing::make_placed(over, network, "aaa", rank, {.transport = "messages"});
          expect(turn > 0 || rank != failing, "the first attempt to fail");
        } catch (const Error& error) {
          // Whoever has heard of the failure late has failed another attempt by it.
          expect(turn < 10 && error.info().kind != ErrorKind::kTimeout, error.what());
        }
      }
      testing::barrier(*communicator);
    });
  }
}

// Rank 1 has made the group, and waits for rank 0 in the memory of their host.
TEST_CASE("a rank that cannot make the group tells its host which rank is to blame") {
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

// One store, many groups: the keys of one that failed do not end the next.
TEST_CASE("groups made again over one store, also with other options") {
  for (const char* placement : {"aaa", "abc", "aab"}) {
    testing::MemoryStore store;
    for (int round = 0; round < 4; ++round) {
      MemoryNetwork network(3);
      testing::run_threads(3, [&](int rank) {
        const auto communicator = testing::make_placed(
            store, network, placement, rank, {.one_shot_max_bytes = round < 2 ? 0U : 4096U});
        testing::barrier(*communicator);
        if (round % 2 == 0) communicator->abort("enough");
      });
    }
  }
}

}  // namespace
