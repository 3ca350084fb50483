#pragma once

#include <cstddef>

#include "collectives/collective.h"

namespace ringcomm {

/// The default algorithm of an all_reduce of `num_bytes` over `world_size` ranks in shared memory.
///
/// Where one_shot stops winning was measured with 2, 4 and 8 ranks on two cores
/// (docs/experiments.md, "all_reduce"): it moves (N - 1)/2 times the bytes of two_shot and saves
/// one of its two hand-overs. At half or double of these limits either costs about 1.3 times the
/// other. The ring moves what two_shot moves, in 2(N - 1) hand-overs. `one_shot_max_bytes` replaces
/// that limit where it is not 0.
Algorithm choose_all_reduce(std::size_t num_bytes, int world_size, std::size_t one_shot_max_bytes);

/// From this size of a rank's share, a collective runs on the ranks' own buffers if all of them can
/// be read.
///
/// It then has one synchronization more than staging, whose cost grows with the ranks per core, and
/// moves at most half of the bytes; measured with 2 and 4 ranks on two cores (docs/experiments.md,
/// "shared buffers"). In a broadcast the other ranks learn of the root's buffer after they have
/// begun to stage, and start again.
std::size_t min_direct_bytes(OpKind op, int world_size);

}  // namespace ringcomm
