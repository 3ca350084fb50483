#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "collectives/communicator.h"

namespace ringcomm {

/// A barrier that says who is missing: rank 0 waits for a message from each rank and then answers
/// all. `num_barriers` counts those that this rank has come to, and tells one from the next.
///
/// It goes by point-to-point messages of its own tags, and leaves the order of collectives and the
/// group as they are, whatever comes of it: a receive that nothing came for stays, and takes the
/// message of a rank that is late, which gets its answer too. Only the death of a rank ends the
/// group.
///
/// Throws Error on rank 0, naming the first rank that did not come within `timeout` (all of them
/// where `waits_for_all`), and on each other rank, when it comes, saying that rank 0 failed.
/// `patience` is how long these wait for rank 0's answer: longer than `timeout`, so that it is
/// rank 0 who says what is wrong.
void monitored_barrier(const std::shared_ptr<Communicator>& communicator,
                       std::atomic<std::uint64_t>& num_barriers, std::chrono::milliseconds timeout,
                       std::chrono::milliseconds patience, bool waits_for_all);

}  // namespace ringcomm
