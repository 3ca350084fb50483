#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "communicator/records.h"

namespace ringcomm {
namespace {

// What a rank tells all others: the header of its call without a number, then the elements that it
// has for each rank, then those that it expects from each.
using Record = std::vector<std::uint64_t>;
constexpr std::size_t kHeader = sizeof(CallHeader) / sizeof(Record::value_type);
static_assert(kHeader * sizeof(Record::value_type) == sizeof(CallHeader));

CallHeader header_in(const Record& record) {
  CallHeader header;
  std::memcpy(static_cast<void*>(&header), record.data(), sizeof header);
  return header;
}

Record record_of(const Collective& call, int rank, int world_size) {
  const bool has_own_sizes = has_private_sizes(call.op) || call.is_uneven;
  CallHeader header = has_own_sizes ? without_sizes(call) : CallHeader(call);
  header.seq = 0;
  Record record(kHeader);
  std::memcpy(record.data(), &header, sizeof header);
  const auto add = [&](const std::optional<CallPart>& part) {
    record.push_back(part ? part->num_elems : 0);
  };
  for (int to = 0; to < world_size; ++to) add(part_given(call, rank, to));
  for (int from = 0; from < world_size; ++from) add(part_taken(call, rank, from));
  return record;
}

// Ends the group where two ranks' records differ. Throws Error.
void compare(Communicator& communicator, const CallHeader& header, const std::vector<Record>& all) {
  const auto rank = static_cast<std::size_t>(communicator.rank());
  const auto raise = [&](std::size_t peer, const std::string& difference) {
    communicator.failure().raise_mismatch(static_cast<int>(peer), difference,
                                          {.op = name_of(header.op),
                                           .seq = static_cast<std::int64_t>(header.seq),
                                           .description = describe(header)});
  };
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    CallHeader theirs = header_in(all[peer]);
    if (theirs == header_in(all[rank])) continue;
    theirs.seq = header.seq;
    raise(peer, describe_difference(static_cast<int>(peer), theirs, name_of(header.op)));
  }
  const std::size_t elem_bytes = element_bytes(header.dtype);
  for (std::size_t from = 0; from < all.size(); ++from)
    for (std::size_t to = 0; to < all.size(); ++to) {
      const std::uint64_t given = all[from][kHeader + to];
      const std::uint64_t expected = all[to][kHeader + all.size() + from];
      if (given != expected)
        raise(from == rank ? to : from,
              size_difference(static_cast<int>(from), given * elem_bytes, static_cast<int>(to),
                              expected * elem_bytes));
    }
}

}  // namespace

void check_header(Communicator& communicator, const Collective& call,
                  std::chrono::milliseconds timeout, std::function<void(bool)> done) {
  struct Records {  // by rank; they live until the all_gather is over
    std::vector<Record> all;
    std::vector<void*> places = {};
  };
  const int rank = communicator.rank(), world_size = communicator.world_size();
  const auto records = std::make_shared<Records>(
      std::vector(static_cast<std::size_t>(world_size), record_of(call, rank, world_size)));
  for (Record& record : records->all) records->places.push_back(record.data());
  Collective all_gather{
      {.num_elems = records->all[0].size() * sizeof(Record::value_type), .op = OpKind::kAllGather},
      &records->places[static_cast<std::size_t>(rank)],
      records->places.data()};
  all_gather.is_counted = false;
  communicator.submit(all_gather, {.timeout = timeout, .is_interrupted = {}},
                      [&communicator, header = CallHeader(call), records,
                       done = std::move(done)](std::exception_ptr error) {
                        if (error == nullptr)
                          error = error_of([&] { compare(communicator, header, records->all); });
                        done(error != nullptr);
                      });
}

}  // namespace ringcomm
