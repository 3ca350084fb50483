#pragma once

#include <cstdint>

#include "collectives/collective.h"
#include "collectives/messages/engine.h"

namespace ringcomm {

/// Collectives with a root, and the barrier, by trees and chains of messages. Small data goes down
/// a binomial tree in log2 N steps, large data along the chain of ranks in slices, at the bandwidth
/// of one link. All return the bytes that peers consumed from this rank.

std::uint64_t tree_broadcast(MessageEngine& engine, const Collective& call,
                             const CallHeader& header);
std::uint64_t chain_broadcast(MessageEngine& engine, const Collective& call,
                              const CallHeader& header);
/// From the rank behind the root around to the root, each adding its part: one rounding per hop.
std::uint64_t chain_reduce(MessageEngine& engine, const Collective& call, const CallHeader& header);
/// By dissemination: in step s a rank hears of the one 2^s before it.
void tree_barrier(MessageEngine& engine, const CallHeader& header);

}  // namespace ringcomm
