#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/collectives/header_words.h"
#include "cuda/messages/carrier.h"

namespace ringcomm {
namespace {

cuda::HeaderWords words_of(CallHeader header) {
  if (has_private_sizes(header.op) || header.is_uneven) {
    header.num_elems = 0;
    header.is_uneven = false;
  }
  return cuda::to_words(header);
}

// Whether a share goes from a rank to another one, or to itself.
bool is_transfer(const Collective& call, int from, int to) {
  switch (call.op) {
    case OpKind::kAllGather:
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
      return true;
    case OpKind::kGather:
      return to == call.root;
    case OpKind::kScatter:
      return from == call.root;
    default:
      return false;
  }
}

// What a rank tells all others: the header of its call, then the elements that it has for each rank
// and those that it expects from each.
class Record {
 public:
  explicit Record(int world_size)
      : data_(kHeader + 2 * static_cast<std::size_t>(world_size)),
        expected_(kHeader + static_cast<std::size_t>(world_size)) {}
  Record(const Collective& call, const CallHeader& header, int rank, int world_size)
      : Record(world_size) {
    std::ranges::copy(words_of(header), data_.begin());
    for (int peer = 0; peer < world_size; ++peer) {
      const auto place = static_cast<std::size_t>(peer);
      if (is_transfer(call, rank, peer)) data_[kHeader + place] = call.input_share(peer);
      if (is_transfer(call, peer, rank)) data_[expected_ + place] = call.output_share(peer);
    }
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
    return data_[expected_ + static_cast<std::size_t>(from)];
  }

 private:
  static constexpr std::size_t kHeader = cuda::kHeaderWords;

  std::vector<std::uint64_t> data_;
  std::size_t expected_;
};

void compare(Communicator::Steps& steps, const CallHeader& header, int rank, int world_size,
             Record& mine) {
  const auto raise = [&](int peer, const std::string& difference) {
    steps.raise_mismatch(name_of(header.op), peer, difference, describe(header));
  };
  std::vector<Record> all(static_cast<std::size_t>(world_size), Record(world_size));
  const void* input = mine.data();
  std::vector<void*> outputs;
  for (Record& record : all) outputs.push_back(record.data());
  steps.run({.op = OpKind::kAllGather,
             .num_elems = mine.num_bytes(),
             .inputs = &input,
             .outputs = outputs.data(),
             .is_counted = false});
  const auto of = [&](int peer) -> const Record& { return all[static_cast<std::size_t>(peer)]; };
  for (int peer = 0; peer < world_size; ++peer) {
    const cuda::HeaderWords words = of(peer).words();
    if (words == mine.words()) continue;
    CallHeader theirs = cuda::from_words(words.data());
    theirs.seq = header.seq;
    raise(peer, describe_difference(peer, theirs, name_of(header.op)));
  }
  const auto in_bytes = [&](std::uint64_t num_elems) {
    return std::to_string(num_elems * element_bytes(header.dtype)) + " bytes";
  };
  for (int from = 0; from < world_size; ++from)
    for (int to = 0; to < world_size; ++to)
      if (of(from).given(to) != of(to).expected(from))
        raise(from == rank ? to : from, "rank " + std::to_string(from) + " has " +
                                            in_bytes(of(from).given(to)) + " for rank " +
                                            std::to_string(to) + ", which expects " +
                                            in_bytes(of(to).expected(from)));
}

}  // namespace

void check_header(Communicator& communicator, const Collective& call, const CallHeader& header,
                  std::chrono::milliseconds timeout, std::function<void(bool)> done) {
  const int rank = communicator.rank(), world_size = communicator.world_size();
  communicator.submit(
      [=, mine = Record(call, header, rank, world_size)](Communicator::Steps& steps) mutable {
        compare(steps, header, rank, world_size, mine);
      },
      {.timeout = timeout, .is_interrupted = {}},
      [done = std::move(done)](const std::exception_ptr& error) { done(error != nullptr); });
}

}  // namespace ringcomm
