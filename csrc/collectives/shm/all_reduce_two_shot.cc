#include <cstring>
#include <vector>

#include "collectives/collective.h"
#include "collectives/shm/algorithms.h"
#include "collectives/shm/phase.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// One piece of the buffer, through both shots.
class TwoShotPiece {
 public:
  TwoShotPiece(Engine& engine, const Collective& call, const ElemRange& piece)
      : engine_(engine),
        call_(call),
        piece_(piece),
        layout_(piece.num_elems, engine.world_size()),
        own_(layout_.chunk(engine.rank())),
        element_bytes_(element_bytes(call.dtype)) {}

  // Stages what the peers will reduce: everything except this rank's own chunk, each element at its
  // offset in the piece.
  void stage_input(std::byte* region) const {
    copy_to(region, 0, own_.begin_elems);
    copy_to(region, own_.end_elems(), piece_.num_elems);
  }

  // Reduces this rank's chunk of what all staged into the output, and stages that.
  void reduce_own_chunk(const Phase& input_phase) const {
    const int world_size = engine_.world_size();
    const std::size_t begin_elems = piece_.begin_elems + own_.begin_elems;
    std::vector<const void*> sources(static_cast<std::size_t>(world_size));
    for (int peer = 0; peer < world_size; ++peer)
      sources[static_cast<std::size_t>(peer)] =
          peer == engine_.rank() ? at(call_.inputs[0], begin_elems, element_bytes_)
                                 : at(input_phase.wait(peer), own_.begin_elems, element_bytes_);
    if (engine_.has_notes()) return;
    std::byte* region = engine_.open();
    std::byte* output = at(call_.outputs[0], begin_elems, element_bytes_);
    const bool is_streaming = engine_.store_kinds().kind() == host::StoreKind::kStreaming;
    reduce_op_of(call_).combine(output, is_streaming ? nullptr : region, sources.data(), world_size,
                                own_.num_elems, divisor_of(call_, world_size));
    if (is_streaming)
      engine_.stage(region, output, own_.num_elems * element_bytes_);
    else
      engine_.count_copied(own_.num_elems * element_bytes_);
  }

  void gather_results() const {
    const int world_size = engine_.world_size();
    for (int distance = 1; distance < world_size; ++distance) {
      const int peer = (engine_.rank() + distance) % world_size;
      const ElemRange chunk = layout_.chunk(peer);
      const std::byte* region = engine_.wait(peer);
      if (chunk.num_elems > 0)
        std::memcpy(at(call_.outputs[0], piece_.begin_elems + chunk.begin_elems, element_bytes_),
                    region, chunk.num_elems * element_bytes_);
      engine_.count_copied(chunk.num_elems * element_bytes_);
    }
  }

  std::uint64_t sent_bytes() const {
    const auto num_peers = static_cast<std::uint64_t>(engine_.world_size() - 1);
    return (piece_.num_elems - own_.num_elems + num_peers * own_.num_elems) * element_bytes_;
  }

 private:
  void copy_to(std::byte* region, std::size_t begin_elems, std::size_t end_elems) const {
    engine_.stage(at(region, begin_elems, element_bytes_),
                  at(call_.inputs[0], piece_.begin_elems + begin_elems, element_bytes_),
                  (end_elems - begin_elems) * element_bytes_);
  }

  Engine& engine_;
  const Collective& call_;
  ElemRange piece_;
  ChunkLayout layout_;
  ElemRange own_;
  std::size_t element_bytes_;
};

}  // namespace

std::uint64_t all_reduce_two_shot(Engine& engine, const Collective& call,
                                  const CallHeader& header) {
  // A multiple of the number of ranks: a count that the ranks divide is then divided in every
  // piece.
  const auto world = static_cast<std::size_t>(engine.world_size());
  const std::size_t max_elems = engine.phase_bytes() / element_bytes(call.dtype) / world * world;
  std::uint64_t sent_bytes = 0;
  for_each_piece(engine, header, call.num_elems, max_elems,
                 [&](const ElemRange& elems, const Phase& phase) {
                   const TwoShotPiece piece(engine, call, elems);
                   piece.stage_input(phase.open());
                   engine.publish();
                   piece.reduce_own_chunk(phase);
                   if (engine.has_notes()) return;
                   engine.publish();
                   piece.gather_results();
                   sent_bytes += piece.sent_bytes();
                 });
  return sent_bytes;
}

}  // namespace ringcomm
