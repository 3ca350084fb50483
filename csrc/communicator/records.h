#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "collectives/call.h"
#include "communicator/communicator.h"

namespace ringcomm {

/// Plain records of all ranks, by the group's own all_gather between hosts' memories.
class RecordExchange {
 public:
  RecordExchange(Communicator& communicator, const WaitLimits& limits)
      : communicator_(communicator), limits_(limits) {}

  int rank() const { return communicator_.rank(); }
  int world_size() const { return communicator_.world_size(); }

  /// Collective; in rank order. Throws Error.
  template <class Record>
  std::vector<Record> all_gather(const Record& mine) {
    static_assert(std::is_trivially_copyable_v<Record>);
    std::vector<Record> all(static_cast<std::size_t>(world_size()));
    std::vector<void*> outputs;
    for (Record& record : all) outputs.push_back(&record);
    const void* input = &mine;
    Collective call{
        {.num_elems = sizeof(Record), .op = OpKind::kAllGather}, &input, outputs.data()};
    call.is_counted = false;
    communicator_.run(std::move(call), limits_);
    return all;
  }

 private:
  Communicator& communicator_;
  const WaitLimits& limits_;
};

/// Why a group's ranks cannot share something: the same text on all of them, so that all take the
/// same other way.
struct Unavailable : std::runtime_error {
  using runtime_error::runtime_error;
};

/// Text in a record; truncated if it does not fit.
template <std::size_t kBytes>
struct RecordText {
  char bytes[kBytes] = {};

  RecordText() = default;
  explicit RecordText(const std::string& text) {
    std::memcpy(bytes, text.data(), std::min(text.size(), kBytes - 1));
  }
  std::string str() const { return bytes; }
};

/// Runs a local step. Returns the error text, which is then exchanged with all ranks; empty on
/// success.
template <class Body>
RecordText<256> attempt(const Body& body) {
  try {
    body();
    return {};
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return RecordText<256>(text.empty() ? "unknown error" : text);
  }
}

/// Throws Unavailable with the first `problem` of the ranks' records, if any has one.
template <class Record>
void check_problems(const std::vector<Record>& records) {
  for (std::size_t rank = 0; rank < records.size(); ++rank)
    if (const std::string problem = records[rank].problem.str(); !problem.empty())
      throw Unavailable("rank " + std::to_string(rank) + ": " + problem);
}

/// Collective: tells all how attempts went.
inline void agree(RecordExchange& exchange, const RecordText<256>& problem) {
  struct Record {
    RecordText<256> problem;
  };
  check_problems(exchange.all_gather(Record{problem}));
}

/// Starts to compare a call's header, and the sizes of the shards of each pair, between the hosts,
/// for calls whose data has no headers. A difference, or a rank that does not make the call in
/// time, ends the group. `done` is called from another thread, with whether that has happened.
void check_header(Communicator& communicator, const Collective& call,
                  std::chrono::milliseconds timeout, std::function<void(bool)> done);

}  // namespace ringcomm
