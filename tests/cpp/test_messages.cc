// The messages that collectives start: how many, of which sizes, and in what order. Messages that
// end before they are delivered: slow aborts, and ranks that die at every message that they start.
// Their results: test_collectives.cc.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective_case.h"
#include "memory_messages.h"
#include "send_recv_messages.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::testing;
using testing::error_of;
using namespace std::chrono_literals;

TEST_CASE("messages: a ring whose slices fit envelopes puts what the formula says on the wire") {
  constexpr int kWorld = 4;
  constexpr std::size_t kElems = 4 * 999;
  MemoryNetwork network(kWorld);
  testing::run_placed(network, "abcd", [](Communicator& communicator) {
    run_case(communicator, {.algorithm = Algorithm::kRing, .num_elems = kElems});
  });
  for (int rank = 0; rank < kWorld; ++rank)
    CHECK(network.delivered_bytes(rank) ==
          2 * (kWorld - 1) * (kElems * sizeof(float) / kWorld + offsetof(MessageEnvelope, data)));
}

// What a rank starts, in order.
struct Started {
  bool is_send;
  std::size_t num_bytes;
  const std::byte* data;
};

class RecordingMessenger final : public Messenger {
 public:
  RecordingMessenger(std::unique_ptr<Messenger> whole, std::vector<Started>& started)
      : whole_(std::move(whole)), started_(started) {}
  int rank() const override { return whole_->rank(); }
  int world_size() const override { return whole_->world_size(); }
  bool announces_receives() const override { return whole_->announces_receives(); }
  MessagePtr isend(int peer, int tag, const std::byte* data, std::size_t num_bytes) override {
    started_.push_back({true, num_bytes, data});
    return whole_->isend(peer, tag, data, num_bytes);
  }
  MessagePtr irecv(int peer, int tag, std::byte* data, std::size_t num_bytes) override {
    started_.push_back({false, num_bytes, data});
    return whole_->irecv(peer, tag, data, num_bytes);
  }

 private:
  void end_messages() noexcept override { whole_->abort(); }

  std::unique_ptr<Messenger> whole_;
  std::vector<Started>& started_;
};

// The messages of a call that is made so many times, by rank.
std::vector<std::vector<Started>> messages_of(int world_size, const Case& c, int num_calls = 1) {
  std::vector<std::vector<Started>> started(static_cast<std::size_t>(world_size));
  MemoryNetwork network(world_size);
  testing::MemoryStore store;
  testing::run_threads(world_size, [&](int rank) {
    Communicator communicator(store, rank, world_size, {.transport = "messages"}, testing::kBound,
                              [&](const std::string&, const LookForRanks&) {
                                return std::make_unique<RecordingMessenger>(
                                    network.join(rank), started[static_cast<std::size_t>(rank)]);
                              });
    for (int call = 0; call < num_calls; ++call) run_case(communicator, c);
  });
  return started;
}

TEST_CASE("messages: what fits an envelope is one message of its own size") {
  constexpr std::size_t kEager = sizeof(MessageEnvelope::data);
  for (const OpKind op : {OpKind::kAllToAll, OpKind::kAllGather, OpKind::kAllReduce})
    for (const std::size_t num_bytes : {std::size_t{1}, std::size_t{1} << 10, kEager, kEager + 1}) {
      CAPTURE(std::string(name_of(op)));
      CAPTURE(num_bytes);
      const bool is_whole = num_bytes <= kEager;
      for (const auto& started :
           messages_of(2, {.op = op, .dtype = DType::kUint8, .num_elems = num_bytes})) {
        std::size_t num_sent = 0, sent_bytes = 0;
        for (const Started& message : started)
          if (message.is_send) ++num_sent, sent_bytes += message.num_bytes;
        CHECK(num_sent == (is_whole ? 1 : 2));
        CHECK(sent_bytes == offsetof(MessageEnvelope, data) + num_bytes);
      }
    }
}

// A buffer for each call would cost its page faults every time.
TEST_CASE("messages: every call receives what it adds up in the same memory") {
  const Case c{.op = OpKind::kReduceScatter, .num_elems = 1 << 20};
  for (const auto& started : messages_of(2, c, 3)) {
    std::vector<const std::byte*> received;
    for (const Started& message : started)
      if (!message.is_send && message.num_bytes == MessageTags::kMaxSized)
        received.push_back(message.data);
    REQUIRE(received.size() == 12);  // four slices in each call
    for (std::size_t idx = 4; idx < received.size(); ++idx)
      CHECK(received[idx] == received[idx - 4]);
  }
}

// Gloo announces a receive behind the data of earlier sends to that rank, and the peer begins to
// send when it hears of it: a send before its receive makes the connection carry one direction at a
// time.
TEST_CASE("messages: two ranks announce what they expect before they send as much") {
  constexpr std::size_t kElems = 5 << 20;
  constexpr std::size_t kLong = MessageTags::kMaxSized;
  for (const Case& c : {Case{.algorithm = Algorithm::kRing, .num_elems = kElems},
                        Case{.algorithm = Algorithm::kTwoShot, .num_elems = kElems},
                        Case{.algorithm = Algorithm::kOneShot, .num_elems = kElems},
                        Case{.op = OpKind::kReduceScatter, .num_elems = kElems},
                        Case{.op = OpKind::kAllGather, .num_elems = kElems},
                        Case{.op = OpKind::kAllToAll, .num_elems = kElems}}) {
    CAPTURE(std::string(name_of(c.op)));
    CAPTURE(std::string(name_of(c.algorithm)));
    for (const auto& started : messages_of(2, c)) {
      int num_expected = 0, num_sent = 0;
      for (const Started& message : started) {
        if (message.num_bytes < kLong) continue;
        ++(message.is_send ? num_sent : num_expected);
        CHECK(num_sent <= num_expected);
      }
      CHECK(num_sent > 0);
    }
  }
}

// Makes every abort slow. No call may return meanwhile, because its caller frees the buffers.
class SlowAborts {
 public:
  explicit SlowAborts(MemoryNetwork& network) {
    network.on_abort([this](int rank) {
      std::atomic<bool>& is_aborting = is_aborting_.at(static_cast<std::size_t>(rank));
      is_aborting = true;
      // A call that does not wait for this abort returns within a millisecond or so.
      for (int i = 0; i < 100 && num_early_ == 0; ++i) std::this_thread::sleep_for(1ms);
      is_aborting = false;
    });
  }
  ~SlowAborts() { CHECK(num_early_ == 0); }
  SlowAborts(const SlowAborts&) = delete;
  SlowAborts& operator=(const SlowAborts&) = delete;

  void call_has_returned(int rank) {
    if (is_aborting_.at(static_cast<std::size_t>(rank))) ++num_early_;
  }

 private:
  std::array<std::atomic<bool>, 8> is_aborting_ = {};
  std::atomic<int> num_early_ = 0;
};

// One letter per rank for its host; if no two ranks share a host, everything goes over messages.
TEST_CASE("aborts: a call returns when its messages have ended, though another thread ends them") {
  const std::vector<std::pair<std::string, Case>> cases = {
      {"abc", {.num_elems = 10}},
      {"abc", {.algorithm = Algorithm::kTwoShot, .num_elems = 5000}},
      {"abc", {.algorithm = Algorithm::kRing, .num_elems = 5000}},
      {"abc", {.op = OpKind::kAllToAll, .num_elems = 2000}},
      {"aab", {.num_elems = 5000}},     // leaders send what another engine has staged
      {"aab", {.num_elems = 270'000}},  // in pieces, by all ranks
      {"aab", {.op = OpKind::kBroadcast, .root = 0, .num_elems = 300'000}},
  };
  for (const auto& [placement, c] : cases) {
    CAPTURE(placement);
    CAPTURE(c.to_text());
    MemoryNetwork network(3);
    SlowAborts aborts(network);
    std::atomic<int> num_told = 0;
    run_placed(network, placement, [&, &c = c](Communicator& communicator) {
      const int rank = communicator.rank();
      if (rank == 2) testing::wait_until([&] { return num_told == 2; }, "all to be told");
      error_of([&] {
        run_case(communicator, c, within(100ms));
        testing::barrier(communicator, within(100ms));  // where its part of the call was over
      });
      aborts.call_has_returned(rank);
      ++num_told;
    });
  }
}

// A late receive ends the group; the others' buffers, and the envelope of a send that was done when
// it was posted, are in use until then.
TEST_CASE("aborts: sends and receives") {
  MemoryNetwork network(2);
  SlowAborts aborts(network);
  std::atomic<bool> is_told = false;
  run_placed(network, "ab", [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      testing::wait_until([&] { return is_told.load(); }, "rank 0 to be told");
      return;
    }
    testing::post_send(communicator, 1, 1, testing::Bytes(100));
    const auto sent = testing::post_send(communicator, 1, 2, testing::Bytes(20'000));
    const auto late = testing::post_recv(communicator, 1, 3, 44, 100ms);
    const auto received = testing::post_recv(communicator, -1, 4, 20'000);
    for (const auto* message : {&late, &sent, &received}) {
      error_of([&] { testing::finish(communicator, *message); });
      aborts.call_has_returned(0);
    }
    is_told = true;
  });
}

// ---- deaths

using Body = std::function<void(Communicator&)>;

// Runs `body` once for each message that `victim` starts in it: there its process stops, and its
// connections close. All others have an error that names it, at the latest in the call after.
// Returns the number of deaths.
int die_at_every_message(const std::string& placement, int victim, const Body& body) {
  const int num_others = static_cast<int>(placement.size()) - 1;
  for (int step = 0;; ++step) {
    MemoryNetwork network(num_others + 1, 50us, static_cast<unsigned>(step));
    std::atomic<bool> has_begun = false;
    std::atomic<bool> has_survived = false;
    std::atomic<int> num_messages = 0;
    std::atomic<int> num_told = 0;
    network.on_start([&](int rank, int) {
      if (rank != victim || !has_begun || num_messages++ != step) return;
      network.kill(victim);
      testing::wait_until([&] { return num_told == num_others; }, "all to be told");
    });
    run_placed(network, placement, [&](Communicator& communicator) {
      testing::barrier(communicator);
      if (communicator.rank() == victim) {
        has_begun = true;
        try {
          body(communicator);
          has_survived = num_messages <= step;
          for (;;) testing::barrier(communicator);
        } catch (const std::exception&) {
          return;  // long dead
        }
      }
      const Error error = error_of([&] {
        body(communicator);
        for (;;) testing::barrier(communicator);
      });
      ++num_told;
      expect_error(error, ErrorKind::kPeerDied, {"rank " + std::to_string(victim), "died"});
      expect(error.info().rank == victim, "the dead rank to be blamed");
    });
    if (has_survived) return step;
  }
}

// The rank that dies is alone on its host; ranks of one host are processes (tests/python). The
// leaders are numbered by host: an error in those numbers would name another rank.
TEST_CASE("deaths: at every message of a collective, over messages and over several hosts") {
  const std::vector<std::pair<std::string, Case>> cases = {
      {"abcd", {.algorithm = Algorithm::kOneShot, .num_elems = 5000}},
      {"abcd", {.algorithm = Algorithm::kTwoShot, .num_elems = 5000}},
      {"abcd", {.algorithm = Algorithm::kRing, .num_elems = 5000}},
      {"abcd", {.op = OpKind::kBroadcast, .root = 1, .num_elems = 300'000}},
      {"abcd", {.op = OpKind::kReduce, .root = 0, .num_elems = 300'000}},
      {"abcd", {.op = OpKind::kAllToAll, .num_elems = 2000}},
      {"abcd", {.op = OpKind::kScatter, .root = 3, .num_elems = 20}},
      {"aabbc", {.num_elems = 10}},
      {"aabbc", {.num_elems = 270'000}},
      {"aabbc", {.op = OpKind::kBroadcast, .root = 0, .num_elems = 300'000}},
      {"aabbc", {.op = OpKind::kReduce, .root = 3, .num_elems = 3000}},
      {"aabbc", {.op = OpKind::kAllGather, .num_elems = 5000}},
      {"aabbc", {.op = OpKind::kGather, .root = 1, .num_elems = 2000}},
  };
  for (const auto& [placement, c] : cases) {
    CAPTURE(placement);
    CAPTURE(c.to_text());
    CHECK(die_at_every_message(
              placement, placement == "abcd" ? 2 : 4,
              [&c = c](Communicator& communicator) { run_case(communicator, c); }) > 1);
  }
}

TEST_CASE("deaths: at every message of sends and receives") {
  for (const int victim : {0, 1}) {
    CAPTURE(victim);
    CHECK(die_at_every_message("abc", victim, [](Communicator& communicator) {
            if (communicator.rank() == 2) return;
            for (const std::size_t num_bytes : {10U, 20'000U}) {
              if (communicator.rank() == 0)
                testing::send_and_finish(communicator, 1, 5, 0, num_bytes);
              else
                testing::recv_and_check(communicator, 0, 5, 0, num_bytes);
            }
          }) > 1);
  }
}

}  // namespace
