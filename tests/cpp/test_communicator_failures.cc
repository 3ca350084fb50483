// How a group ends: every rank gets an error of the right kind in bounded time, names in it.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using std::chrono::milliseconds;
using testing::Case;
using testing::CaseBuffers;
using testing::error_of;
using testing::expect;
using testing::expect_error;
using testing::kPatient;
using testing::run_ranks;
using testing::within;

void call(Communicator& communicator, const Case& c, const WaitLimits& limits = kPatient) {
  CaseBuffers buffers(c, communicator.rank(), communicator.world_size());
  communicator.run(buffers.call(), limits);
}

struct Mismatch {
  Case most, odd;
  std::vector<std::string> texts;  // of both calls, in every rank's error
};

// A pair for every field of the header, and for pairs of algorithms that wait for each other
// differently.
const std::vector<Mismatch>& mismatches() {
  static const std::vector<Mismatch> all = {
      {{.op = OpKind::kBarrier}, {.num_elems = 8}, {"barrier #0", "all_reduce #0 (sum, float32"}},
      {{.num_elems = 100}, {.num_elems = 101}, {"400 bytes", "404 bytes"}},
      {{.dtype = DType::kFloat32, .num_elems = 8},
       {.dtype = DType::kInt32, .num_elems = 8},
       {"float32", "int32"}},
      {{.num_elems = 8}, {.reduction = Reduction::kMax, .num_elems = 8}, {"(sum", "(max"}},
      {{.op = OpKind::kBroadcast, .root = 0, .num_elems = 8},
       {.op = OpKind::kBroadcast, .root = 2, .num_elems = 8},
       {"root 0", "root 2"}},
      {{.algorithm = Algorithm::kRing, .num_elems = 4000},
       {.algorithm = Algorithm::kOneShot, .num_elems = 4000},
       {"ring", "one_shot"}},
      {{.algorithm = Algorithm::kTwoShot, .num_elems = 4000},
       {.algorithm = Algorithm::kRing, .num_elems = 4000},
       {"ring", "two_shot"}},
      {{.op = OpKind::kReduce, .root = 1, .num_elems = 0},
       {.op = OpKind::kAllGather, .num_elems = 0},
       {"reduce #0", "all_gather #0"}},
      {{.op = OpKind::kBroadcast, .root = 1, .num_elems = 1'000'000},
       {.op = OpKind::kReduceScatter, .num_elems = 1'000'000},
       {"broadcast #0", "reduce_scatter #0"}},
  };
  return all;
}

TEST_CASE("a rank that calls something else ends the group for all, with both calls named") {
  for (const Mismatch& mismatch : mismatches()) {
    for (const int odd_rank : {0, 2}) {
      CAPTURE(mismatch.texts.front());
      CAPTURE(odd_rank);
      std::atomic<int> num_checked = 0;
      run_ranks(3, [&](Communicator& communicator) {
        const Case& mine = communicator.rank() == odd_rank ? mismatch.odd : mismatch.most;
        const Error error = error_of([&] { call(communicator, mine); });
        expect_error(error, ErrorKind::kMismatch, mismatch.texts);
        expect(error.info().op == name_of(mine.op) && error.info().seq == 0, "this rank's call");
        // The first cause stays, word for word, whatever is called.
        const Error later = error_of([&] { testing::barrier(communicator); });
        expect_error(later, ErrorKind::kMismatch, {error.what()});
        expect_error(error_of([&] { communicator.submit(Collective{}, kPatient, {}); }),
                     ErrorKind::kMismatch, {error.what()});
        ++num_checked;
      });
      CHECK(num_checked == 3);
    }
  }
}

TEST_CASE("a call that others do not make at all is a mismatch too, by its number") {
  run_ranks(3, [](Communicator& communicator) {
    testing::barrier(communicator);
    const Case sum{.num_elems = 5};
    expect_error(error_of([&] {
                   if (communicator.rank() == 1) testing::barrier(communicator);
                   call(communicator, sum);
                 }),
                 ErrorKind::kMismatch, {"all_reduce #1", "barrier #1"});
  });
}

TEST_CASE("submitted calls behind a failed one fail with it") {
  run_ranks(2, [](Communicator& communicator) {
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
    } catch (const Error&) {
      return;  // it had failed before the last was submitted
    }
    communicator.queue().wait(last, {});
    expect(num_failed == 4, "four failures");
  });
}

TEST_CASE(
    "a rank that does not arrive is a timeout that names it, and learns of it when it arrives") {
  run_ranks(4, [others = std::make_shared<std::atomic<int>>(0)](Communicator& communicator) {
    testing::barrier(communicator);
    if (communicator.rank() != 3) {
      const Error error =
          error_of([&] { call(communicator, {.num_elems = 1000}, within(milliseconds(150))); });
      expect_error(error, ErrorKind::kTimeout, {"all_reduce #1", "rank 3", "150 ms"});
      expect(error.info().rank == 3, "rank 3 to be blamed");
      ++*others;
      testing::wait_until([&] { return *others == 4; }, "rank 3 through");
      return;
    }
    testing::wait_until([&] { return *others == 3; }, "the others' time-outs");
    const Error error = error_of([&] {
      call(communicator, {.num_elems = 1000});  // all it needs may be there
      testing::barrier(communicator);
    });
    expect_error(error, ErrorKind::kTimeout, {"failed", "all_reduce #1", "150 ms"});
    ++*others;
  });
}

TEST_CASE("a timeout in the middle of a ring is reported to the neighbour") {
  std::atomic<bool> is_over = false;
  run_ranks(2, [&](Communicator& communicator) {
    const bool is_late = communicator.rank() == 1;
    const auto ring = [&] {
      call(communicator, {.algorithm = Algorithm::kRing, .num_elems = 4000},
           within(is_late ? milliseconds(testing::kBound) : milliseconds(3000)));
    };
    ring();
    if (is_late) testing::wait_until([&] { return is_over.load(); }, "the time-out of rank 0");
    expect_error(error_of([&] {
                   ring();  // its headers may all be there, and then nothing
                   ring();
                 }),
                 ErrorKind::kTimeout, {"3000 ms"});
    is_over = true;
  });
}

TEST_CASE("abort wakes waiting threads of all ranks") {
  std::atomic<bool> is_aborted = false;
  run_ranks(3, [&](Communicator& communicator) {
    testing::barrier(communicator);
    std::thread aborter;
    if (communicator.rank() == 0)
      aborter = std::thread([&] {
        std::this_thread::sleep_for(milliseconds(50));
        communicator.abort("because of the test");
        is_aborted = true;
      });
    if (communicator.rank() == 2)  // in its next call, however late
      testing::wait_until([&] { return is_aborted.load(); }, "the abort");
    const auto begin = std::chrono::steady_clock::now();
    const Error error = error_of([&] {
      testing::barrier(communicator);
      testing::barrier(communicator);
    });
    if (aborter.joinable()) aborter.join();
    expect_error(error, ErrorKind::kAborted, {"because of the test"});
    expect(error.info().rank == 0, "rank 0 to be blamed");
    if (communicator.rank() != 0) expect_error(error, ErrorKind::kAborted, {"rank 0", "failed"});
    expect(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10), "an end in time");
    expect_error(error_of([&] { testing::barrier(communicator); }), ErrorKind::kAborted, {});
  });
}

TEST_CASE("abort in a group of one") {
  run_ranks(1, [](Communicator& communicator) {
    testing::barrier(communicator);
    communicator.abort("alone");
    expect_error(error_of([&] { testing::barrier(communicator); }), ErrorKind::kAborted,
                 {"rank 0/1", "alone"});
  });
}

TEST_CASE("a rank that destroys its side has left for the others, after its earlier calls") {
  std::atomic<int> num_told = 0;
  run_ranks(3, [&](Communicator& communicator) {
    call(communicator, {.algorithm = Algorithm::kRing, .num_elems = 1000});
    if (communicator.rank() == 1) return;
    const Error error = error_of([&] { testing::barrier(communicator); });
    expect_error(error, ErrorKind::kPeerDied, {"rank 1", "has destroyed"});
    expect(error.info().rank == 1, "rank 1 to be blamed");
    ++num_told;
    testing::wait_until([&] { return num_told == 2; }, "both told");
  });
}

TEST_CASE("a rank that left is noticed by ranks that wait for another one") {
  std::atomic<bool> is_told = false;
  run_ranks(3, [&](Communicator& communicator) {
    testing::barrier(communicator);
    if (communicator.rank() == 2) return;  // leaves
    if (communicator.rank() == 0) {        // computes, and is waited for first
      testing::wait_until([&] { return is_told.load(); }, "rank 1 told of the end of rank 2");
      return;
    }
    const Error error = error_of([&] { testing::barrier(communicator); });
    expect_error(error, ErrorKind::kPeerDied, {"rank 2", "has destroyed"});
    expect(error.info().rank == 2, "rank 2 to be blamed");
    is_told = true;
  });
}

TEST_CASE("is_interrupted ends a wait, and the others' with it") {
  std::atomic<bool> is_over = false;
  run_ranks(3, [&](Communicator& communicator) {
    testing::barrier(communicator);
    if (communicator.rank() == 2)
      testing::wait_until([&] { return is_over.load(); }, "the interrupted wait");
    const WaitLimits limits{.timeout = testing::kBound,
                            .is_interrupted = [&] { return communicator.rank() == 0; }};
    const Error error = error_of([&] {
      testing::barrier(communicator, limits);
      testing::barrier(communicator, limits);
    });
    expect_error(error, ErrorKind::kInterrupted, {"interrupted"});
    if (communicator.rank() == 0) is_over = true;
  });
}

TEST_CASE("is_interrupted is asked behind another thread's call too") {
  std::atomic<bool> is_over = false;
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      testing::wait_until([&] { return is_over.load(); }, "the interrupted wait");
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
    testing::wait_until([&] { return is_running.load(); }, "the call in front");
    const WaitLimits limits{.timeout = testing::kBound, .is_interrupted = [] { return true; }};
    expect_error(error_of([&] { testing::barrier(communicator, limits); }), ErrorKind::kAborted,
                 {"interrupted"});
    expect(ended != nullptr, "the call in front ended as well");
    is_over = true;
  });
}

}  // namespace
