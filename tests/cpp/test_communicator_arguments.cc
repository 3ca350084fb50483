// Wrong arguments throw std::invalid_argument before anything is exchanged, and the group still
// works.
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "collective_case.h"
#include "hosts_ranks.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using testing::Case;
using testing::expect;
using testing::kPatient;
using testing::run_ranks;

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
