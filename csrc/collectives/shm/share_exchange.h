#pragma once

#include <cstdint>

#include "collectives/collective.h"
#include "collectives/shm/engine.h"

namespace ringcomm {

/// Collectives in which a rank has a share for each other one, or for some, and the shares may
/// differ in size. On boards: one phase per piece, in which a rank's region is divided among those
/// that it has something for, in proportion to their shares. So the number of phases is that of the
/// rank with the most to send. Small shares cost one hand-over.
///
/// all_gather and reduce_scatter have quicker forms for shares of one size (board_collectives.h).
/// All throw Stopped or Mismatched; they return the bytes that peers consumed from this rank.

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
