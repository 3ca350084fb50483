#include <vector>

#include "collectives/collective.h"
#include "collectives/shm/algorithms.h"
#include "collectives/shm/phase.h"

namespace ringcomm {
namespace {

// The index of the slice for `target` in the region of `rank`, which has one for every other rank.
int position_of(int target, int rank) { return target < rank ? target : target - 1; }

}  // namespace

std::uint64_t reduce_scatter(Engine& engine, const Collective& call, const CallHeader& header) {
  const int rank = engine.rank();
  const int world_size = engine.world_size();
  const std::size_t bytes = element_bytes(call.dtype);
  const std::size_t max_elems =
      engine.phase_bytes() / static_cast<std::size_t>(world_size - 1) / bytes;
  const ReduceOp& op = reduce_op_of(call);
  std::vector<const void*> sources(static_cast<std::size_t>(world_size));

  for_each_piece(
      engine, header, call.num_elems, max_elems, [&](const ElemRange& piece, const Phase& phase) {
        std::byte* region = phase.open();
        for (int peer = 0; peer < world_size; ++peer) {
          if (peer == rank) continue;
          const std::size_t offset_elems =
              static_cast<std::size_t>(position_of(peer, rank)) * piece.num_elems;
          engine.stage(at(region, offset_elems, bytes),
                       at(call.inputs[peer], piece.begin_elems, bytes), piece.num_elems * bytes);
        }
        engine.publish();
        for (int peer = 0; peer < world_size; ++peer) {
          const std::size_t offset_elems =
              static_cast<std::size_t>(position_of(rank, peer)) * piece.num_elems;
          sources[static_cast<std::size_t>(peer)] =
              peer == rank ? at(call.inputs[rank], piece.begin_elems, bytes)
                           : at(phase.wait(peer), offset_elems, bytes);
        }
        if (engine.has_notes()) return;
        op.combine(at(call.outputs[0], piece.begin_elems, bytes), nullptr, sources.data(),
                   world_size, piece.num_elems, divisor_of(call, world_size));
      });
  return static_cast<std::uint64_t>(world_size - 1) * call.num_bytes();
}

std::uint64_t all_gather(Engine& engine, const Collective& call, const CallHeader& header) {
  const int rank = engine.rank();
  const int world_size = engine.world_size();
  const std::size_t bytes = element_bytes(call.dtype);

  const std::size_t result_bytes = static_cast<std::size_t>(world_size) * call.num_bytes();
  const std::size_t max_elems = engine.phase_bytes() / bytes;
  for_each_piece(engine, header, call.num_elems, max_elems,
                 [&](const ElemRange& piece, const Phase& phase) {
                   const std::byte* input = at(call.inputs[0], piece.begin_elems, bytes);
                   engine.stage(phase.open(), input, piece.num_elems * bytes);
                   engine.publish();
                   engine.copy_result(at(call.outputs[rank], piece.begin_elems, bytes), input,
                                      piece.num_elems * bytes, result_bytes);
                   for (int distance = 1; distance < world_size; ++distance) {
                     const int peer = (rank + distance) % world_size;
                     const std::byte* staged = phase.wait(peer);
                     if (!engine.has_notes())
                       engine.copy_result(at(call.outputs[peer], piece.begin_elems, bytes), staged,
                                          piece.num_elems * bytes, result_bytes);
                   }
                 });
  return static_cast<std::uint64_t>(world_size - 1) * call.num_bytes();
}

std::uint64_t broadcast(Engine& engine, const Collective& call, const CallHeader& header) {
  // Half of a phase's maximum: the others copy one piece while the root stages the next.
  const std::size_t bytes = element_bytes(call.dtype);
  const bool is_root = engine.rank() == call.root;

  const std::size_t max_elems = engine.phase_bytes() / 2 / bytes;
  for_each_piece(
      engine, header, call.num_elems, max_elems, [&](const ElemRange& piece, const Phase& phase) {
        if (is_root) {
          engine.stage(phase.open(), at(call.inputs[0], piece.begin_elems, bytes),
                       piece.num_elems * bytes);
        } else if (phase.is_first) {
          phase.open();
        }
        engine.publish();
        for (int peer = 0; phase.is_first && peer < engine.world_size(); ++peer)
          if (peer != engine.rank()) phase.wait(peer);
        if (!is_root && !engine.has_notes())
          engine.copy_result(at(call.outputs[0], piece.begin_elems, bytes), phase.wait(call.root),
                             piece.num_elems * bytes, call.num_bytes());
      });
  return is_root ? static_cast<std::uint64_t>(engine.world_size() - 1) * call.num_bytes() : 0;
}

std::uint64_t reduce(Engine& engine, const Collective& call, const CallHeader& header) {
  const int rank = engine.rank();
  const int world_size = engine.world_size();
  const std::size_t bytes = element_bytes(call.dtype);
  const ReduceOp& op = reduce_op_of(call);
  std::vector<const void*> sources(static_cast<std::size_t>(world_size));

  const std::size_t max_elems = engine.phase_bytes() / bytes;
  for_each_piece(
      engine, header, call.num_elems, max_elems, [&](const ElemRange& piece, const Phase& phase) {
        const std::byte* input = at(call.inputs[0], piece.begin_elems, bytes);
        if (rank != call.root) {
          engine.stage(phase.open(), input, piece.num_elems * bytes);
        } else if (phase.is_first) {
          phase.open();
        }
        engine.publish();
        if (rank == call.root || phase.is_first)
          for (int peer = 0; peer < world_size; ++peer)
            sources[static_cast<std::size_t>(peer)] = peer == rank ? input : phase.wait(peer);
        if (rank == call.root)
          op.combine(at(call.outputs[0], piece.begin_elems, bytes), nullptr, sources.data(),
                     world_size, piece.num_elems, divisor_of(call, world_size));
      });
  return rank == call.root ? 0 : call.num_bytes();
}

std::uint64_t barrier(Engine& engine, const CallHeader& header) {
  engine.exchange_headers(header);
  return 0;
}

}  // namespace ringcomm
