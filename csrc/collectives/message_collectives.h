#pragma once

#include <cstdint>

#include "collectives/collective.h"
#include "collectives/message_engine.h"

namespace ringcomm {

/// Fills in the algorithm of `header`, from what is equal on all ranks. `asked` is the group's.
void plan_message_collective(const MessageEngine& engine, const Collective& call, Algorithm asked,
                             CallHeader& header);

/// Runs any collective over messages, as `header` says. Checks the header of every peer before its
/// data, and that of the previous rank whatever the collective: so some rank finds any difference.
/// Returns the bytes that peers consumed from this rank. Throws Stopped, Mismatched.
std::uint64_t run_message_collective(MessageEngine& engine, const Collective& call,
                                     const CallHeader& header);

}  // namespace ringcomm
