// Users' messages over a messenger: matching, sizes, order, and how they end.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory_messages.h"
#include "send_recv_messages.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm::testing;
using namespace std::chrono_literals;
using ringcomm::Communicator;
using ringcomm::Error;
using ringcomm::ErrorKind;

// Around what an envelope holds.
constexpr std::size_t kSizes[] = {0, 1, 4079, 4080, 4081, 300'000};

TEST_CASE("message sends and receives: sizes, both ways at once, beside collectives") {
  MemoryNetwork network(3, 200us);
  run_message_ranks(network, 3, [](Communicator& communicator) {
    const int next = (communicator.rank() + 1) % 3;
    const int previous = (communicator.rank() + 2) % 3;
    std::uint64_t turn = 0;
    for (const std::size_t num_bytes : kSizes) {
      const auto received = post_recv(communicator, previous, 5, num_bytes);
      const auto sent =
          post_send(communicator, next, 5, message(communicator.rank(), 5, turn, num_bytes));
      barrier(communicator);
      finish(communicator, received);
      finish(communicator, sent);
      expect_message(received, previous, 5, turn++);
    }
  });
  CHECK(network.num_misfits() == 0);
}

// More lanes than threads: an operation that is waited for has a thread, in any order.
TEST_CASE("message sends and receives: many tags, waited for in the opposite order") {
  constexpr int kNum = 100;
  MemoryNetwork network(2, 100us);
  run_message_ranks(network, 2, [](Communicator& communicator) {
    std::vector<Message> posted;
    for (int i = 0; i < kNum; ++i) {
      const auto tag = static_cast<std::uint64_t>(i % 50);
      const auto turn = static_cast<std::uint64_t>(i / 50);
      const std::size_t num_bytes = i % 3 == 0 ? 9000 : 10;
      if (communicator.rank() == 0)
        posted.push_back(post_send(communicator, 1, tag, message(0, tag, turn, num_bytes)));
      else
        posted.push_back(post_recv(communicator, 0, tag, num_bytes));
    }
    for (int i = kNum - 1; i >= 0; --i) {
      finish(communicator, posted[static_cast<std::size_t>(i)]);
      if (communicator.rank() == 1)
        expect_message(posted[static_cast<std::size_t>(i)], 0, static_cast<std::uint64_t>(i % 50),
                       static_cast<std::uint64_t>(i / 50));
    }
  });
  CHECK(network.num_misfits() == 0);
}

TEST_CASE("message sends and receives: from any source, with the sender's rank") {
  MemoryNetwork network(3, 200us);
  run_message_ranks(network, 3, [](Communicator& communicator) {
    if (communicator.rank() != 0) {
      for (std::uint64_t turn = 0; turn < 5; ++turn)
        send_and_finish(communicator, 0, 7, turn, 8000);
      return;
    }
    std::vector<std::uint64_t> turns(3);
    for (int i = 0; i < 10; ++i) {
      const auto received = post_recv(communicator, -1, 7, 8000);
      finish(communicator, received);
      expect_message(received, received.op->peer, 7,
                     turns[static_cast<std::size_t>(received.op->peer)]++);
    }
    expect(turns == std::vector<std::uint64_t>{0, 5, 5}, "all messages of both");
  });
}

// Its sender is known by then, and the rest does not come: rank 1 stops in the middle of its send.
TEST_CASE("message sends and receives: from any source, awaited after its envelope has come") {
  MemoryNetwork network(2);
  std::atomic<bool> is_posted = false, is_open = false, is_over = false;
  std::atomic<int> num_sent = 0;
  network.on_start([&](int rank, int) {
    if (!is_posted) return;
    if (rank == 0) is_open = true;  // it receives the rest
    if (rank == 1 && ++num_sent == 2) wait_until([&] { return is_over.load(); }, "the time-out");
  });
  run_message_ranks(network, 2, [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      wait_until([&] { return is_posted.load(); }, "the receive");
      expect_error(error_of([&] { send_and_finish(communicator, 0, 7, 0, 8000); }),
                   ErrorKind::kTimeout, {"rank 0", "failed"});
      return;
    }
    const auto received = post_recv(communicator, -1, 7, 8000, 100ms);
    is_posted = true;
    wait_until([&] { return is_open.load(); }, "the envelope");
    const Error error = error_of([&] { finish(communicator, received); });
    is_over = true;
    expect_error(error, ErrorKind::kTimeout, {"recv from rank 1 (tag 7, 8000 bytes)", "100 ms"});
  });
}

// As a future begins it. The child is forked while this rank starts a message, with the lock.
TEST_CASE("message sends and receives: no timeout begins in a forked child") {
  MemoryNetwork network(2);
  Message received;
  std::atomic<bool> forks = false;
  int status = -1;
  Communicator* parent = nullptr;
  network.on_start([&](int rank, int) {
    if (rank != 0 || !forks.exchange(false)) return;
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(10);  // ends a child that waits for the lock
      parent->send_recv()->begin_timeout(received.op);
      ::_exit(0);
    }
    ::waitpid(child, &status, 0);
  });
  run_message_ranks(network, 2, [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      recv_and_check(communicator, 0, 4, 0, 8);
      send_and_finish(communicator, 0, 3, 0, 8);
      return;
    }
    received = post_recv(communicator, 1, 3, 8);
    parent = &communicator;
    forks = true;
    send_and_finish(communicator, 1, 4, 0, 8);
    finish(communicator, received);
  });
  CHECK(status == 0);
}

// Each receive is one message; what the group knows of its ranks says whether one is left to send.
TEST_CASE("message sends and receives: from any source, until all others have left") {
  MemoryNetwork network(4);
  std::atomic<int> num_started = 0;
  network.on_start([&](int rank, int) { num_started += rank == 0; });
  run_message_ranks(network, 4, [&](Communicator& communicator) {
    barrier(communicator);
    if (communicator.rank() != 0) return;
    const int num_before = num_started;
    const auto received = post_recv(communicator, -1, 7, 100);
    CHECK(num_started == num_before + 1);
    const Error error = error_of([&] { finish(communicator, received); });
    expect_error(error, ErrorKind::kPeerDied, {"destroyed the group", "recv from any rank"});
  });
}

TEST_CASE(
    "message sends and receives: another size is a mismatch on both sides, and touches nothing") {
  MemoryNetwork network(2);
  run_message_ranks(network, 2, [](Communicator& communicator) {
    if (communicator.rank() == 0) {
      const auto sent = post_send(communicator, 1, 3, Bytes(20'000));
      expect_error(error_of([&] { finish(communicator, sent); }), ErrorKind::kMismatch,
                   {"20000 bytes"});
      return;
    }
    const auto received = post_recv(communicator, 0, 3, 10'000);
    expect_error(error_of([&] { finish(communicator, received); }), ErrorKind::kMismatch,
                 {"rank 0 sent 20000 bytes", "rank 1 receives 10000"});
    expect(received.bytes == Bytes(10'000, std::byte{0xee}), "an untouched buffer");
  });
  CHECK(network.num_misfits() == 0);
}

TEST_CASE("message sends and receives: a rank does not arrive, a rank dies") {
  MemoryNetwork network(2);
  run_message_ranks(network, 2, [](Communicator& communicator) {
    if (communicator.rank() == 1) {
      expect_error(error_of([&] { recv_and_check(communicator, 0, 1, 0, 4); }), ErrorKind::kTimeout,
                   {"rank 0", "failed"});
      return;
    }
    const auto received = post_recv(communicator, 1, 6, 44, 100ms);
    const Error error = error_of([&] { finish(communicator, received); });
    expect_error(error, ErrorKind::kTimeout, {"recv from rank 1 (tag 6, 44 bytes)", "100 ms"});
  });
  MemoryNetwork mortal(2);
  std::atomic<bool> is_told = false;
  run_message_ranks(mortal, 2, [&](Communicator& communicator) {
    barrier(communicator);
    if (communicator.rank() == 1) {
      mortal.kill(1);
      wait_until([&] { return is_told.load(); }, "rank 0 to be told");
      return;
    }
    const Error error = error_of([&] { recv_and_check(communicator, 1, 1, 0, 4); });
    is_told = true;
    expect_error(error, ErrorKind::kPeerDied, {"rank 1", "died"});
  });
}

// The end of a group sends what is to be sent, and ends what waits for nothing.
TEST_CASE("message sends and receives: destruction") {
  MemoryNetwork network(3);
  Message orphan, sent;
  std::atomic<int> num_done = 0;
  run_message_ranks(network, 3, [&](Communicator& communicator) {
    const auto done = [&] { ++num_done; };
    if (communicator.rank() == 0) {
      sent = post_send(communicator, 1, 2, message(0, 2, 0, 50'000), kBound, done);
    } else if (communicator.rank() == 1) {
      orphan = post_recv(communicator, 2, 9, 4, kBound, done);
      recv_and_check(communicator, 0, 2, 0, 50'000);
    } else {
      wait_until([&] { return num_done == 2; }, "both to be done");
    }
  });
  CHECK(num_done == 2);
  const Error error = error_of([&] { std::rethrow_exception(orphan.op->error); });
  expect_error(error, ErrorKind::kAborted, {"destroyed before a message arrived"});
}

TEST_CASE("message sends and receives: what cannot be") {
  MemoryNetwork network(2);
  run_message_ranks(network, 2, [](Communicator& communicator) {
    CHECK_THROWS_AS(post_send(communicator, communicator.rank(), 1, Bytes(1)),
                    std::invalid_argument);
    CHECK_THROWS_AS(post_send(communicator, 2, 1, Bytes(1)), std::invalid_argument);
    CHECK_THROWS_AS(post_recv(communicator, 1 - communicator.rank(), 0x7f000000, 1),
                    std::invalid_argument);
    barrier(communicator);
  });
}

}  // namespace
