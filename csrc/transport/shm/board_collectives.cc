#include "transport/shm/context.h"

namespace ringcomm {

// Headers only: no rank leaves before all have arrived.
std::uint64_t barrier(ShmContext& context, const Collective&) {
  static_cast<void>(context.publish());
  return 0;
}

// The root stages a piece while the others copy the one before: half of a phase's maximum.
std::uint64_t broadcast(ShmContext& context, const Collective& call) {
  const std::size_t bytes = element_bytes(call.dtype);
  const bool is_root = context.rank() == call.root;
  context.for_each_piece(
      call.num_elems, context.phase_bytes() / 2 / bytes,
      [&](const ElemRange& piece) {
        if (is_root)
          context.stage(context.open(), at(call.inputs[0], piece.begin_elems, bytes),
                        piece.num_elems * bytes);
      },
      [&](const ElemRange& piece) {
        if (!is_root)
          context.copy_result(at(call.outputs[0], piece.begin_elems, bytes),
                              context.wait(call.root), piece.num_elems * bytes, call.num_bytes());
      });
  return is_root ? context.num_peers() * call.num_bytes() : 0;
}

// Every rank stages its shard; all copy all.
std::uint64_t all_gather(ShmContext& context, const Collective& call) {
  if (context.header().is_uneven) return alltoallv(context, call);
  const std::size_t bytes = element_bytes(call.dtype);
  const std::size_t result_bytes =
      static_cast<std::size_t>(context.world_size()) * call.num_bytes();
  const auto input = [&](const ElemRange& piece) {
    return at(call.inputs[0], piece.begin_elems, bytes);
  };
  context.for_each_piece(
      call.num_elems, context.phase_bytes() / bytes,
      [&](const ElemRange& piece) {
        context.stage(context.open(), input(piece), piece.num_elems * bytes);
      },
      [&](const ElemRange& piece) {
        for (int distance = 0; distance < context.world_size(); ++distance) {
          const int peer = (context.rank() + distance) % context.world_size();
          context.copy_result(at(call.outputs[peer], piece.begin_elems, bytes),
                              distance == 0 ? input(piece) : context.wait(peer),
                              piece.num_elems * bytes, result_bytes);
        }
      });
  return context.num_peers() * call.num_bytes();
}

// Every rank stages a slice of each peer's chunk; each reduces its own from all.
std::uint64_t reduce_scatter(ShmContext& context, const Collective& call) {
  if (context.header().is_uneven) return alltoallv(context, call);
  const int rank = context.rank();
  const int world_size = context.world_size();
  const std::size_t bytes = element_bytes(call.dtype);
  std::vector<const void*>& sources = context.sources();
  // Of the slice for `target` in the region of another rank, which has none for itself; a shared
  // input has one for every rank.
  const auto offset_elems = [&](int target, int of, const ElemRange& piece) {
    const bool is_behind = target > of && !context.is_zero_copy();
    return static_cast<std::size_t>(is_behind ? target - 1 : target) * piece.num_elems;
  };
  context.for_each_piece(
      call.num_elems, context.phase_bytes() / context.num_peers() / bytes,
      [&](const ElemRange& piece) {
        std::byte* region = context.open();
        for (int peer = 0; peer < world_size; ++peer)
          if (peer != rank)
            context.stage(at(region, offset_elems(peer, rank, piece), bytes),
                          at(call.inputs[peer], piece.begin_elems, bytes), piece.num_elems * bytes);
      },
      [&](const ElemRange& piece) {
        for (int peer = 0; peer < world_size; ++peer)
          sources[peer] = peer == rank
                              ? at(call.inputs[rank], piece.begin_elems, bytes)
                              : at(context.wait(peer), offset_elems(rank, peer, piece), bytes);
        context.reduce(call, at(call.outputs[0], piece.begin_elems, bytes), piece.num_elems);
      });
  return context.num_peers() * call.num_bytes();
}

}  // namespace ringcomm
