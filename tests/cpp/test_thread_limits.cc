// Threads that cannot be started: the call fails with a message, keeps no memory of its caller, and
// ends the group.
#include <cstddef>
#include <functional>
#include <system_error>
#include <vector>

#include "collective_case.h"
#include "core/errors.h"
#include "hosts_ranks.h"
#include "send_recv_messages.h"
#include "third_party/doctest/doctest.h"
#include "thread_limit.h"

namespace {

using namespace ringcomm;
using testing::run_placed;
using testing::ThreadLimit;

constexpr const char* kReason = "could not be started";

void expect_no_thread(const std::function<void()>& body) {
  testing::expect_throws<std::system_error>(body, {kReason});
}

// The other ranks learn why, although the process of this one lives on.
void expect_told(const std::function<void()>& body) {
  testing::expect_throws<Error>(body, {"rank 0", kReason});
}

// The threads of a first operation: one that waits, and the watchdog.
TEST_CASE("no threads: sends and receives") {
  for (int num_threads = 0; num_threads <= 2; ++num_threads) {
    CAPTURE(num_threads);
    run_placed("abc", [num_threads](Communicator& communicator) {
      constexpr std::size_t kLong = 20'000;
      const bool is_enough = num_threads == 2;
      if (communicator.rank() != 0) {
        const auto work = [&] {
          testing::recv_and_check(communicator, 0, 5, 0, kLong);
          testing::send_and_finish(communicator, 0, 7, 0, kLong);
        };
        return is_enough ? work() : expect_told(work);
      }
      // Buffers of calls that fail are freed at once: AddressSanitizer sees any use of them.
      const auto receive = [&] { return testing::post_recv(communicator, -1, 7, kLong); };
      std::vector<testing::Message> posted;
      {
        const ThreadLimit limit(num_threads);
        if (!is_enough) return expect_no_thread([&] { receive(); });
        posted.push_back(receive());
      }
      posted.push_back(receive());
      for (const int peer : {1, 2})
        posted.push_back(
            testing::post_send(communicator, peer, 5, testing::message(0, 5, 0, kLong)));
      for (const auto& message : posted) testing::finish(communicator, message);
      for (const auto& message : posted)
        if (message.op->kind == OpKind::kRecv)
          testing::expect_message(message, message.op->peer, 7, 0);
    });
  }
}

TEST_CASE("no threads: collectives") {
  run_placed("ab", [](Communicator& communicator) {
    const auto call = [&] { testing::barrier(communicator); };
    if (communicator.rank() == 1) return expect_told(call);
    const ThreadLimit limit(0);
    expect_no_thread(call);
  });
}

}  // namespace
