#pragma once

#include <chrono>
#include <functional>
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

/// Starts to compare a call's header, and the sizes of the shards of each pair, between the hosts,
/// for calls whose data has no headers. A difference, or a rank that does not make the call in
/// time, ends the group. `done` is called from another thread, with whether that has happened.
void check_header(Communicator& communicator, const Collective& call,
                  std::chrono::milliseconds timeout, std::function<void(bool)> done);

}  // namespace ringcomm
