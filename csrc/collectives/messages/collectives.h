#pragma once

#include <cstdint>

#include "collectives/collective.h"
#include "collectives/messages/engine.h"
#include "collectives/messages/shares.h"

namespace ringcomm {

/// Sets the algorithm of `header` and its slots from values that are equal on all ranks.
void plan_message_collective(int world_size, const Collective& call,
                             const CommunicatorOptions& options, CallHeader& header);

/// Runs any collective over messages with the algorithm of `header`. Checks the header of every
/// peer before its data, and the previous rank's header in every collective, so some rank detects
/// any difference. Returns the bytes that peers consumed from this rank. Throws Stopped,
/// Mismatched.
std::uint64_t run_message_collective(MessageEngine& engine, const Collective& call,
                                     const CallHeader& header);

/// The part of it that reduces in rank order with one rounding: every rank sends each share to its
/// owner, which reduces what it receives into its output. If there is a root, only that owns one,
/// and the ranks that exchange nothing compare no headers. Returns the bytes sent.
std::uint64_t reduce_directly(MessageEngine& engine, const CallHeader& header,
                              const MessageShares& shares, int root = -1);

}  // namespace ringcomm
