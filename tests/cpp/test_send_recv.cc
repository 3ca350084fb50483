// Messages: content, order, tags, sizes, and progress without help.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "host/rendezvous.h"
#include "send_recv_messages.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"
#include "transport/shm/context.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using testing::Message;

// No data; the first slot's room, one byte more or less; the same of the slots after; a full link;
// more than a link holds.
constexpr std::size_t kSizes[] = {0,
                                  1,
                                  kSendRecvSlotBytes - kSendRecvHeaderBytes - 1,
                                  kSendRecvSlotBytes - kSendRecvHeaderBytes,
                                  kSendRecvSlotBytes - kSendRecvHeaderBytes + 1,
                                  2 * kSendRecvSlotBytes - kSendRecvHeaderBytes,
                                  kSendRecvLinkBytes,
                                  kSendRecvLinkBytes + 1,
                                  5 * kSendRecvLinkBytes + 3};

TEST_CASE("messages of every size arrive") {
  run_ranks(2, [](Communicator& communicator) {
    std::uint64_t turn = 0;
    for (const std::size_t num_bytes : kSizes) {
      ++turn;
      if (communicator.rank() == 0) {
        send_and_finish(communicator, 1, 5, turn, num_bytes);
        recv_and_check(communicator, 1, 6, turn, num_bytes);
      } else {
        recv_and_check(communicator, 0, 5, turn, num_bytes);
        send_and_finish(communicator, 0, 6, turn, num_bytes);
      }
    }
  });
}

TEST_CASE("calls and messages are right while a thread returns idle pages all the time") {
  for (const int world_size : {2, 3})
    run_ranks(world_size, [&](Communicator& communicator) {
      std::atomic<bool> is_over = false;
      std::thread tidier([&] {
        while (!is_over) communicator.return_idle_pages();
      });
      const int rank = communicator.rank(), next = (rank + 1) % world_size;
      const int previous = (rank + world_size - 1) % world_size;
      for (std::uint32_t turn = 0; turn < 60; ++turn) {
        const Algorithm algorithm = turn % 3 == 0 ? Algorithm::kRing : Algorithm::kAuto;
        run_case(communicator, {.op = OpKind::kAllReduce,
                                .algorithm = algorithm,
                                .num_elems = 40'000 + turn,
                                .salt = turn});
        const Message sent = post_send(communicator, next, 1, message(rank, 1, turn, 200'000));
        const Message received = post_recv(communicator, previous, 1, 200'000);
        finish(communicator, sent);
        finish(communicator, received);
        expect_message(received, previous, 1, turn);
      }
      is_over = true;
      tidier.join();
    });
}

TEST_CASE("a send rings at the receiver's side, which may sleep until then") {
  MemoryStore store;
  std::atomic<bool> is_sent = false;
  run_threads(2, [&](int rank) {
    host::Rendezvous rendezvous(store, {.rank = rank, .world_size = 2}, kBound);
    const PeerTable peer_table = rendezvous.find_ranks();
    ShmTransport transport(rendezvous, peer_table, rank, {});
    Failure failure(&transport.group_state(), rank, 2);
    Stats stats;
    const std::unique_ptr<SendRecv> send_recv = transport.make_send_recv(failure, stats);
    std::byte byte{7};
    const auto op = std::make_shared<SendRecvOp>();
    op->kind = rank == 0 ? OpKind::kSend : OpKind::kRecv;
    op->peer = 1 - rank;
    op->data = &byte;
    op->num_bytes = 1;
    op->timeout = kBound;
    if (rank == 0) {
      const auto& group = static_cast<host::Group&>(transport.group_state());
      const std::uint64_t before = group.doorbell(1).value;
      send_recv->post(op);
      expect(group.doorbell(1).value > before, "a ring at rank 1");
      is_sent = true;
    } else {
      wait_until([&] { return is_sent.load(); }, "the send");
      byte = {};
      send_recv->post(op);
    }
    expect(send_recv->wait(op, SendRecv::Clock::now() + kBound, {}), "the message");
    expect(byte == std::byte{7}, "its byte");
  });
}

TEST_CASE("both directions at once, more than the links hold") {
  run_ranks(2, [](Communicator& communicator) {
    const int peer = 1 - communicator.rank();
    for (std::uint64_t turn = 0; turn < 4; ++turn) {
      const std::size_t num_bytes = 3 * kSendRecvLinkBytes + turn;
      const Message sent =
          post_send(communicator, peer, turn, message(communicator.rank(), turn, turn, num_bytes));
      const Message received = post_recv(communicator, peer, turn, num_bytes);
      finish(communicator, sent);
      finish(communicator, received);
      expect_message(received, peer, turn, turn);
    }
  });
}

TEST_CASE("messages of a pair with one tag keep their order, many and small") {
  constexpr std::uint64_t kNumMessages = 300;
  run_ranks(2, [](Communicator& communicator) {
    const int peer = 1 - communicator.rank();
    std::vector<Message> sent, received;
    for (std::uint64_t turn = 0; turn < kNumMessages; ++turn) {
      const std::size_t num_bytes = turn % 9;
      sent.push_back(
          post_send(communicator, peer, 1, message(communicator.rank(), 1, turn, num_bytes)));
      received.push_back(post_recv(communicator, peer, 1, num_bytes));
    }
    for (std::uint64_t turn = 0; turn < kNumMessages; ++turn) {
      finish(communicator, received[turn]);
      expect_message(received[turn], peer, 1, turn);
    }
    for (const Message& message : sent) finish(communicator, message);
    const Stats::Counts counts = communicator.stats().counts(OpKind::kSend, Algorithm::kDirect);
    expect(counts.num_calls == kNumMessages, "every send counted");
  });
}

TEST_CASE("receives in another order of tags than the sends, small and large") {
  constexpr std::uint64_t kNumTags = 6;
  for (const std::size_t num_bytes : {std::size_t{10}, kSendRecvLinkBytes + 100}) {
    run_ranks(2, [&](Communicator& communicator) {
      if (communicator.rank() == 0) {
        std::vector<Message> sent;
        for (std::uint64_t tag = 0; tag < kNumTags; ++tag)
          sent.push_back(post_send(communicator, 1, tag, message(0, tag, 0, num_bytes)));
        for (const Message& message : sent) finish(communicator, message);
        return;
      }
      for (const std::uint64_t tag : {3U, 5U, 4U, 0U, 2U, 1U})
        recv_and_check(communicator, 0, tag, 0, num_bytes);
    });
  }
}

TEST_CASE("receives from any source take each message once, and return its sender") {
  constexpr int kWorld = 4;
  constexpr std::uint64_t kNumEach = 10;
  run_ranks(kWorld, [](Communicator& communicator) {
    if (communicator.rank() != 0) {
      for (std::uint64_t turn = 0; turn < kNumEach; ++turn)
        send_and_finish(communicator, 0, 8, turn, 100);
      send_and_finish(communicator, 0, 9, 0, 50);
      return;
    }
    std::array<std::uint64_t, kWorld> turns = {};
    for (std::uint64_t i = 0; i < kNumEach * (kWorld - 1); ++i) {
      const Message received = post_recv(communicator, -1, 8, 100);
      finish(communicator, received);
      const int source = received.op->peer;
      expect(source > 0 && source < kWorld, "a source");
      expect_message(received, source, 8, turns[static_cast<std::size_t>(source)]++);
    }
    for (int source = kWorld - 1; source > 0; --source) {
      expect(turns[static_cast<std::size_t>(source)] == kNumEach, "all messages of a source");
      recv_and_check(communicator, source, 9, 0, 50);
    }
  });
}

TEST_CASE("a receive posted first gets the message, be it for any source or for one") {
  run_ranks(2, [](Communicator& communicator) {
    if (communicator.rank() == 1) {
      barrier(communicator);
      for (std::uint64_t turn = 0; turn < 4; ++turn) send_and_finish(communicator, 0, 7, turn, 16);
      return;
    }
    std::vector<Message> received;
    for (const int source : {-1, 1, 1, -1})
      received.push_back(post_recv(communicator, source, 7, 16));
    barrier(communicator);
    for (std::uint64_t turn = 0; turn < 4; ++turn) {
      finish(communicator, received[turn]);
      expect_message(received[turn], 1, 7, turn);
    }
  });
}

TEST_CASE("a send that fits the link completes before it is received") {
  run_ranks(2, [](Communicator& communicator) {
    if (communicator.rank() == 0) {
      const Message sent = post_send(communicator, 1, 0, message(0, 0, 0, kSendRecvLinkBytes));
      expect(is_done(communicator, sent), "done when posted");
      const Message waiting = post_send(communicator, 1, 0, message(0, 0, 1, 1));
      expect(!is_done(communicator, waiting), "no room for another");
      barrier(communicator);
      finish(communicator, waiting);
    } else {
      barrier(communicator);
      recv_and_check(communicator, 0, 0, 0, kSendRecvLinkBytes);
      recv_and_check(communicator, 0, 0, 1, 1);
    }
  });
}

TEST_CASE("operations make progress without a waiting thread") {
  run_ranks(2, [](Communicator& communicator) {
    constexpr std::size_t kNumBytes = 4 * kSendRecvLinkBytes;
    std::atomic<bool> is_done = false;
    const int peer = 1 - communicator.rank();
    Message received, sent;
    const auto done = [&] { is_done = true; };
    if (communicator.rank() == 0)
      sent = post_send(communicator, peer, 3, message(0, 3, 0, kNumBytes), kBound, done);
    else
      received = post_recv(communicator, peer, 3, kNumBytes, kBound, done);
    wait_until([&] { return is_done.load(); }, "an end without a wait");
    if (communicator.rank() == 1) expect_message(received, 0, 3, 0);
  });
}

// How often the first thread of that name has slept.
long num_sleeps_of(const std::string& name) {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream comm(task.path() / "comm"), status(task.path() / "status");
    std::string line;
    if (!std::getline(comm, line) || line != name) continue;
    const std::string key = "voluntary_ctxt_switches:";
    while (std::getline(status, line))
      if (line.starts_with(key)) return std::stol(line.substr(key.size()));
  }
  return 0;
}

// The driver wakes it at each look for signals, in case it must take over.
TEST_CASE("the queue's thread soon sleeps again while another thread drives") {
  std::atomic<int> num_looks = 0;
  std::vector<long> num_sleeps;  // between two looks
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 0) {
      const Message received = post_recv(communicator, 1, 1, 8);
      const auto look = [&] { return ++num_looks < 0; };
      communicator.send_recv()->wait(received.op, SendRecv::Clock::now() + kBound, look);
      return finish(communicator, received);
    }
    long before = 0;
    for (int i = 0; i < 21; ++i) {
      wait_until([&] { return num_looks > i; }, "another look");
      const long now = num_sleeps_of("ringcomm-sndrcv");
      if (i > 0) num_sleeps.push_back(now - before);
      before = now;
    }
    send_and_finish(communicator, 0, 1, 0, 8);
  });
  // In most of them: it begins with a hundred looks of a millisecond.
  std::ranges::sort(num_sleeps);
  CHECK(num_sleeps[num_sleeps.size() / 2] > 0);
  CHECK(num_sleeps[num_sleeps.size() / 2] <= 8);
}

TEST_CASE("sends without a wait are delivered by the destructor") {
  run_ranks(3, [](Communicator& communicator) {
    constexpr std::size_t kNumBytes = 3 * kSendRecvLinkBytes;
    if (communicator.rank() == 0) {
      // Their buffers live until they are done: with the communicator, so in `done`.
      for (const int peer : {1, 2}) {
        auto bytes = std::make_shared<Bytes>(message(0, 4, 0, kNumBytes));
        auto op = std::make_shared<SendRecvOp>();
        *op = {.peer = peer,
               .tag = 4,
               .data = bytes->data(),
               .num_bytes = kNumBytes,
               .timeout = kBound,
               .done = [bytes] {}};
        communicator.send_recv()->post(op);
      }
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(30 * communicator.rank()));
    recv_and_check(communicator, 0, 4, 0, kNumBytes);
  });
}

TEST_CASE("receives without a wait do not block the destructor") {
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(2, [](Communicator& communicator) {
    const auto bytes = std::make_shared<Bytes>(10);
    auto op = std::make_shared<SendRecvOp>();
    *op = {.kind = OpKind::kRecv,
           .peer = 1 - communicator.rank(),
           .data = bytes->data(),
           .num_bytes = 10,
           .timeout = kBound,
           .done = [bytes] {}};
    communicator.send_recv()->post(op);
  });
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
}

TEST_CASE("threads of one rank wait for operations of their own") {
  constexpr int kNumThreads = 4;
  run_ranks(2, [](Communicator& communicator) {
    const int peer = 1 - communicator.rank();
    run_threads(kNumThreads, [&](int thread) {
      const auto tag = static_cast<std::uint64_t>(thread);
      for (std::uint64_t turn = 0; turn < 15; ++turn) {
        const std::size_t num_bytes = turn % 5 == 4 ? kSendRecvLinkBytes + 77 : 40 * turn;
        const Message sent =
            post_send(communicator, peer, tag, message(communicator.rank(), tag, turn, num_bytes));
        recv_and_check(communicator, peer, tag, turn, num_bytes);
        finish(communicator, sent);
      }
    });
  });
}

TEST_CASE("messages beside collectives") {
  run_ranks(3, [](Communicator& communicator) {
    const int next = (communicator.rank() + 1) % 3;
    const int previous = (communicator.rank() + 2) % 3;
    for (std::uint64_t turn = 0; turn < 10; ++turn) {
      const Message sent =
          post_send(communicator, next, 2, message(communicator.rank(), 2, turn, 300'000));
      const Message received = post_recv(communicator, previous, 2, 300'000);
      run_case(communicator, {.num_elems = 5000, .salt = static_cast<std::uint32_t>(turn)});
      finish(communicator, received);
      expect_message(received, previous, 2, turn);
      finish(communicator, sent);
    }
  });
}

TEST_CASE("a group of one has no messages") {
  run_ranks(
      1, [](Communicator& communicator) { expect(communicator.send_recv() == nullptr, "none"); });
}

}  // namespace
