#include "collectives/messages/shares.h"

#include <algorithm>
#include <cstring>

#include "collectives/collective.h"

namespace ringcomm {

MessageShares MessageShares::of_buffer(const Collective& call, int world_size) {
  MessageShares result{.shares = {},
                       .element_bytes = ringcomm::element_bytes(call.dtype),
                       .op = &reduce_op_of(call),
                       .divisor = divisor_of(call, world_size)};
  const ChunkLayout layout(call.num_elems, world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    const ElemRange chunk = layout.chunk(rank);
    result.shares.push_back({at(call.inputs[0], chunk.begin_elems, result.element_bytes),
                             at(call.outputs[0], chunk.begin_elems, result.element_bytes),
                             chunk.num_elems});
  }
  return result;
}

MessageShares MessageShares::of_reduce_scatter(const Collective& call, int rank, int world_size) {
  MessageShares result{.shares = {},
                       .element_bytes = ringcomm::element_bytes(call.dtype),
                       .op = &reduce_op_of(call),
                       .divisor = divisor_of(call, world_size)};
  for (int peer = 0; peer < world_size; ++peer)
    result.shares.push_back({at(call.inputs[peer], 0, 1),
                             peer == rank ? static_cast<std::byte*>(call.outputs[0]) : nullptr,
                             call.input_share(peer)});
  return result;
}

MessageShares MessageShares::of_all_gather(const Collective& call, int rank, int world_size) {
  MessageShares result{.shares = {}, .element_bytes = ringcomm::element_bytes(call.dtype)};
  for (int peer = 0; peer < world_size; ++peer) {
    auto* output = static_cast<std::byte*>(call.outputs[peer]);
    result.shares.push_back({output, output, call.output_share(peer)});
  }
  const std::size_t own_bytes = result.num_bytes(rank);
  if (own_bytes > 0 && call.inputs[0] != call.outputs[rank])
    std::memcpy(call.outputs[rank], call.inputs[0], own_bytes);
  return result;
}

std::size_t MessageShares::max_elems() const {
  std::size_t max_elems = 0;
  for (const Share& share : shares) max_elems = std::max(max_elems, share.num_elems);
  return max_elems;
}

std::vector<std::uint64_t> MessageShares::table() const {
  std::vector<std::uint64_t> table;
  for (std::size_t rank = 0; rank < shares.size(); ++rank)
    table.push_back(num_bytes(static_cast<int>(rank)));
  return table;
}

}  // namespace ringcomm
