#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "collectives/communicator.h"

namespace ringcomm {

/// Starts to compare a call's header with those of all ranks, by the hosts and beside what they
/// have enqueued: for carriers whose data says nothing of its call. What differs, or a rank that
/// does not make the call in time, ends the group; `ended` is told, from another thread.
void check_header(const std::shared_ptr<Communicator>& communicator, const CallHeader& header,
                  std::chrono::milliseconds timeout, std::function<void()> ended);

}  // namespace ringcomm
