#pragma once

#include <cstdint>

#include "collectives/collective.h"
#include "collectives/shm/engine.h"

namespace ringcomm {

/// The collectives on boards with one phase per piece: each byte is staged once, regardless of the
/// number of readers. Same contract as the algorithms of all_reduce.

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

}  // namespace ringcomm
