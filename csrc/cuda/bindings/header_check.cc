#include "cuda/bindings/header_check.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "cuda/collectives/launch_plan.h"

namespace ringcomm {
namespace {

cuda::HeaderWords words_of(CallHeader header) {
  if (has_private_sizes(header.op) || header.is_uneven) {
    header.num_elems = 0;
    header.is_uneven = false;
  }
  return cuda::to_words(header);
}

// What this rank has for each rank, then what it expects from each, in elements.
std::vector<std::uint64_t> sizes_of(const Collective& call, int rank, int world_size) {
  std::vector<std::uint64_t> given, expected;
  const auto add = [](std::vector<std::uint64_t>& to, bool takes_part, std::size_t num_elems) {
    to.push_back(takes_part ? num_elems : 0);
  };
  const bool is_root = rank == call.root;
  for (int peer = 0; peer < world_size; ++peer) {
    const bool is_peer_root = peer == call.root;
    switch (call.op) {
      case OpKind::kAllGather:
      case OpKind::kGather:
        add(given, call.op == OpKind::kAllGather || is_peer_root, call.num_elems);
        add(expected, call.op == OpKind::kAllGather || is_root, call.output_share(peer));
        break;
      case OpKind::kReduceScatter:
      case OpKind::kScatter:
        add(given, call.op == OpKind::kReduceScatter || is_root, call.input_share(peer));
        add(expected, call.op == OpKind::kReduceScatter || is_peer_root, call.num_elems);
        break;
      case OpKind::kAllToAll:
        add(given, true, call.input_share(peer));
        add(expected, true, call.output_share(peer));
        break;
      default:
        add(given, false, 0);
        add(expected, false, 0);
    }
  }
  given.insert(given.end(), expected.begin(), expected.end());
  return given;
}

// A rank's header, followed by its sizes.
class Record {
 public:
  explicit Record(int world_size)
      : world_size_(static_cast<std::size_t>(world_size)), data_(kHeader + 2 * world_size_) {}
  Record(const cuda::HeaderWords& words, const std::vector<std::uint64_t>& sizes, int world_size)
      : Record(world_size) {
    std::copy(words.begin(), words.end(), data_.begin());
    std::copy(sizes.begin(), sizes.end(), data_.begin() + kHeader);
  }

  void* data() { return data_.data(); }
  std::size_t num_bytes() const { return data_.size() * sizeof data_[0]; }
  cuda::HeaderWords words() const {
    cuda::HeaderWords words;
    std::copy_n(data_.begin(), words.size(), words.begin());
    return words;
  }
  std::uint64_t given(int to) const { return data_[kHeader + static_cast<std::size_t>(to)]; }
  std::uint64_t expected(int from) const {
    return data_[kHeader + world_size_ + static_cast<std::size_t>(from)];
  }

 private:
  static constexpr std::size_t kHeader = cuda::kHeaderWords;

  std::size_t world_size_;
  std::vector<std::uint64_t> data_;
};

class Check {
 public:
  Check(const Collective& call, const CallHeader& header, int rank, int world_size)
      : header_(header),
        rank_(rank),
        mine_(words_of(header), sizes_of(call, rank, world_size), world_size),
        all_(static_cast<std::size_t>(world_size), Record(world_size)) {}

  void run(Communicator::Steps& steps) {
    const void* input = mine_.data();
    std::vector<void*> outputs;
    for (Record& record : all_) outputs.push_back(record.data());
    steps.run({.op = OpKind::kAllGather,
               .num_elems = mine_.num_bytes(),
               .inputs = &input,
               .outputs = outputs.data(),
               .is_counted = false});
    const int world_size = static_cast<int>(all_.size());
    for (int peer = 0; peer < world_size; ++peer) {
      const cuda::HeaderWords words = of(peer).words();
      if (words == mine_.words()) continue;
      CallHeader theirs = cuda::from_words(words.data());
      theirs.seq = header_.seq;
      raise(steps, peer, describe_difference(peer, theirs, name_of(header_.op)));
    }
    for (int from = 0; from < world_size; ++from)
      for (int to = 0; to < world_size; ++to)
        if (of(from).given(to) != of(to).expected(from))
          raise(steps, from == rank_ ? to : from, describe_sizes(from, to));
  }

 private:
  const Record& of(int rank) const { return all_[static_cast<std::size_t>(rank)]; }

  std::string describe_sizes(int from, int to) const {
    const std::size_t bytes = element_bytes(header_.dtype);
    return "rank " + std::to_string(from) + " has " + std::to_string(of(from).given(to) * bytes) +
           " bytes for rank " + std::to_string(to) + ", which expects " +
           std::to_string(of(to).expected(from) * bytes) + " bytes";
  }

  [[noreturn]] void raise(Communicator::Steps& steps, int peer, const std::string& difference) {
    steps.raise_mismatch(name_of(header_.op), peer, difference, describe(header_));
  }

  CallHeader header_;
  int rank_;
  Record mine_;
  std::vector<Record> all_;
};

}  // namespace

void check_header(const std::shared_ptr<Communicator>& communicator, const Collective& call,
                  const CallHeader& header, std::chrono::milliseconds timeout,
                  std::function<void(bool)> done) {
  const auto check =
      std::make_shared<Check>(call, header, communicator->rank(), communicator->world_size());
  communicator->submit(
      [check](Communicator::Steps& steps) { check->run(steps); },
      {.timeout = timeout, .is_interrupted = {}},
      [done = std::move(done)](const std::exception_ptr& error) { done(error != nullptr); });
}

}  // namespace ringcomm
