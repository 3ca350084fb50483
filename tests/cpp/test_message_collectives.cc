// The messages that collectives start: how many, of which sizes, and in what order. Their results:
// test_collectives.cc.
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective_case.h"
#include "hosts_ranks.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using testing::Case;
using testing::MemoryNetwork;
using testing::run_case;

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

}  // namespace
