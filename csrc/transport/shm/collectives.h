#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/algorithm.h"
#include "collectives/collective.h"
#include "collectives/op_kind.h"
#include "transport/shm/context.h"

namespace ringcomm {

/// The collectives over shared memory. Each runs after ShmContext::begin() with the call's header,
/// and returns the bytes that peers consumed from this rank. Throws WaitAborted or Mismatched.
using ShmCollective = std::uint64_t(ShmContext& context, const Collective& call);

/// all_reduce.cc: results are equal to the last bit on all ranks, because every chunk is either
/// reduced by one rank or by all in the order of the ranks.
ShmCollective all_reduce_one_shot, all_reduce_shared, reduce;
/// all_reduce, or with an update reduce_scatter_update_all_gather; run_ring is in ring.cc.
ShmCollective run_two_shot, run_ring;

/// The default algorithm of an all_reduce of `num_bytes` over `world_size` ranks.
/// `one_shot_max_bytes` replaces the measured limit where it is not 0.
Algorithm choose_all_reduce(std::size_t num_bytes, int world_size, std::size_t one_shot_max_bytes);

/// board_collectives.cc: one phase per piece; each byte is staged once, regardless of the number of
/// readers. While the context shares inputs, they run on these.
ShmCollective barrier, broadcast, all_gather, reduce_scatter;

/// From this size of a rank's shard, a collective runs on the ranks' own buffers if all of them can
/// be read.
std::size_t min_direct_bytes(OpKind op, int world_size);

/// alltoallv.cc: a rank has a shard for each other one, or for some, and the shards may differ
/// in size.
ShmCollective alltoallv;
/// Throws Mismatched with the sizes that differ, for a call in which the shards of some ranks are
/// uneven and those of others are not. The first phase must have been published.
void explain_mismatch(ShmContext& context, const Collective& call);

}  // namespace ringcomm
