#pragma once

#include <cstdint>

#include "collectives/collective.h"
#include "collectives/shm/engine.h"

namespace ringcomm {

/// The collectives over shared memory. Each takes a call whose header is the same on every rank,
/// checks that it is, and returns the bytes that peers consumed from this rank. Throws Stopped or
/// Mismatched.

// ---- all_reduce: results are equal to the last bit on all ranks, because every chunk is either
// reduced by one rank or by all in the order of the ranks

/// Every rank stages its whole buffer and reduces all of them. One synchronization per piece; N - 1
/// times the bytes.
std::uint64_t all_reduce_one_shot(Engine& engine, const Collective& call, const CallHeader& header);

/// Piece by piece: every rank stages its part, reduces its own chunk of all parts, stages the
/// result, gathers the others'.
std::uint64_t all_reduce_two_shot(Engine& engine, const Collective& call, const CallHeader& header);

/// Reduce-scatter and all-gather around a ring of links, slice by slice; between the two the call's
/// update, if there is one, so that this is also the ring of reduce_scatter_update_all_gather.
std::uint64_t all_reduce_ring(Engine& engine, const Collective& call, const CallHeader& header);

/// The ring for deterministic reductions in rank order: N - 1 times the bytes, like one_shot; the
/// slices of all ranks go around the same links.
std::uint64_t all_reduce_ring_ordered(Engine& engine, const Collective& call,
                                      const CallHeader& header);

/// reduce_scatter_update_all_gather on boards, slice by slice of every rank's chunk: each rank
/// stages its gradients for the others, reduces and updates its own slice, stages the parameters,
/// and gathers the others'. Gradients are reduced in the order of the ranks.
std::uint64_t reduce_update_gather(Engine& engine, const Collective& call,
                                   const CallHeader& header);

// ---- on boards with one phase per piece: each byte is staged once, regardless of the number of
// readers

/// Every rank stages a slice of each peer's chunk; each reduces its own from all.
std::uint64_t reduce_scatter(Engine& engine, const Collective& call, const CallHeader& header);

/// Every rank stages its share; all copy all.
std::uint64_t all_gather(Engine& engine, const Collective& call, const CallHeader& header);

/// The root stages a piece while the others copy the one before.
std::uint64_t broadcast(Engine& engine, const Collective& call, const CallHeader& header);

/// Every rank but the root stages; the root reduces.
std::uint64_t reduce(Engine& engine, const Collective& call, const CallHeader& header);

/// Headers only: no rank leaves before all have arrived.
std::uint64_t barrier(Engine& engine, const CallHeader& header);

// ---- a rank has a share for each other one, or for some, and the shares may differ in size. On
// boards: one phase per piece, in which a rank's region is divided among those that it has
// something for, in proportion to their shares. So the number of phases is that of the rank with
// the most to send. Small shares cost one hand-over.

std::uint64_t gather(Engine& engine, const Collective& call, const CallHeader& header);
std::uint64_t scatter(Engine& engine, const Collective& call, const CallHeader& header);
std::uint64_t all_to_all(Engine& engine, const Collective& call, const CallHeader& header);
std::uint64_t all_gather_uneven(Engine& engine, const Collective& call, const CallHeader& header);
std::uint64_t reduce_scatter_uneven(Engine& engine, const Collective& call,
                                    const CallHeader& header);

/// Throws Mismatched with the sizes that differ, for a call in which the shares of some ranks are
/// uneven and those of others are not. The first phase must have been published.
void explain_mismatch(Engine& engine, const Collective& call, const CallHeader& header);

}  // namespace ringcomm
