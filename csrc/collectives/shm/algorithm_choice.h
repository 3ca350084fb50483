#pragma once

#include <cstddef>

#include "collectives/collective.h"

namespace ringcomm {

/// The algorithm of an all_reduce of `num_bytes` over `world_size` ranks in shared memory when none
/// is asked for.
///
/// Where one_shot stops winning was measured with 2, 4 and 8 ranks on two cores
/// (docs/experiments.md, "all_reduce"): it moves (N - 1)/2 times the bytes of two_shot and saves
/// one of its two hand-overs. At half or double of these limits either costs about 1.3 times the
/// other. The ring moves what two_shot moves, in 2(N - 1) hand-overs. `one_shot_max_bytes` replaces
/// that limit where it is not 0.
Algorithm choose_all_reduce(std::size_t num_bytes, int world_size, std::size_t one_shot_max_bytes);

/// The bytes of a rank's share from which on a collective runs on the ranks' own buffers where all
/// of them can be read.
///
/// It then has one hand-over more than staging, whose cost grows with the ranks per core, and moves
/// half of the bytes or less; measured with 2 and 4 ranks on two cores (docs/experiments.md,
/// "shared buffers"). In a broadcast the others learn of the root's buffer when they have begun to
/// stage, and start again.
std::size_t min_direct_bytes(OpKind op, int world_size);

}  // namespace ringcomm
