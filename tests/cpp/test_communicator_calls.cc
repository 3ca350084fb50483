// Many collectives one after another: mixed, submitted, from several threads. Wrong arguments throw
// std::invalid_argument before anything is exchanged, and the group still works.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "memory_messages.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;

TEST_CASE("many different collectives in a random order, the same on all ranks") {
  for (int world_size = 2; world_size <= 8; ++world_size)
    run_ranks(world_size, [&](Communicator& communicator) {
      testing::CaseTable table = testing::every_collective(world_size, {7, 100, 2500});
      table.dtypes = {DType::kInt8,     DType::kInt32,   DType::kInt64,  DType::kFloat16,
                      DType::kBFloat16, DType::kFloat32, DType::kFloat64};
      table.reductions = {Reduction::kSum, Reduction::kProduct, Reduction::kMin, Reduction::kMax};
      std::vector<Case> cases = table.of(world_size);
      std::mt19937 of_all(1234), own(static_cast<std::uint32_t>(communicator.rank()));
      std::shuffle(cases.begin(), cases.end(), of_all);
      cases.resize(world_size == 4 ? 300 : 40);
      for (const Case& c : cases) {
        if (own() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
        if (c.salt % 11 == 0) testing::barrier(communicator);
        run_case(communicator, c);
      }
    });
}

TEST_CASE("several groups at once, used in turn") {
  testing::MemoryStore first_store, second_store;
  testing::run_threads(3, [&](int rank) {
    Communicator first(first_store, rank, 3, {}, testing::kBound);
    // The other way round in the second group.
    Communicator second(second_store, 2 - rank, 3, {}, testing::kBound);
    for (std::uint32_t salt = 0; salt < 30; ++salt) {
      run_case(first, {.algorithm = Algorithm::kRing, .num_elems = 77, .salt = salt});
      run_case(second, {.algorithm = Algorithm::kRing, .num_elems = 770, .salt = salt});
    }
  });
}

TEST_CASE("submitted collectives run in order, and a blocking one after them") {
  constexpr int kNumSubmitted = 12;
  run_ranks(4, [&](Communicator& communicator) {
    std::vector<std::unique_ptr<CaseBuffers>> buffers;
    std::mutex mutex;
    std::vector<int> done_order;
    std::exception_ptr error;
    for (int i = 0; i < kNumSubmitted; ++i) {
      buffers.push_back(std::make_unique<CaseBuffers>(
          Case{.algorithm = i % 2 == 0 ? Algorithm::kRing : Algorithm::kOneShot,
               .num_elems = static_cast<std::size_t>(1 + 100 * i),
               .salt = static_cast<std::uint32_t>(i)},
          communicator.rank(), 4));
      communicator.submit(buffers.back()->call(), kPatient,
                          [&, i](const std::exception_ptr& result) {
                            const std::lock_guard lock(mutex);
                            done_order.push_back(i);
                            if (result != nullptr) error = result;
                          });
    }
    run_case(communicator, {.op = OpKind::kAllGather, .num_elems = 33});
    const std::lock_guard lock(mutex);
    if (error != nullptr) std::rethrow_exception(error);
    expect(done_order.size() == kNumSubmitted, "all done before the blocking call returns");
    expect(std::is_sorted(done_order.begin(), done_order.end()), "done in order");
    for (const auto& buffer : buffers) buffer->check();
    expect(communicator.next_seq() == kNumSubmitted + 1, "one number for each");
  });
}

TEST_CASE("a submitted collective is waited for by its request, by polling, and by destruction") {
  run_ranks(3, [&](Communicator& communicator) {
    const Case c{.num_elems = 500};
    CaseBuffers waited(c, communicator.rank(), 3), polled(c, communicator.rank(), 3);
    const auto ignore = [](const std::exception_ptr&) {};
    communicator.queue().wait(communicator.submit(waited.call(), kPatient, ignore), {});
    waited.check();
    const auto request = communicator.submit(polled.call(), kPatient, ignore);
    testing::wait_until(
        [&] { return communicator.queue().wait(request, {}, OrderedQueue::Clock::time_point()); },
        "a done request");
    polled.check();
  });
  testing::MemoryStore store;
  testing::run_threads(3, [&](int rank) {
    CaseBuffers last({.num_elems = 500}, rank, 3);
    bool is_done = false;
    {
      Communicator communicator(store, rank, 3, {}, testing::kBound);
      communicator.submit(last.call(), kPatient,
                          [&](const std::exception_ptr& error) { is_done = error == nullptr; });
    }
    expect(is_done, "a submitted collective run to its end by the destructor");
    last.check();
  });
}

TEST_CASE("threads of one rank may call at once: equal calls need no order") {
  constexpr int kNumThreads = 3;
  constexpr int kNumCalls = 20;
  run_ranks(2, [&](Communicator& communicator) {
    testing::run_threads(kNumThreads, [&](int) {
      for (int i = 0; i < kNumCalls; ++i) run_case(communicator, {.num_elems = 1});
    });
    expect(communicator.next_seq() == kNumThreads * kNumCalls, "every call counted");
  });
}

TEST_CASE("numbers of calls on the CPU do not depend on refused calls and on those of devices") {
  run_ranks(2, [&](Communicator& communicator) {
    testing::barrier(communicator);
    for (int i = 0; i < communicator.rank(); ++i) {  // a rank may replay a graph instead
      Collective on_device;
      communicator.issue(on_device);
      expect(on_device.seq == static_cast<std::uint64_t>(i), "the device's own number");
    }
    Error inside({}, "");
    communicator.queue().run(
        [&](auto) { inside = testing::error_of([&] { testing::barrier(communicator); }); }, {});
    testing::expect_error(inside, ErrorKind::kSystem, {"inside another one"});
    const Error error = testing::error_of([&] {
      communicator.rank() == 0 ? testing::barrier(communicator)
                               : run_case(communicator, {.num_elems = 5});
    });
    testing::expect_error(error, ErrorKind::kMismatch);
    expect(error.info().seq == 2, "the number of the failed call");
    expect(communicator.next_seq() == 3, "the next number");
  });
}

void expect_invalid(const std::function<void()>& body, const std::string& text) {
  testing::expect_throws<std::invalid_argument>(body, {text});
}

// On one rank only; the others must not notice.
void expect_refused(Communicator& communicator, const Case& c, const std::string& text) {
  testing::CaseBuffers buffers({.num_elems = 4}, communicator.rank(), communicator.world_size());
  Collective call = buffers.call();
  call.op = c.op;
  call.dtype = c.dtype;
  call.reduction = c.reduction;
  call.algorithm = c.algorithm;
  call.root = c.root;
  const std::uint64_t seq = communicator.next_seq();
  expect_invalid([&] { communicator.run(Collective(call), kPatient); }, text);
  expect_invalid([&] { communicator.submit(call, kPatient, [](std::exception_ptr) {}); }, text);
  expect(communicator.next_seq() == seq, "no number spent");
}

TEST_CASE("wrong arguments of a call are refused, and the group works on") {
  for (const int world_size : {1, 3}) {
    run_ranks(world_size, [&](Communicator& communicator) {
      const auto refused = [&](const Case& c, const std::string& text) {
        if (communicator.rank() == 0) expect_refused(communicator, c, text);
        testing::run_case(communicator, {.num_elems = 9});
      };
      refused({.reduction = Reduction::kBitAnd}, "band is not defined for float32");
      refused({.dtype = DType::kByte}, "sum is not defined for byte");
      refused({.dtype = DType::kBool, .reduction = Reduction::kAvg}, "not defined for bool");
      if (world_size == 1) return;
      for (const OpKind op : {OpKind::kBroadcast, OpKind::kReduce})
        for (const int root : {-1, 3, 1000})
          refused({.op = op, .root = root}, "root must be a rank");
    });
  }
}

TEST_CASE("wrong options are refused before the group is made") {
  testing::MemoryStore store;
  const auto make = [&](const CommunicatorOptions& options) {
    Communicator(store, 0, 2, options, std::chrono::milliseconds(1));
  };
  expect_invalid([&] { make({.transport = "tcp"}); },
                 "transport must be shm or messages, got 'tcp'");
  std::string value;
  CHECK_FALSE(store.get("ringcomm/rank/0", std::chrono::milliseconds(0), value));
  for (const char* unknown : {"tree", "direct", "hierarchical"})
    expect_invalid([&] { algorithm_from_name(unknown); }, unknown);
  for (const Algorithm algorithm :
       {Algorithm::kAuto, Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing})
    CHECK(algorithm_from_name(name_of(algorithm)) == algorithm);
}

TEST_CASE("ranks with different options get both texts") {
  for (const char* transport : {"", "messages"}) {
    testing::MemoryStore store;
    testing::MemoryNetwork network(2);
    testing::run_threads(2, [&](int rank) {
      const CommunicatorOptions options{.one_shot_max_bytes = rank == 0 ? 0U : 4096U,
                                        .transport = transport};
      testing::expect_error(
          testing::error_of([&] { testing::make_placed(store, network, "aa", rank, options); }),
          ErrorKind::kMismatch,
          {"one_shot_max_bytes=0", "one_shot_max_bytes=4096", "algorithm=auto"});
    });
  }
}

TEST_CASE("a time-out without end is one") {
  run_ranks(2, [](Communicator& communicator) {
    testing::barrier(communicator, testing::within(std::chrono::milliseconds::max()));
    if (communicator.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(60));
    testing::barrier(communicator, testing::within(std::chrono::milliseconds::max()));
  });
}

}  // namespace
