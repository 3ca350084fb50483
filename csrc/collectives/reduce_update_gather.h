#pragma once

#include <cstdint>
#include <functional>

#include "collectives/collective.h"
#include "collectives/engine.h"

namespace ringcomm {

/// reduce_scatter_update_all_gather on boards, slice by slice of every rank's chunk: each rank
/// stages its gradients for the others, reduces and updates its own slice, stages the parameters,
/// and gathers the others'. Gradients are reduced in the order of the ranks. Same contract as the
/// algorithms of all_reduce; the ring's is all_reduce_ring.
std::uint64_t reduce_update_gather(Engine& engine, const Collective& call,
                                   const CallHeader& header);

/// The same as a reduce_scatter, the update, and an all_gather, for carriers that know no update:
/// `run` carries out a collective of uneven shares. Equal
/// to the fused form to the last bit where that reduces in the same order.
Traffic reduce_update_gather_in_parts(const Collective& call, int rank, int world_size,
                                      const std::function<Traffic(const Collective&)>& run);

}  // namespace ringcomm
