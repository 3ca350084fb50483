#include <vector>

#include "collectives/collective.h"
#include "collectives/shm/algorithms.h"
#include "collectives/shm/phase.h"

namespace ringcomm {

std::uint64_t all_reduce_one_shot(Engine& engine, const Collective& call,
                                  const CallHeader& header) {
  const int rank = engine.rank();
  const int world_size = engine.world_size();
  const std::size_t bytes = element_bytes(call.dtype);
  const ReduceOp& op = reduce_op_of(call);
  std::vector<const void*> sources(static_cast<std::size_t>(world_size));

  const std::size_t max_elems = engine.phase_bytes() / bytes;
  for_each_piece(
      engine, header, call.num_elems, max_elems, [&](const ElemRange& piece, const Phase& phase) {
        const std::byte* input = at(call.inputs[0], piece.begin_elems, bytes);
        engine.stage(phase.open(), input, piece.num_elems * bytes);
        engine.publish();
        // In the order of the ranks on every rank, so that all get the same bits.
        for (int peer = 0; peer < world_size; ++peer)
          sources[static_cast<std::size_t>(peer)] = peer == rank ? input : phase.wait(peer);
        if (engine.has_notes()) return;
        op.combine(at(call.outputs[0], piece.begin_elems, bytes), nullptr, sources.data(),
                   world_size, piece.num_elems, divisor_of(call, world_size));
      });
  return static_cast<std::uint64_t>(world_size - 1) * call.num_bytes();
}

}  // namespace ringcomm
