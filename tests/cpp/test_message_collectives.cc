// Collectives over messages against the oracle, with messages that are late and overtake each
// other, and the bytes counted.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collective_case.h"
#include "memory_messages.h"
#include "sanitizers.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using testing::Case;
using testing::expect;
using testing::kAlgorithms;
using testing::MemoryNetwork;
using testing::rooted;
using testing::run_case;
using testing::run_message_ranks;

constexpr OpKind kOthers[] = {OpKind::kReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                              OpKind::kBroadcast};

// Nothing; fewer elements than ranks; one each; a longer chunk; more than an envelope carries.
std::set<std::size_t> counts(int world_size) {
  const auto world = static_cast<std::size_t>(world_size);
  return {0, 1, world - 1, world + 1, 1001, 40'001};
}

void run_all(Communicator& communicator) {
  std::uint32_t salt = 0;
  const int world_size = communicator.world_size();
  for (const std::size_t num_elems : counts(world_size)) {
    for (const bool is_in_place : {false, true}) {
      for (const Algorithm algorithm : kAlgorithms)
        run_case(communicator, {.algorithm = algorithm,
                                .num_elems = num_elems,
                                .is_in_place = is_in_place,
                                .salt = ++salt});
      for (const OpKind op : kOthers) {
        ++salt;
        run_case(communicator, {.op = op,
                                .root = rooted(op) ? static_cast<int>(salt) % world_size : -1,
                                .num_elems = num_elems,
                                .is_in_place = is_in_place,
                                .salt = salt});
      }
    }
    testing::barrier(communicator);
  }
}

TEST_CASE("messages: every collective and algorithm, worlds 2 to 5") {
  for (int world_size = 2; world_size <= 5; ++world_size)
    for (const int delay_us : {0, 300}) {
      CAPTURE(world_size);
      MemoryNetwork network(world_size, std::chrono::microseconds(delay_us));
      run_message_ranks(network, world_size, run_all);
      CHECK(network.num_misfits() == 0);
    }
}

// From 1 MiB on: rings and chains, in slices of 1 MiB.
TEST_CASE("messages: large calls") {
  for (int world_size = 2; world_size <= (testing::kHasThreadSanitizer ? 2 : 4); ++world_size) {
    MemoryNetwork network(world_size, std::chrono::microseconds(50));
    run_message_ranks(network, world_size, [&](Communicator& communicator) {
      std::uint32_t salt = 0;
      for (const OpKind op : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter,
                              OpKind::kAllGather, OpKind::kBroadcast})
        for (const bool is_in_place : {false, true}) {
          ++salt;
          run_case(communicator, {.op = op,
                                  .dtype = DType::kInt32,
                                  .root = rooted(op) ? static_cast<int>(salt) % world_size : -1,
                                  .num_elems = (1 << 20) + 7,
                                  .is_in_place = is_in_place,
                                  .salt = salt});
        }
    });
    CHECK(network.num_misfits() == 0);
  }
}

TEST_CASE("messages: dtypes and reductions") {
  MemoryNetwork network(3);
  run_message_ranks(network, 3, testing::run_every_reduction);
}

// Random floats, whose sum depends on the order, against the oracle's left-to-right one: every
// algorithm, and every collective that reduces.
TEST_CASE("messages: rank order") {
  // A ring of several slices.
  constexpr std::size_t kMany = testing::kHasThreadSanitizer ? 300'001 : 1'200'001;
  MemoryNetwork network(4, std::chrono::microseconds(100));
  run_message_ranks(network, 4,
                    [](Communicator& communicator) {
                      std::uint32_t salt = 0;
                      for (const std::size_t num_elems : {std::size_t{517}, kMany}) {
                        for (const Algorithm algorithm : kAlgorithms)
                          run_case(communicator, {.algorithm = algorithm,
                                                  .num_elems = num_elems,
                                                  .is_in_place = salt % 2 == 0,
                                                  .is_random = true,
                                                  .salt = ++salt});
                        for (const OpKind op : {OpKind::kReduce, OpKind::kReduceScatter})
                          run_case(communicator, {.op = op,
                                                  .root = op == OpKind::kReduce ? 2 : -1,
                                                  .num_elems = num_elems,
                                                  .is_random = true,
                                                  .salt = ++salt});
                      }
                    },
                    {.is_rank_ordered = true});
}

// ---- Shares of different sizes: element i of what rank `from` has for rank `to`.

std::uint8_t element_of(int from, int to, std::size_t i) {
  return static_cast<std::uint8_t>(from * 89 + to * 31 + static_cast<int>(i % 251));
}

std::vector<std::uint8_t> shard_of(int from, int to, std::size_t num_elems) {
  std::vector<std::uint8_t> shard(num_elems);
  for (std::size_t i = 0; i < num_elems; ++i) shard[i] = element_of(from, to, i);
  return shard;
}

// Some empty, some longer than an envelope, all different.
std::size_t size_of(int from, int to) {
  return static_cast<std::size_t>((from + 2 * to) % 3) * 40'000U + static_cast<std::size_t>(from);
}

class Shares {
 public:
  Shares(int world_size, const std::vector<std::size_t>& elems) : elems_(elems) {
    for (int rank = 0; rank < world_size; ++rank)
      buffers_.emplace_back(elems[static_cast<std::size_t>(rank)]);
    for (auto& buffer : buffers_) pointers_.push_back(buffer.data());
  }
  Shares(const Shares&) = delete;
  Shares& operator=(const Shares&) = delete;

  /// Of the size it has.
  void set(int rank, const std::vector<std::uint8_t>& content) {
    std::copy(content.begin(), content.end(), of(rank).begin());
  }
  std::vector<std::uint8_t>& of(int rank) { return buffers_[static_cast<std::size_t>(rank)]; }
  void* const* pointers() const { return pointers_.data(); }
  const void* const* inputs() const { return pointers_.data(); }
  const std::size_t* elems() const { return elems_.data(); }

 private:
  std::vector<std::size_t> elems_;
  std::vector<std::vector<std::uint8_t>> buffers_;
  std::vector<void*> pointers_;
};

std::vector<std::size_t> sizes(int world_size, const std::function<std::size_t(int)>& size) {
  std::vector<std::size_t> result;
  for (int rank = 0; rank < world_size; ++rank) result.push_back(size(rank));
  return result;
}

void run_all_to_all(Communicator& communicator) {
  const int rank = communicator.rank();
  const int world_size = communicator.world_size();
  const auto given = sizes(world_size, [&](int to) { return size_of(rank, to); });
  const auto taken = sizes(world_size, [&](int from) { return size_of(from, rank); });

  Shares inputs(world_size, given);
  for (int to = 0; to < world_size; ++to) inputs.set(to, shard_of(rank, to, size_of(rank, to)));
  Shares outputs(world_size, taken);
  communicator.run({{.op = OpKind::kAllToAll},
                    inputs.inputs(),
                    outputs.pointers(),
                    inputs.elems(),
                    outputs.elems()},
                   testing::kPatient);
  for (int from = 0; from < world_size; ++from)
    expect(outputs.of(from) == shard_of(from, rank, size_of(from, rank)), "all_to_all");
}

void run_gathers(Communicator& communicator) {
  const int rank = communicator.rank();
  const int world_size = communicator.world_size();
  Shares gathered(world_size, sizes(world_size, [](int from) { return size_of(from, 1); }));
  const std::vector<std::uint8_t> mine = shard_of(rank, 7, size_of(rank, 1));
  const void* input[] = {mine.data()};
  for (const OpKind op : {OpKind::kAllGather, OpKind::kGather}) {
    const int root = op == OpKind::kGather ? 1 : -1;
    for (int from = 0; from < world_size; ++from)
      std::fill(gathered.of(from).begin(), gathered.of(from).end(), std::uint8_t{0});
    communicator.run({{.num_elems = mine.size(), .root = root, .op = op},
                      input,
                      gathered.pointers(),
                      nullptr,
                      root < 0 || root == rank ? gathered.elems() : nullptr},
                     testing::kPatient);
    for (int from = 0; from < world_size && (root < 0 || root == rank); ++from)
      expect(gathered.of(from) == shard_of(from, 7, size_of(from, 1)), name_of(op));
  }
}

void run_scatters(Communicator& communicator) {
  const int rank = communicator.rank();
  const int world_size = communicator.world_size();
  const auto scattered = sizes(world_size, [](int to) { return size_of(0, to); });
  Shares parts(world_size, scattered);
  for (int to = 0; to < world_size; ++to) parts.set(to, shard_of(0, to, size_of(0, to)));
  std::vector<std::uint8_t> part(size_of(0, rank));
  void* output[] = {part.data()};
  communicator.run({{.num_elems = part.size(), .root = 0, .op = OpKind::kScatter},
                    parts.inputs(),
                    output,
                    rank == 0 ? parts.elems() : nullptr},
                   testing::kPatient);
  expect(part == shard_of(0, rank, part.size()), "scatter");

  Shares terms(world_size, scattered);
  for (int to = 0; to < world_size; ++to) terms.set(to, shard_of(rank, to, size_of(0, to)));
  communicator.run(
      {{.num_elems = part.size(), .op = OpKind::kReduceScatter, .dtype = DType::kUint8},
       terms.inputs(),
       output,
       terms.elems()},
      testing::kPatient);
  for (std::size_t i = 0; i < part.size(); ++i) {
    std::uint8_t sum = 0;
    for (int from = 0; from < world_size; ++from)
      sum = static_cast<std::uint8_t>(sum + element_of(from, rank, i));
    expect(part[i] == sum, "reduce_scatter");
  }
}

TEST_CASE("messages: shards of different sizes, worlds 2 to 5") {
  for (int world_size = 2; world_size <= 5; ++world_size) {
    MemoryNetwork network(world_size, std::chrono::microseconds(100));
    run_message_ranks(network, world_size, [](Communicator& communicator) {
      run_all_to_all(communicator);
      run_gathers(communicator);
      run_scatters(communicator);
    });
    CHECK(network.num_misfits() == 0);
  }
}

// ---- Bytes

TEST_CASE("messages: all_reduce sends what the formulas say") {
  constexpr int kWorld = 4;
  constexpr std::size_t kElems = 4 * 999;
  constexpr std::uint64_t kBytes = kElems * sizeof(float);
  MemoryNetwork network(kWorld);
  run_message_ranks(network, kWorld, [&](Communicator& communicator) {
    for (const Algorithm algorithm : kAlgorithms)
      run_case(communicator, {.algorithm = algorithm, .num_elems = kElems});
    const auto sent = [&](Algorithm algorithm) {
      return communicator.stats().counts(OpKind::kAllReduce, algorithm).sent_bytes;
    };
    expect(sent(Algorithm::kOneShot) == (kWorld - 1) * kBytes, "one_shot");
    expect(sent(Algorithm::kTwoShot) == 2 * (kWorld - 1) * kBytes / kWorld, "two_shot");
    expect(sent(Algorithm::kRing) == 2 * (kWorld - 1) * kBytes / kWorld, "ring");
  });
  // On the wire, too: of the ring alone, each of whose slices fits an envelope.
  MemoryNetwork ring_network(kWorld);
  run_message_ranks(ring_network, kWorld, [&](Communicator& communicator) {
    run_case(communicator, {.algorithm = Algorithm::kRing, .num_elems = kElems});
  });
  for (int rank = 0; rank < kWorld; ++rank)
    CHECK(ring_network.delivered_bytes(rank) ==
          2 * (kWorld - 1) * (kBytes / kWorld + offsetof(MessageEnvelope, data)));
}

// ---- Messages

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
