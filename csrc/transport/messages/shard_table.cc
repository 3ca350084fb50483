#include "transport/messages/shard_table.h"

#include <algorithm>

#include "collectives/op_kind.h"

namespace ringcomm {

ShardTable ShardTable::of_call(const Collective& call, int rank, int world_size) {
  const bool reduces = is_reduction(call.op);
  ShardTable result{.shards = {},
                    .element_bytes = ringcomm::element_bytes(call.dtype),
                    .op = reduces ? &reduce_op_of(call) : nullptr,
                    .divisor = reduces ? divisor_of(call, world_size) : 1};
  const ChunkLayout layout(call.num_elems, world_size);
  for (int peer = 0; peer < world_size; ++peer) {
    const ElemRange chunk = layout.chunk(peer);
    if (call.op == OpKind::kReduceScatter)
      result.shards.push_back({at(call.inputs[peer], 0, 1),
                               peer == rank ? at(call.outputs[0], 0, 1) : nullptr,
                               call.input_shard(peer)});
    else if (call.op == OpKind::kAllGather)
      result.shards.push_back(
          {at(call.outputs[peer], 0, 1), at(call.outputs[peer], 0, 1), call.output_shard(peer)});
    else
      result.shards.push_back({at(call.inputs[0], chunk.begin_elems, result.element_bytes),
                               at(call.outputs[0], chunk.begin_elems, result.element_bytes),
                               chunk.num_elems});
  }
  return result;
}

std::size_t ShardTable::max_elems() const {
  std::size_t max_elems = 0;
  for (const RingChunk& shard : shards) max_elems = std::max(max_elems, shard.num_elems);
  return max_elems;
}

std::vector<std::uint64_t> ShardTable::table() const {
  std::vector<std::uint64_t> table;
  for (const RingChunk& shard : shards) table.push_back(shard.num_elems * element_bytes);
  return table;
}

}  // namespace ringcomm
