#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "collectives/communicator.h"

namespace ringcomm {

/// A barrier that names missing ranks: rank 0 waits for a message from each rank and then answers
/// all. `num_barriers` counts this rank's barriers and distinguishes their messages.
///
/// It uses point-to-point messages with its own tags, so it changes neither the order of
/// collectives nor, if it fails, the group. A receive without a message stays posted; it takes the
/// message of a late rank, which also gets its answer. Only the death of a rank ends the group.
///
/// Throws Error on rank 0, naming the first rank that did not arrive within `timeout` (all of them
/// with `waits_for_all`), and on each other rank when it arrives. `patience` is how long these wait
/// for rank 0's answer: longer than `timeout`, so that rank 0 reports the failure first.
void monitored_barrier(const std::shared_ptr<Communicator>& communicator,
                       std::atomic<std::uint64_t>& num_barriers, std::chrono::milliseconds timeout,
                       std::chrono::milliseconds patience, bool waits_for_all);

}  // namespace ringcomm
