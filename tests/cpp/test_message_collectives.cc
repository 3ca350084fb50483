// Collectives over messages against the oracle, with messages that are late and overtake each
// other, and the bytes counted.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
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

// Nothing; fewer elements than ranks; one each; a longer chunk; many.
std::set<std::size_t> counts(int world_size) {
  const auto world = static_cast<std::size_t>(world_size);
  return {0, 1, world - 1, world + 1, 1001};
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
  return static_cast<std::size_t>((from + 2 * to) % 3) * 2900U + static_cast<std::size_t>(from);
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
  communicator.run({.op = OpKind::kAllToAll,
                    .inputs = inputs.inputs(),
                    .outputs = outputs.pointers(),
                    .input_elems = inputs.elems(),
                    .output_elems = outputs.elems()},
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
    communicator.run({.op = op,
                      .root = root,
                      .num_elems = mine.size(),
                      .inputs = input,
                      .outputs = gathered.pointers(),
                      .output_elems = root < 0 || root == rank ? gathered.elems() : nullptr},
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
  communicator.run({.op = OpKind::kScatter,
                    .root = 0,
                    .num_elems = part.size(),
                    .inputs = parts.inputs(),
                    .outputs = output,
                    .input_elems = rank == 0 ? parts.elems() : nullptr},
                   testing::kPatient);
  expect(part == shard_of(0, rank, part.size()), "scatter");

  Shares terms(world_size, scattered);
  for (int to = 0; to < world_size; ++to) terms.set(to, shard_of(rank, to, size_of(0, to)));
  communicator.run({.op = OpKind::kReduceScatter,
                    .dtype = DType::kUint8,
                    .num_elems = part.size(),
                    .inputs = terms.inputs(),
                    .outputs = output,
                    .input_elems = terms.elems()},
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
  // On the wire, too: of the ring alone, whose only envelope is the greeting.
  MemoryNetwork ring_network(kWorld);
  run_message_ranks(ring_network, kWorld, [&](Communicator& communicator) {
    run_case(communicator, {.algorithm = Algorithm::kRing, .num_elems = kElems});
  });
  for (int rank = 0; rank < kWorld; ++rank)
    CHECK(ring_network.delivered_bytes(rank) == 2 * (kWorld - 1) * kBytes / kWorld + 4096);
}

}  // namespace
