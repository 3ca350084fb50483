#pragma once

#include <cstdint>

#include "collectives/collective.h"
#include "collectives/shm/engine.h"

namespace ringcomm {

/// reduce_scatter_update_all_gather on boards, slice by slice of every rank's chunk: each rank
/// stages its gradients for the others, reduces and updates its own slice, stages the parameters,
/// and gathers the others'. Gradients are reduced in the order of the ranks. Same contract as the
/// algorithms of all_reduce; the ring's is all_reduce_ring.
std::uint64_t reduce_update_gather(Engine& engine, const Collective& call,
                                   const CallHeader& header);

}  // namespace ringcomm
