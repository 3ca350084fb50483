#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <type_traits>
#include <vector>

#include "collectives/collective.h"
#include "collectives/communicator.h"

namespace ringcomm::cuda {

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
    communicator_.run({.op = OpKind::kAllGather,
                       .num_elems = sizeof(Record),
                       .inputs = &input,
                       .outputs = outputs.data(),
                       .is_counted = false},
                      limits_);
    return all;
  }

 private:
  Communicator& communicator_;
  const WaitLimits& limits_;
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

}  // namespace ringcomm::cuda
