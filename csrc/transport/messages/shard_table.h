#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "collectives/call.h"
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
  static ShardTable of_call(const Collective& call, int rank, int world_size) {
    const bool reduces = is_reduction(call.op);
    ShardTable table{.shards = {},
                     .element_bytes = ringcomm::element_bytes(call.dtype),
                     .op = reduces ? &reduce_op_of(call) : nullptr,
                     .divisor = reduces ? divisor_of(call, world_size) : 1};
    const ChunkLayout layout(call.num_elems, world_size);
    const auto data = [&](const void* buffer, std::size_t elems = 0) {
      return const_cast<std::byte*>(at(buffer, elems, table.element_bytes));
    };
    for (int peer = 0; peer < world_size; ++peer) {
      const auto [begin_elems, num_elems] = layout.chunk(peer);
      table.shards.push_back(call.op == OpKind::kReduceScatter
                                 ? RingChunk{data(call.inputs[peer]),
                                             peer == rank ? data(call.outputs[0]) : nullptr,
                                             call.input_shard(peer)}
                             : call.op == OpKind::kAllGather
                                 ? RingChunk{data(call.outputs[peer]), data(call.outputs[peer]),
                                             call.output_shard(peer)}
                                 : RingChunk{data(call.inputs[0], begin_elems),
                                             data(call.outputs[0], begin_elems), num_elems});
    }
    return table;
  }

  const RingChunk& of(int rank) const { return shards[static_cast<std::size_t>(rank)]; }
  std::size_t max_elems() const {
    return std::ranges::max(shards, {}, &RingChunk::num_elems).num_elems;
  }
  std::size_t num_bytes(int rank) const { return of(rank).num_elems * element_bytes; }

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
