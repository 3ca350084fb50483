#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <optional>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include "collectives/messages/shares.h"
#include "cuda/collectives/launch_plan.h"
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

// What a rank tells all others: the header of its call, then the elements that it has for each
// rank, then those that it expects from each.
using Record = std::vector<std::uint64_t>;
constexpr std::size_t kHeader = cuda::kHeaderWords;

Record record_of(const Collective& call, const CallHeader& header, int rank, int world_size) {
  Record record;
  std::ranges::copy(words_of(header), std::back_inserter(record));
  const auto add = [&](const std::optional<CallPart>& part) {
    record.push_back(part ? part->num_elems : 0);
  };
  for (int to = 0; to < world_size; ++to) add(part_given(call, rank, to));
  for (int from = 0; from < world_size; ++from) add(part_taken(call, rank, from));
  return record;
}

void compare(Communicator::Steps& steps, const CallHeader& header, std::size_t rank,
             std::size_t num_ranks, const Record& mine) {
  const auto raise = [&](std::size_t peer, const std::string& difference) {
    steps.raise_mismatch(name_of(header.op), static_cast<int>(peer), difference, describe(header));
  };
  std::vector<Record> all(num_ranks, Record(mine.size()));
  const void* input = mine.data();
  std::vector<void*> outputs;
  for (Record& record : all) outputs.push_back(record.data());
  steps.run({.op = OpKind::kAllGather,
             .num_elems = mine.size() * sizeof mine[0],
             .inputs = &input,
             .outputs = outputs.data(),
             .is_counted = false});
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    cuda::HeaderWords words;
    std::copy_n(all[peer].begin(), kHeader, words.begin());
    if (std::ranges::equal(words, mine | std::views::take(kHeader))) continue;
    CallHeader theirs = cuda::from_words(words.data());
    theirs.seq = header.seq;
    raise(peer, describe_difference(static_cast<int>(peer), theirs, name_of(header.op)));
  }
  const auto in_bytes = [&](std::uint64_t num_elems) {
    return std::to_string(num_elems * element_bytes(header.dtype)) + " bytes";
  };
  for (std::size_t from = 0; from < num_ranks; ++from)
    for (std::size_t to = 0; to < num_ranks; ++to) {
      const std::uint64_t given = all[from][kHeader + to];
      const std::uint64_t expected = all[to][kHeader + num_ranks + from];
      if (given != expected)
        raise(from == rank ? to : from, "rank " + std::to_string(from) + " has " + in_bytes(given) +
                                            " for rank " + std::to_string(to) + ", which expects " +
                                            in_bytes(expected));
    }
}

}  // namespace

void check_header(Communicator& communicator, const Collective& call, const CallHeader& header,
                  std::chrono::milliseconds timeout, std::function<void(bool)> done) {
  const int rank = communicator.rank(), world_size = communicator.world_size();
  communicator.submit(
      [=, mine = record_of(call, header, rank, world_size)](Communicator::Steps& steps) {
        compare(steps, header, static_cast<std::size_t>(rank), static_cast<std::size_t>(world_size),
                mine);
      },
      {.timeout = timeout, .is_interrupted = {}},
      [done = std::move(done)](const std::exception_ptr& error) { done(error != nullptr); });
}

}  // namespace ringcomm
