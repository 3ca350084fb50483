// Threads that cannot be started: the call fails with a message, keeps no memory of its caller, and
// may be repeated.
#include <cstddef>
#include <exception>
#include <string>
#include <system_error>
#include <vector>

#include "collective_case.h"
#include "memory_messages.h"
#include "p2p_messages.h"
#include "third_party/doctest/doctest.h"
#include "thread_limit.h"

namespace {

using namespace ringcomm;
using testing::expect;
using testing::MemoryNetwork;
using testing::run_message_ranks;
using testing::ThreadLimit;

template <class Body>
void expect_no_thread(const Body& body) {
  try {
    body();
  } catch (const std::system_error& error) {
    const std::string what = error.what();
    expect(what.find("could not be started") != std::string::npos, "a clear error, not " + what);
    return;
  }
  throw std::logic_error("expected: std::system_error");
}

// The threads of a first operation: one that waits, the watchdog, guards of the two sources.
TEST_CASE("no threads: sends and receives") {
  for (int num_threads = 0; num_threads <= 4; ++num_threads) {
    CAPTURE(num_threads);
    MemoryNetwork network(3);
    run_message_ranks(network, 3, [num_threads](Communicator& communicator) {
      constexpr std::size_t kLong = 20'000;
      if (communicator.rank() != 0) {
        testing::recv_and_check(communicator, 0, 5, 0, kLong);
        testing::send_and_finish(communicator, 0, 7, 0, kLong);
        return;
      }
      const auto send = [&] {
        return testing::post_send(communicator, 1, 5, testing::message(0, 5, 0, kLong));
      };
      const auto receive = [&] { return testing::post_recv(communicator, -1, 7, kLong); };
      std::vector<testing::Message> posted;
      {
        const ThreadLimit limit(num_threads);
        // Buffers of calls that fail are freed at once: AddressSanitizer sees any use of them.
        if (num_threads < 4)
          expect_no_thread([&] { receive(); });
        else
          posted.push_back(receive());
        if (num_threads < 2) expect_no_thread(send);
      }
      if (num_threads < 4) posted.push_back(receive());
      posted.push_back(send());
      posted.push_back(receive());
      posted.push_back(testing::post_send(communicator, 2, 5, testing::message(0, 5, 0, kLong)));
      for (const auto& message : posted) testing::finish(communicator, message);
      for (const auto& message : posted)
        if (message.op->kind == P2pOp::Kind::kRecv)
          testing::expect_message(message, message.op->peer, 7, 0);
    });
    CHECK(network.num_misfits() == 0);
  }
}

TEST_CASE("no threads: collectives") {
  MemoryNetwork network(2);
  run_message_ranks(network, 2, [](Communicator& communicator) {
    const std::uint64_t seq = communicator.next_seq();
    {
      const ThreadLimit limit(0);
      expect_no_thread([&] { testing::barrier(communicator); });
    }
    testing::run_case(communicator, {.num_elems = 100});
    expect(communicator.next_seq() == seq + 1, "one call to be counted");
  });
}

}  // namespace
