#pragma once

#include <cstdint>

#include "collectives/collective.h"
#include "collectives/shm/engine.h"

namespace ringcomm {

/// The algorithms of all_reduce. Each takes a call whose header is the same on every rank, checks
/// that it is, and returns the bytes that peers consumed from this rank. Throws Stopped or
/// Mismatched. Results are equal to the last bit on all ranks: every chunk is either reduced by one
/// rank or by all in the order of the ranks.

/// Every rank stages its whole buffer and reduces all of them. One synchronization per piece; N - 1
/// times the bytes.
std::uint64_t all_reduce_one_shot(Engine& engine, const Collective& call, const CallHeader& header);

/// Piece by piece: every rank stages its part, reduces its own chunk of all parts, stages the
/// result, gathers the others'.
std::uint64_t all_reduce_two_shot(Engine& engine, const Collective& call, const CallHeader& header);

/// Reduce-scatter and all-gather around a ring of links, slice by slice through
/// `header.ring_num_slots` slots; between the two the call's update, if there is one, so that this
/// is also the ring of reduce_scatter_update_all_gather.
std::uint64_t all_reduce_ring(Engine& engine, const Collective& call, const CallHeader& header);

/// The ring for deterministic reductions in rank order: N - 1 times the bytes, like one_shot; the
/// slices of all ranks go around the same links.
std::uint64_t all_reduce_ring_ordered(Engine& engine, const Collective& call,
                                      const CallHeader& header);

}  // namespace ringcomm
