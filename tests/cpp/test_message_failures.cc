// Messages of ranks whose calls differ, or that die, are late, fail or leave.
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory_messages.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using namespace std::chrono_literals;
using testing::error_of;
using testing::expect;
using testing::expect_error;
using testing::kPatient;
using testing::MemoryNetwork;
using testing::run_message_ranks;
using testing::within;

// A call with buffers of its own.
class Call {
 public:
  Call(OpKind op, int world_size, std::size_t num_elems, int root = -1,
       Algorithm algorithm = Algorithm::kAuto)
      : op_(op),
        root_(root),
        algorithm_(algorithm),
        num_elems_(num_elems),
        data_(std::make_shared<std::vector<float>>(num_elems *
                                                   static_cast<std::size_t>(world_size) * 2)) {
    for (int shard = 0; shard < world_size; ++shard) {
      inputs_.push_back(data_->data() + num_elems * static_cast<std::size_t>(shard));
      outputs_.push_back(data_->data() + num_elems * static_cast<std::size_t>(world_size + shard));
    }
  }
  Collective collective() const {
    return Collective{{.num_elems = num_elems_,
                       .root = root_,
                       .op = op_,
                       .dtype = op_ == OpKind::kBarrier ? DType::kByte : DType::kFloat32,
                       .algorithm = algorithm_},
                      inputs_.data(),
                      outputs_.data()};
  }

 private:
  OpKind op_;
  int root_;
  Algorithm algorithm_;
  std::size_t num_elems_;
  std::shared_ptr<std::vector<float>> data_;  // a copy of the call has the same pointers
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

Error failure_of(Communicator& communicator, const Call& call,
                 const WaitLimits& limits = kPatient) {
  return error_of([&] { communicator.run(call.collective(), limits); });
}

bool has_root(const Call& call) { return call.collective().root >= 0; }

// One rank makes a different call: for any two calls every rank gets the error, and no message
// matches a receive of another size.
TEST_CASE("messages: calls that differ") {
  constexpr int kWorld = 4;
  struct Spec {
    OpKind op;
    std::size_t num_elems;
    int root = -1;
    Algorithm algorithm = Algorithm::kAuto;
  };
  const std::vector<Spec> specs = {
      {OpKind::kBarrier, 0},
      {OpKind::kAllReduce, 10, -1, Algorithm::kOneShot},
      {OpKind::kAllReduce, 5000, -1, Algorithm::kRing},
      {OpKind::kAllReduce, 5001, -1, Algorithm::kRing},
      {OpKind::kAllReduce, 5000, -1, Algorithm::kTwoShot},
      {OpKind::kBroadcast, 3000, 0},
      {OpKind::kBroadcast, 3000, 2},
      {OpKind::kReduce, 3000, 1},
      {OpKind::kReduceScatter, 300'000},
      {OpKind::kAllGather, 20},
      {OpKind::kAllGather, 300'000},
      {OpKind::kAllToAll, 20},
      {OpKind::kAllToAll, 2000},
      {OpKind::kGather, 20, 3},
      {OpKind::kScatter, 20, 3},
  };
  for (std::size_t usual = 0; usual < specs.size(); ++usual) {
    const std::size_t odd = (usual + 1) % specs.size();
    CAPTURE(usual);
    MemoryNetwork network(kWorld, 100us);
    run_message_ranks(network, kWorld, [&](Communicator& communicator) {
      const Spec& spec = specs[communicator.rank() == 2 ? odd : usual];
      const Call call(spec.op, kWorld, spec.num_elems, spec.root, spec.algorithm);
      try {
        communicator.run(call.collective(), kPatient);
      } catch (const Error& error) {
        expect_error(error, ErrorKind::kMismatch);
        return;
      }
      // Its part of the call, that of a leaf, ended before the failure was noticed; the next call
      // raises it.
      expect(has_root(call), "only of a tree some part to succeed");
      expect_error(failure_of(communicator, Call(OpKind::kBarrier, kWorld, 0)),
                   ErrorKind::kMismatch);
    });
    CHECK(network.num_misfits() == 0);
  }
}

TEST_CASE("messages: both calls are named") {
  MemoryNetwork network(2);
  run_message_ranks(network, 2, [&](Communicator& communicator) {
    const Call call(communicator.rank() == 0 ? OpKind::kBroadcast : OpKind::kReduce, 2, 10, 0);
    const Error error = error_of([&] {
      communicator.run(call.collective(), kPatient);
      testing::barrier(communicator);  // after a part that only sends
    });
    expect_error(error, ErrorKind::kMismatch, {"broadcast #0", "reduce #0"});
  });
}

TEST_CASE("messages: shards that do not fit") {
  MemoryNetwork network(3);
  run_message_ranks(network, 3, [&](Communicator& communicator) {
    const Call call(OpKind::kAllGather, 3, communicator.rank() == 1 ? 20 : 24);
    expect_error(failure_of(communicator, call), ErrorKind::kMismatch, {"80 bytes", "96 bytes"});
  });
  CHECK(network.num_misfits() == 0);
}

// A rank dies during a sequence of collectives. All other ranks get an error that names it, also
// those that waited for another rank.
TEST_CASE("messages: a rank dies") {
  for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kRing}) {
    constexpr int kWorld = 5;
    MemoryNetwork network(kWorld, 200us);
    std::atomic<int> num_told = 0;
    run_message_ranks(network, kWorld, [&](Communicator& communicator) {
      const Call call(OpKind::kAllReduce, kWorld, 5000, -1, algorithm);
      for (int i = 0; i < 3; ++i) communicator.run(call.collective(), kPatient);
      if (communicator.rank() == 3) {
        network.kill(3);
        testing::wait_until([&] { return num_told == kWorld - 1; }, "all to be told");
        return;
      }
      const Error error = failure_of(communicator, call);
      ++num_told;
      expect_error(error, ErrorKind::kPeerDied, {"rank 3", "died"});
      expect(error.info().rank == 3, "the dead rank to be blamed");
    });
  }
}

TEST_CASE("messages: a rank leaves") {
  MemoryNetwork network(3);
  run_message_ranks(network, 3, [&](Communicator& communicator) {
    const Call call(OpKind::kAllReduce, 3, 100);
    communicator.run(call.collective(), kPatient);
    if (communicator.rank() == 1) return;
    expect_error(failure_of(communicator, call), ErrorKind::kPeerDied,
                 {"rank 1", "destroyed the group"});
  });
}

TEST_CASE("messages: a rank is late") {
  MemoryNetwork network(3);
  std::atomic<int> num_told = 0;
  run_message_ranks(network, 3, [&](Communicator& communicator) {
    const Call call(OpKind::kAllReduce, 3, 100);
    communicator.run(call.collective(), kPatient);
    if (communicator.rank() == 1) {
      testing::wait_until([&] { return num_told == 2; }, "all to be told");
      expect_error(failure_of(communicator, call), ErrorKind::kTimeout, {"rank 1"});
      return;
    }
    const Error error = failure_of(communicator, call, within(200ms));
    ++num_told;
    expect_error(error, ErrorKind::kTimeout, {"rank 1", "200 ms"});
  });
}

TEST_CASE("messages: a rank aborts, and one is interrupted") {
  for (const bool is_signal : {false, true}) {
    MemoryNetwork network(3);
    std::atomic<bool> is_given_up = false;
    run_message_ranks(network, 3, [&](Communicator& communicator) {
      const Call call(OpKind::kBarrier, 3, 0);
      if (communicator.rank() != 0) {
        // Some ranks already wait when rank 0 fails.
        if (is_signal) testing::wait_until([&] { return is_given_up.load(); }, "a signal");
        expect_error(failure_of(communicator, call), ErrorKind::kAborted, {"rank 0"});
        return;
      }
      if (!is_signal) {
        communicator.abort("enough");
        return;
      }
      const WaitLimits limits{.timeout = testing::kBound, .is_interrupted = [] { return true; }};
      expect_error(failure_of(communicator, call, limits), ErrorKind::kAborted,
                   {"interrupted by a signal"});
      is_given_up = true;
    });
  }
}

TEST_CASE("messages: options that differ") {
  MemoryNetwork network(2);
  testing::MemoryStore store;
  testing::run_threads(2, [&](int rank) {
    const CommunicatorOptions options{.one_shot_max_bytes = rank == 0 ? 0U : 4096U,
                                      .transport = "messages"};
    expect_error(error_of([&] {
                   Communicator(
                       store, rank, 2, options, testing::kBound,
                       [&](const std::string&, const LookForRanks&) { return network.join(rank); });
                 }),
                 ErrorKind::kMismatch, {"one_shot_max_bytes=0", "one_shot_max_bytes=4096"});
  });
}

// What the ranks of an attempt to make a group have in common.
struct Attempt {
  int failing;  // the rank whose store fails as it looks for the others: they have all found it
  std::atomic<int> num_ahead = 0;  // of the others' requests for what comes after
};
class AttemptStore final : public KeyValueStore {
 public:
  AttemptStore(testing::MemoryStore& store, Attempt& attempt, int rank)
      : store_(store), attempt_(attempt), rank_(rank), own_("/" + std::to_string(rank)) {}
  void set(const std::string& key, const std::string& value) override {
    look(key);
    has_set_ = true;
    store_.set(key, value);
  }
  void set_first(const std::string& key, const std::string& value) override { set(key, value); }
  std::optional<std::string> try_get(const std::string& key) override {
    look(key);
    const bool is_of_another =
        key == "ringcomm/ranks" || (key.starts_with("ringcomm/rank/") && !key.ends_with(own_));
    if (rank_ == attempt_.failing && is_of_another && has_set_) {
      testing::wait_until([&] { return attempt_.num_ahead > 0; }, "the others");
      throw Error({.kind = ErrorKind::kSystem, .rank = rank_}, "no store");
    }
    return store_.try_get(key);
  }
  std::unique_ptr<KeyValueStore> clone() override {
    return std::make_unique<AttemptStore>(store_, attempt_, rank_);
  }

 private:
  void look(const std::string& key) {
    if (key.starts_with("ringcomm/messages/")) ++attempt_.num_ahead;
  }

  testing::MemoryStore& store_;
  Attempt& attempt_;
  int rank_;
  std::string own_;
  bool has_set_ = false;  // its record
};

// The others wait when it fails. They hear of that and try again, or meet its next attempt.
TEST_CASE("messages: a group after an attempt in which one rank failed before the others") {
  for (int failing = 0; failing < 3; ++failing) {
    testing::MemoryStore store;
    MemoryNetwork network(3);
    Attempt attempt{.failing = failing};
    testing::run_threads(3, [&](int rank) {
      const auto make = [&](KeyValueStore& over) {
        return std::make_unique<Communicator>(
            over, rank, 3, CommunicatorOptions{.transport = "messages"}, testing::kBound,
            [&](const std::string&, const LookForRanks&) { return network.join(rank); });
      };
      AttemptStore own(store, attempt, rank);
      std::unique_ptr<Communicator> communicator;
      for (int turn = 0; communicator == nullptr; ++turn) {
        try {
          communicator = make(turn == 0 ? static_cast<KeyValueStore&>(own) : store);
          expect(turn > 0 || rank != failing, "the first attempt to fail");
        } catch (const Error& error) {
          // Whoever has heard of the failure late has failed another attempt by it.
          expect(turn < 10 && error.info().kind != ErrorKind::kTimeout, error.what());
        }
      }
      testing::barrier(*communicator);
    });
  }
}

// One store, many groups: the keys of one that failed do not end the next.
TEST_CASE("messages: groups made again over one store") {
  testing::MemoryStore store;
  for (int round = 0; round < 4; ++round) {
    MemoryNetwork network(2);
    testing::run_threads(2, [&](int rank) {
      Communicator communicator(
          store, rank, 2, {.transport = "messages"}, testing::kBound,
          [&](const std::string&, const LookForRanks&) { return network.join(rank); });
      testing::barrier(communicator);
      if (round % 2 == 0) communicator.abort("enough");
    });
  }
}

}  // namespace
