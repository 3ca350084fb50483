#include "transport/messages/shares.h"

#include <algorithm>

namespace ringcomm {

MessageShares MessageShares::of_call(const Collective& call, int rank, int world_size) {
  const bool reduces = is_reduction(call.op);
  MessageShares result{.shares = {},
                       .element_bytes = ringcomm::element_bytes(call.dtype),
                       .op = reduces ? &reduce_op_of(call) : nullptr,
                       .divisor = reduces ? divisor_of(call, world_size) : 1};
  const ChunkLayout layout(call.num_elems, world_size);
  for (int peer = 0; peer < world_size; ++peer) {
    const ElemRange chunk = layout.chunk(peer);
    if (call.op == OpKind::kReduceScatter)
      result.shares.push_back({at(call.inputs[peer], 0, 1),
                               peer == rank ? at(call.outputs[0], 0, 1) : nullptr,
                               call.input_share(peer)});
    else if (call.op == OpKind::kAllGather)
      result.shares.push_back(
          {at(call.outputs[peer], 0, 1), at(call.outputs[peer], 0, 1), call.output_share(peer)});
    else
      result.shares.push_back({at(call.inputs[0], chunk.begin_elems, result.element_bytes),
                               at(call.outputs[0], chunk.begin_elems, result.element_bytes),
                               chunk.num_elems});
  }
  return result;
}

std::size_t MessageShares::max_elems() const {
  std::size_t max_elems = 0;
  for (const RingChunk& share : shares) max_elems = std::max(max_elems, share.num_elems);
  return max_elems;
}

std::vector<std::uint64_t> MessageShares::table() const {
  std::vector<std::uint64_t> table;
  for (const RingChunk& share : shares) table.push_back(share.num_elems * element_bytes);
  return table;
}

}  // namespace ringcomm
