#include <algorithm>
#include <vector>

#include "collectives/collective.h"
#include "collectives/fused_update.h"
#include "collectives/shm/algorithms.h"
#include "collectives/shm/phase.h"

namespace ringcomm {
namespace {

// The maximum that a rank stages for one other in a phase: the data that it reads, updates and
// writes should stay in its L2 cache. With 2 and 4 ranks on two cores, half of it costs up to 8 %
// more at 64 MB; twice of it (with 2 ranks) saves nothing measurable.
constexpr std::size_t kSliceBytes = std::size_t{256} << 10;

// One slice of every rank's chunk, through both halves.
class UpdatedSlice {
 public:
  /// `range` is the slice's place in the longest chunk.
  UpdatedSlice(Engine& engine, const Collective& call, OwnerUpdate& update, const ElemRange& range)
      : engine_(engine),
        call_(call),
        update_(update),
        layout_(call.num_elems, engine.world_size()),
        range_(range) {}

  // Stages what the peers will reduce, one slice after the other in the order of the ranks.
  void stage_gradients(std::byte* region) const {
    for (int peer = 0; peer < engine_.world_size(); ++peer) {
      if (peer == engine_.rank()) continue;
      const ElemRange slice = slice_of_rank(peer);
      engine_.stage(gradients_for(region, peer),
                    at(call_.inputs[0], slice.begin_elems, update_.grad_bytes()),
                    slice.num_elems * update_.grad_bytes());
    }
  }

  // Updates this rank's slice with what all staged, and stages the new parameters.
  void update_own(const Phase& phase) const {
    const int rank = engine_.rank();
    const ElemRange slice = slice_of_rank(rank);
    std::vector<const void*> sources(static_cast<std::size_t>(engine_.world_size()));
    for (int peer = 0; peer < engine_.world_size(); ++peer)
      sources[static_cast<std::size_t>(peer)] =
          peer == rank ? at(call_.inputs[0], slice.begin_elems, update_.grad_bytes())
                       : gradients_for(phase.wait(peer), rank);
    std::byte* region = engine_.open();
    const bool is_streaming = engine_.store_kinds().kind() == host::StoreKind::kStreaming;
    update_.run(sources.data(), engine_.world_size(), slice, is_streaming ? nullptr : region);
    if (is_streaming)
      engine_.stage(region, at(call_.outputs[0], slice.begin_elems, update_.param_bytes()),
                    slice.num_elems * update_.param_bytes());
  }

  void gather_parameters() const {
    const std::size_t result_bytes = call_.num_elems * update_.param_bytes();
    for (int distance = 1; distance < engine_.world_size(); ++distance) {
      const int peer = (engine_.rank() + distance) % engine_.world_size();
      const ElemRange slice = slice_of_rank(peer);
      engine_.copy_result(at(call_.outputs[0], slice.begin_elems, update_.param_bytes()),
                          engine_.wait(peer), slice.num_elems * update_.param_bytes(),
                          result_bytes);
    }
  }

 private:
  // Chunks differ by one element, which the last slice of the shorter ones lacks.
  ElemRange slice_of_rank(int rank) const {
    const ElemRange chunk = layout_.chunk(rank);
    const std::size_t begin_elems = std::min(range_.begin_elems, chunk.num_elems);
    const std::size_t end_elems = std::min(range_.end_elems(), chunk.num_elems);
    return {chunk.begin_elems + begin_elems, end_elems - begin_elems};
  }

  template <class Byte>
  Byte* gradients_for(Byte* region, int rank) const {
    return at(region, static_cast<std::size_t>(rank) * range_.num_elems, update_.grad_bytes());
  }

  Engine& engine_;
  const Collective& call_;
  OwnerUpdate& update_;
  ChunkLayout layout_;
  ElemRange range_;
};

std::uint64_t sent_bytes(const Collective& call, const OwnerUpdate& update, int world_size) {
  const auto num_peers = static_cast<std::uint64_t>(world_size - 1);
  const std::size_t own_elems = update.own().num_elems;
  return (call.num_elems - own_elems) * update.grad_bytes() +
         num_peers * own_elems * update.param_bytes();
}

}  // namespace

std::uint64_t reduce_update_gather(Engine& engine, const Collective& call,
                                   const CallHeader& header) {
  const int world_size = engine.world_size();
  OwnerUpdate update(call, engine.rank(), world_size);
  const std::size_t max_bytes = std::max(update.grad_bytes(), update.param_bytes());
  const std::size_t slice_bytes =
      std::min(kSliceBytes, engine.phase_bytes() / static_cast<std::size_t>(world_size));
  const std::size_t chunk_elems = ChunkLayout(call.num_elems, world_size).max_chunk_elems();

  for_each_piece(engine, header, chunk_elems, slice_bytes / max_bytes,
                 [&](const ElemRange& range, const Phase& phase) {
                   const UpdatedSlice slice(engine, call, update, range);
                   slice.stage_gradients(phase.open());
                   engine.publish();
                   slice.update_own(phase);
                   engine.publish();
                   slice.gather_parameters();
                 });
  return sent_bytes(call, update, world_size);
}

}  // namespace ringcomm
