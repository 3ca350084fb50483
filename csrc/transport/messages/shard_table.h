#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/collective.h"
#include "collectives/ring.h"
#include "core/chunk_layout.h"
#include "reduce/reduce_op.h"

namespace ringcomm {

/// The addresses of a collective's chunks on this rank: one chunk per rank, of any sizes. An
/// algorithm treats all_reduce, which splits one buffer, and reduce_scatter and all_gather, which
/// have one buffer per rank, the same way.
struct ShardTable {
  std::vector<RingChunk> shards;  ///< by rank
  std::size_t element_bytes = 0;
  const ReduceOp* op = nullptr;  ///< null where nothing is reduced
  int divisor = 1;

  /// The shards of a reduce_scatter (a chunk for each rank, and this rank's own result) or an
  /// all_gather (room for each rank's chunk, whose own one is to be copied there first), or all
  /// chunks of the one buffer of another call.
  static ShardTable of_call(const Collective& call, int rank, int world_size);

  const RingChunk& of(int rank) const { return shards[static_cast<std::size_t>(rank)]; }
  std::size_t max_elems() const;
  std::size_t num_bytes(int rank) const { return of(rank).num_elems * element_bytes; }
  /// The bytes of each chunk, which is the same on all ranks.
  std::vector<std::uint64_t> table() const;

  const std::byte* input(int rank, const ElemRange& slice) const {
    return of(rank).input + slice.begin_elems * element_bytes;
  }
  std::byte* output(int rank, const ElemRange& slice) const {
    return of(rank).output + slice.begin_elems * element_bytes;
  }
  ElemRange slice(int rank, std::size_t slice_idx, std::size_t slice_elems) const {
    return slice_of({0, of(rank).num_elems}, slice_idx, slice_elems);
  }
};

}  // namespace ringcomm
