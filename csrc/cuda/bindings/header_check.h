#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "collectives/communicator.h"

namespace ringcomm {

/// Starts to compare a call's header with those of all ranks, and the sizes of the shares of each
/// pair of ranks, on the hosts and concurrently with the enqueued work, for carriers whose data has
/// no headers. A difference, or a rank that does not
/// make the call in time, ends the group. `done` is called from another thread, with whether that
/// has happened.
void check_header(const std::shared_ptr<Communicator>& communicator, const Collective& call,
                  const CallHeader& header, std::chrono::milliseconds timeout,
                  std::function<void(bool)> done);

}  // namespace ringcomm
