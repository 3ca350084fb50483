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
/// From the rank after the root around the ring to the root; each rank adds its part, with one
/// rounding per hop.
std::uint64_t chain_reduce(MessageEngine& engine, const Collective& call, const CallHeader& header);
/// A dissemination barrier: in step s a rank receives from the rank 2^s before it.
void tree_barrier(MessageEngine& engine, const CallHeader& header);

}  // namespace ringcomm
