// Messages, in shared memory and over a messenger: content, order, tags, sizes, and progress
// without help.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "host/rendezvous.h"
#include "memory_messages.h"
#include "send_recv_messages.h"
#include "third_party/doctest/doctest.h"
#include "transport/shm/context.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using testing::error_of;
using testing::Message;

// Around what an envelope, the first slot and a link hold; none, two slots, and several links.
std::vector<std::size_t> sizes() {
  constexpr std::size_t kFirst = kSendRecvSlotBytes - kSendRecvHeaderBytes;
  std::vector<std::size_t> all{0, 1, kFirst + kSendRecvSlotBytes, 5 * kSendRecvLinkBytes + 3};
  for (const std::size_t most : {std::size_t{4080}, kFirst, kSendRecvLinkBytes})
    all.insert(all.end(), {most - 1, most, most + 1});
  return all;
}

// Of two ranks both ways at once, which is more than the links hold.
TEST_CASE("messages of every size arrive, beside collectives") {
  for (const char* placement : {"aa", "aaa", "ab", "abc", "aab"})
    run_placed(
        placement,
        [](Communicator& communicator) {
          const int rank = communicator.rank(), world_size = communicator.world_size();
          const int next = (rank + 1) % world_size, previous = (rank + world_size - 1) % world_size;
          std::uint64_t turn = 0;
          for (const std::size_t num_bytes : sizes()) {
            const Message received = post_recv(communicator, previous, 5, num_bytes);
            const Message sent =
                post_send(communicator, next, 5, message(rank, 5, turn, num_bytes));
            run_case(communicator, {.num_elems = 5000, .salt = static_cast<std::uint32_t>(turn)});
            finish(communicator, received);
            finish(communicator, sent);
            expect_message(received, previous, 5, turn++);
          }
        },
        {}, std::chrono::microseconds(200));
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

TEST_CASE("messages of a pair with one tag keep their order, many and small") {
  constexpr std::uint64_t kNumMessages = 300;
  for (const char* placement : {"aa", "ab"})
    run_placed(placement, [](Communicator& communicator) {
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

// Over a messenger there are more lanes than threads: an operation that is waited for has a thread.
TEST_CASE("receives in another order of tags than the sends, small and large") {
  constexpr std::uint64_t kNumTags = 50;
  const auto bytes_of = [](std::uint64_t tag) {
    return tag % 10 == 0 ? kSendRecvLinkBytes + 100 : tag % 3 == 0 ? 9000 : std::size_t{10};
  };
  for (const char* placement : {"aa", "ab"})
    run_placed(placement, [&](Communicator& communicator) {
      std::vector<Message> posted;
      for (std::uint64_t turn = 0; turn < 2; ++turn)
        for (std::uint64_t i = 0; i < kNumTags; ++i) {
          const std::uint64_t tag = communicator.rank() == 0 ? i : (i * 7 + 3) % kNumTags;
          const std::size_t num_bytes = bytes_of(tag);
          if (communicator.rank() == 0)
            posted.push_back(post_send(communicator, 1, tag, message(0, tag, turn, num_bytes)));
          else if (turn == 0)
            recv_and_check(communicator, 0, tag, turn, num_bytes);
          else
            posted.push_back(post_recv(communicator, 0, tag, num_bytes));
        }
      for (; !posted.empty(); posted.pop_back()) {  // in the opposite order
        finish(communicator, posted.back());
        if (communicator.rank() == 1) expect_message(posted.back(), 0, posted.back().op->tag, 1);
      }
    });
}

TEST_CASE("receives from any source take each message once, and return its sender") {
  constexpr int kWorld = 4;
  constexpr std::uint64_t kNumEach = 10;
  for (const char* placement : {"aaaa", "abcd", "aabc"})
    run_placed(placement, [](Communicator& communicator) {
      if (communicator.rank() != 0) {
        for (std::uint64_t turn = 0; turn < kNumEach; ++turn)
          send_and_finish(communicator, 0, 8, turn, 8000);
        send_and_finish(communicator, 0, 9, 0, 50);
        return;
      }
      std::array<std::uint64_t, kWorld> turns = {};
      for (std::uint64_t i = 0; i < kNumEach * (kWorld - 1); ++i) {
        const Message received = post_recv(communicator, -1, 8, 8000);
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
  for (const char* placement : {"aa", "ab"})
    run_placed(placement, [](Communicator& communicator) {
      if (communicator.rank() == 1) {
        barrier(communicator);
        for (std::uint64_t turn = 0; turn < 4; ++turn)
          send_and_finish(communicator, 0, 7, turn, 16);
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

TEST_CASE("a receive from any source between hosts starts two threads, not one for each rank") {
  const auto num_threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  };
  run_placed("abcde", [&](Communicator& communicator) {
    barrier(communicator);
    const auto before = num_threads();
    Message received;
    if (communicator.rank() == 0) received = post_recv(communicator, -1, 7, 16);
    if (communicator.rank() == 0) expect(num_threads() <= before + 2, "two more threads");
    barrier(communicator);
    if (communicator.rank() == 1) send_and_finish(communicator, 0, 7, 0, 16);
    if (communicator.rank() == 0) finish(communicator, received);
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
  for (const char* placement : {"aa", "ab"})
    run_placed(placement, [](Communicator& communicator) {
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

// Their buffers outlive the communicator.
TEST_CASE("the destructor delivers sends without a wait, and ends receives of nothing") {
  constexpr std::size_t kNumBytes = 3 * kSendRecvLinkBytes;
  for (const char* placement : {"aaa", "abc"}) {
    std::vector<Message> posted(3);
    std::atomic<int> num_done = 0;
    run_placed(placement, [&](Communicator& communicator) {
      const auto done = [&] { ++num_done; };
      if (communicator.rank() == 0) {
        for (const int peer : {1, 2})
          posted[static_cast<std::size_t>(peer)] =
              post_send(communicator, peer, 4, message(0, 4, 0, kNumBytes), kBound, done);
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(30 * communicator.rank()));
      recv_and_check(communicator, 0, 4, 0, kNumBytes);
      if (communicator.rank() == 1) posted[0] = post_recv(communicator, 2, 9, 4, kBound, done);
      if (communicator.rank() == 2) wait_until([&] { return num_done == 3; }, "all to be done");
    });
    CHECK(num_done == 3);
    const Error error = testing::error_of([&] { std::rethrow_exception(posted[0].op->error); });
    expect_error(error, ErrorKind::kAborted, {"destroyed before a message arrived"});
  }
}

TEST_CASE("threads of one rank wait for operations of their own") {
  constexpr int kNumThreads = 4;
  for (const char* placement : {"aa", "ab"})
    run_placed(placement, [](Communicator& communicator) {
      const int peer = 1 - communicator.rank();
      run_threads(kNumThreads, [&](int thread) {
        const auto tag = static_cast<std::uint64_t>(thread);
        for (std::uint64_t turn = 0; turn < 15; ++turn) {
          const std::size_t num_bytes = turn % 5 == 4 ? kSendRecvLinkBytes + 77 : 40 * turn;
          const Message sent = post_send(communicator, peer, tag,
                                         message(communicator.rank(), tag, turn, num_bytes));
          recv_and_check(communicator, peer, tag, turn, num_bytes);
          finish(communicator, sent);
        }
      });
    });
}

TEST_CASE("a group of one has no messages") {
  run_ranks(
      1, [](Communicator& communicator) { expect(communicator.send_recv() == nullptr, "none"); });
}

}  // namespace
