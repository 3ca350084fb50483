#pragma once

#include <cstdint>

#include "collectives/collective.h"
#include "collectives/communicator_options.h"
#include "collectives/messages/engine.h"

namespace ringcomm {

/// Fills in the algorithm of `header` and its cut, from what is equal on all ranks.
void plan_message_collective(int world_size, const Collective& call,
                             const CommunicatorOptions& options, CallHeader& header);

/// Runs any collective over messages, as `header` says. Checks the header of every peer before its
/// data, and that of the previous rank whatever the collective: so some rank finds any difference.
/// Returns the bytes that peers consumed from this rank. Throws Stopped, Mismatched.
std::uint64_t run_message_collective(MessageEngine& engine, const Collective& call,
                                     const CallHeader& header);

}  // namespace ringcomm
