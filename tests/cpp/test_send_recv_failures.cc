// Failures of messages, in shared memory and over a messenger: the rank that the error names, and
// no access to a buffer after its operation has ended.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "memory_messages.h"
#include "send_recv_messages.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using std::chrono::milliseconds;
using testing::error_of;
using testing::Message;

// In shared memory the message that did not fit stays in the link, and another receive needs the
// one behind it. Over a messenger the group may have failed before the last is posted.
TEST_CASE("a receive and a message of different sizes are a mismatch, posted in either order") {
  for (const std::string placement : {"aa", "ab"})
    for (const bool is_recv_first : {true, false})
      run_placed(placement, [&](Communicator& communicator) {
        const int rank = communicator.rank();
        Message large, small;
        const Error error = error_of([&] {
          if (is_recv_first != (rank == 1)) barrier(communicator);
          large = rank == 1 ? post_recv(communicator, 0, 3, 10'000)
                            : post_send(communicator, 1, 3, Bytes(200'000));
          small = rank == 1 ? post_recv(communicator, -1, 4, 10)
                            : post_send(communicator, 1, 4, Bytes(10));
          if (is_recv_first == (rank == 1)) barrier(communicator);
          finish(communicator, large);
          recv_and_check(communicator, 1, 9, 0, 1);  // where the send had gone into the link
        });
        if (placement == "ab")  // a thread may still use the buffer of one that nobody awaits
          for (const Message* each : {&large, &small})
            if (each->op != nullptr)
              communicator.send_recv()->wait(each->op, SendRecv::Clock::now() + kBound, {});
        expect_error(error, ErrorKind::kMismatch,
                     {"rank 0 sent 200000 bytes", "rank 1 receives 10000", "tag 3"});
        if (rank == 0) return;
        expect(large.bytes == Bytes(10'000, std::byte{0xee}), "an untouched buffer");
        if (placement == "aa" && is_recv_first)
          expect_error(error_of([&] { finish(communicator, small); }), ErrorKind::kMismatch,
                       {"200000 bytes"});
      });
}

TEST_CASE("a receive without a send times out, and names the sender") {
  for (const char* placement : {"aaa", "abc"})
    run_placed(placement, [](Communicator& communicator) {
      if (communicator.rank() != 0) {
        expect_error(error_of([&] { recv_and_check(communicator, 0, 1, 0, 4); }),
                     ErrorKind::kTimeout,
                     {"rank 0", "failed", "recv from rank 2 (tag 6, 44 bytes)"});
        return;
      }
      const Message received = post_recv(communicator, 2, 6, 44, milliseconds(100));
      const Error error = error_of([&] { finish(communicator, received); });
      expect_error(error, ErrorKind::kTimeout, {"recv from rank 2 (tag 6, 44 bytes)", "100 ms"});
      expect(error.info().rank == 2, "rank 2 to be blamed");
      expect_error(error_of([&] { barrier(communicator); }), ErrorKind::kTimeout, {error.what()});
      expect_error(error_of([&] { post_send(communicator, 1, 0, Bytes(1)); }), ErrorKind::kTimeout,
                   {error.what()});
    });
}

TEST_CASE("a send that is not received times out, also without a waiting thread") {
  std::atomic<bool> is_over = false;
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      wait_until([&] { return is_over.load(); }, "the sender's time-out");
      return;
    }
    const Message sent = post_send(communicator, 1, 6, Bytes(2 * kSendRecvLinkBytes),
                                   milliseconds(100), [&] { is_over = true; });
    communicator.send_recv()->begin_timeout(sent.op);  // as of a future
    wait_until([&] { return is_over.load(); }, "a time-out without a wait");
    expect_error(error_of([&] { finish(communicator, sent); }), ErrorKind::kTimeout,
                 {"send to rank 1"});
  });
}

// Rank 1 sends when rank 0 has waited for a while, without an end: with the engine, or elsewhere.
void receive_late(milliseconds timeout, bool is_awaited) {
  for (const char* placement : {"aa", "ab"})
    run_placed(placement, [&](Communicator& communicator) {
      if (communicator.rank() == 1) {
        barrier(communicator);
        send_and_finish(communicator, 0, 2, 0, 8);
        return;
      }
      std::atomic<bool> is_there = false;
      const Message received = post_recv(communicator, 1, 2, 8, timeout, [&] { is_there = true; });
      if (is_awaited) {
        const auto deadline = SendRecv::Clock::now() + milliseconds(60);
        expect(!communicator.send_recv()->wait(received.op, deadline, {}), "nothing yet");
        expect(SendRecv::Clock::now() >= deadline, "the full timeout");
      } else {
        std::this_thread::sleep_for(3 * kCheckInterval);  // long enough for an end
      }
      barrier(communicator);
      if (is_awaited) finish(communicator, received);
      wait_until([&] { return is_there.load(); }, "the message");
      finish(communicator, received);
      expect_message(received, 1, 2, 0);
    });
}

TEST_CASE("a receive for later, which nobody awaits, has no timeout") {
  receive_late(milliseconds(1), false);
}

TEST_CASE("wait returns at its own deadline and leaves the operation unchanged") {
  receive_late(kBound, true);
}

TEST_CASE("a message's time-out without end is one") { receive_late(milliseconds::max(), true); }

TEST_CASE("a peer that leaves fails what waits for it, after what it sent") {
  std::atomic<bool> is_told = false;
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      send_and_finish(communicator, 0, 1, 0, 1000);
      return;
    }
    wait_until([&] { return communicator.send_recv() != nullptr; }, "messages");
    std::this_thread::sleep_for(milliseconds(50));  // until the peer has left
    recv_and_check(communicator, 1, 1, 0, 1000);
    expect_error(error_of([&] { recv_and_check(communicator, 1, 1, 1, 1000); }),
                 ErrorKind::kPeerDied, {"rank 1", "has destroyed", "recv"});
    is_told = true;
  });
  CHECK(is_told);
}

TEST_CASE("a receive from any source takes the message of a rank that has left, kept in part") {
  constexpr std::size_t kNumBytes = 3 * kSendRecvLinkBytes / 2;
  std::atomic<bool> is_sent = false;
  run_ranks(3, [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      send_and_finish(communicator, 0, 1, 0, kNumBytes);
      is_sent = true;
      return;
    }
    if (communicator.rank() == 2) {
      wait_until([&] { return is_sent.load(); }, "the large message");
      send_and_finish(communicator, 0, 2, 0, 8);
      return;
    }
    finish(communicator, post_recv(communicator, -1, 2, 8));
    wait_until([&] { return communicator.group_state()->has_left(1); }, "rank 1's end");
    const Message received = post_recv(communicator, -1, 1, kNumBytes);
    finish(communicator, received);
    expect_message(received, 1, 1, 0);
  });
}

// The message and the end arrive between the engine's last check of the link and its check of the
// peer.
TEST_CASE("a message sent right before its sender left is received") {
  std::atomic<bool> may_send = false, has_left = false;
  MemoryStore store;
  run_threads(2, [&](int rank) {
    auto communicator =
        std::make_unique<Communicator>(store, rank, 2, CommunicatorOptions{}, kBound);
    if (rank == 1) {
      wait_until([&] { return may_send.load(); }, "the receiver's look");
      send_and_finish(*communicator, 0, 1, 0, 64);
      communicator.reset();
      has_left = true;
      return;
    }
    const Message received = post_recv(*communicator, 1, 1, 64);
    const auto look = [&] {  // called after a slice of sleep without a message
      may_send = true;
      wait_until([&] { return has_left.load(); }, "the sender's end");
      return false;
    };
    communicator->send_recv()->wait(received.op, SendRecv::Clock::now() + kBound, look);
    finish(*communicator, received);
    expect_message(received, 1, 1, 0);
  });
}

TEST_CASE("is_interrupted ends a wait for a message") {
  for (const char* placement : {"aa", "ab"})
    run_placed(placement, [](Communicator& communicator) {
      const Message received = post_recv(communicator, 1 - communicator.rank(), 1, 64);
      const bool is_interrupted = communicator.rank() == 0;
      communicator.send_recv()->wait(received.op, SendRecv::Clock::now() + kBound,
                                     [&] { return is_interrupted; });
      expect_error(error_of([&] { finish(communicator, received); }), ErrorKind::kAborted,
                   {"interrupted"});
    });
}

TEST_CASE("abort fails messages that wait") {
  for (const char* placement : {"aaa", "abc"})
    run_placed(placement, [](Communicator& communicator) {
      const Message received = post_recv(communicator, (communicator.rank() + 1) % 3, 1, 64);
      barrier(communicator);
      if (communicator.rank() == 1) communicator.abort("enough");
      expect_error(error_of([&] { finish(communicator, received); }), ErrorKind::kAborted,
                   {"enough"});
    });
}

// Traffic with one peer must not hide that another one is late.
TEST_CASE("a receive times out in the midst of other traffic") {
  std::atomic<bool> is_over = false;
  run_ranks(3, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    if (rank == 2) {
      wait_until([&] { return is_over.load(); }, "the time-out");
      return;
    }
    Message late;
    if (rank == 0) {
      late = post_recv(communicator, 2, 1, 8, milliseconds(100), [&] { is_over = true; });
      communicator.send_recv()->begin_timeout(late.op);
    }
    const auto deadline = SendRecv::Clock::now() + std::chrono::seconds(5);
    const Error error = error_of([&] {
      for (std::uint64_t turn = 0; SendRecv::Clock::now() < deadline; ++turn) {
        const Message sent = post_send(communicator, 1 - rank, 7, message(rank, 7, turn, 100));
        recv_and_check(communicator, 1 - rank, 7, turn, 100);
        finish(communicator, sent);
      }
    });
    expect_error(error, ErrorKind::kTimeout, {"recv from rank 2"});
    wait_until([&] { return is_over.load(); }, "the late receive's end");
  });
}

// Half of a large message has arrived when its receive times out. The rest arrives while the
// receiver's program is notified, which may then free the buffer.
TEST_CASE("the buffer of a receive that has timed out is left alone") {
  constexpr std::size_t kNumBytes = 3 * kSendRecvLinkBytes;
  std::atomic<bool> is_stalled = false, is_sent = false, may_go_on = false, is_over = false;
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      // No progress is made during this call of `done`, except for the slots that are filled when
      // the message is posted.
      const Message trigger = post_recv(communicator, 0, 9, 1, kBound, [&] {
        is_stalled = true;
        wait_until([&] { return may_go_on.load(); }, "the receiver's time-out");
      });
      barrier(communicator);  // the trigger after its receive: else `done` ran in this thread
      wait_until([&] { return is_stalled.load(); }, "the trigger");
      const Message sent = post_send(communicator, 0, 1, message(1, 1, 0, kNumBytes));
      is_sent = true;
      wait_until([&] { return is_over.load(); }, "the receiver's end");
      return;
    }
    const Message other = post_recv(communicator, 1, 77, 8);  // keeps the engine at work
    barrier(communicator);
    send_and_finish(communicator, 1, 9, 0, 1);
    wait_until([&] { return is_sent.load(); }, "a sender that stands still");
    Message received{.bytes = Bytes(kNumBytes), .op = std::make_shared<SendRecvOp>()};
    const auto told = [&] {  // in lieu of freeing it
      std::fill(received.bytes.begin(), received.bytes.end(), std::byte{0xee});
      may_go_on = true;
      std::this_thread::sleep_for(milliseconds(150));
    };
    *received.op = {.kind = OpKind::kRecv,
                    .peer = 1,
                    .tag = 1,
                    .data = received.bytes.data(),
                    .num_bytes = kNumBytes,
                    .timeout = milliseconds(100),
                    .done = told};
    communicator.send_recv()->post(received.op);
    communicator.send_recv()->begin_timeout(received.op);
    expect_error(error_of([&] { finish(communicator, other); }), ErrorKind::kTimeout);
    is_over = true;
    expect(received.bytes == Bytes(kNumBytes, std::byte{0xee}), "an untouched buffer");
  });
}

TEST_CASE("a peer that is no other rank is refused, and so is a tag that a messenger needs") {
  for (const std::string placement : {"aa", "ab"})
    run_placed(placement, [&](Communicator& communicator) {
      for (const int peer : {-1, communicator.rank(), 2, 99})
        CHECK_THROWS_AS(post_send(communicator, peer, 0, Bytes(1)), std::invalid_argument);
      CHECK_THROWS_AS(post_recv(communicator, 2, 0, 1), std::invalid_argument);
      CHECK_THROWS_AS(post_recv(communicator, communicator.rank(), 0, 1), std::invalid_argument);
      if (placement == "ab")
        CHECK_THROWS_AS(post_recv(communicator, 1 - communicator.rank(), 0x7f000000, 1),
                        std::invalid_argument);
      barrier(communicator);
    });
}

// Over a messenger each receive is one message; what the group knows of its ranks says whether one
// is left to send.
TEST_CASE("a receive from any source fails when all other ranks have left") {
  for (const std::string placement : {"aaaa", "abcd"}) {
    MemoryNetwork network(4);
    std::atomic<int> num_started = 0;
    network.on_start([&](int rank, int) { num_started += rank == 0; });
    run_placed(network, placement, [&](Communicator& communicator) {
      barrier(communicator);
      if (communicator.rank() != 0) return;
      const int num_before = num_started;
      const Message received = post_recv(communicator, -1, 7, 100);
      CHECK(num_started == num_before + (placement == "abcd" ? 1 : 0));
      const Error error = error_of([&] { finish(communicator, received); });
      expect_error(error, ErrorKind::kPeerDied, {"has destroyed the group", "recv from any rank"});
    });
  }
}

// Its sender is known by then, and the rest does not come: rank 1 stops in the middle of its send.
TEST_CASE("a receive from any source times out after its envelope has come") {
  MemoryNetwork network(2);
  std::atomic<bool> is_posted = false, is_open = false, is_over = false;
  std::atomic<int> num_sent = 0;
  network.on_start([&](int rank, int) {
    if (!is_posted) return;
    if (rank == 0) is_open = true;  // it receives the rest
    if (rank == 1 && ++num_sent == 2) wait_until([&] { return is_over.load(); }, "the time-out");
  });
  run_placed(network, "ab", [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      wait_until([&] { return is_posted.load(); }, "the receive");
      expect_error(error_of([&] { send_and_finish(communicator, 0, 7, 0, 8000); }),
                   ErrorKind::kTimeout, {"rank 0", "failed"});
      return;
    }
    const auto received = post_recv(communicator, -1, 7, 8000, milliseconds(100));
    is_posted = true;
    wait_until([&] { return is_open.load(); }, "the envelope");
    const Error error = error_of([&] { finish(communicator, received); });
    is_over = true;
    expect_error(error, ErrorKind::kTimeout, {"recv from rank 1 (tag 7, 8000 bytes)", "100 ms"});
  });
}

// As a future begins it. The child is forked while this rank starts a message, with the lock.
TEST_CASE("no timeout begins in a forked child") {
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
  run_placed(network, "ab", [&](Communicator& communicator) {
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

}  // namespace
