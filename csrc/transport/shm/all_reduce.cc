#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "collectives/fused_update.h"
#include "transport/shm/context.h"

namespace ringcomm {

// Where one_shot stops winning with 2, 4 and 8 ranks on two cores (docs/decisions.md). From 6 ranks
// on the limit falls as 1/N (docs/design/collectives.md).
std::size_t one_shot_max_bytes(int world_size) {
  constexpr std::size_t kKiB = 1024;
  return world_size <= 2 ? 256 * kKiB
                         : std::min(48 * kKiB, 256 * kKiB / static_cast<std::size_t>(world_size));
}

namespace {

// Ranks stage their whole buffers, and those that need the result reduce all of them.
void reduce_staged(ShmContext& context, const Collective& call, bool stages, bool reduces) {
  const int world_size = context.world_size();
  const std::size_t bytes = element_bytes(call.dtype);
  std::vector<const void*>& sources = context.sources();
  const auto input = [&](const ElemRange& piece) {
    return at(call.inputs[0], piece.begin_elems, bytes);
  };
  context.for_each_piece(
      call.num_elems, context.phase_bytes() / bytes,
      [&](const ElemRange& piece) {
        if (stages) context.stage(context.open(), input(piece), piece.num_elems * bytes);
      },
      [&](const ElemRange& piece) {
        if (!reduces) return;
        // In the order of the ranks on every rank, so that all get the same bits.
        for (int peer = 0; peer < world_size; ++peer)
          sources[peer] = peer == context.rank() ? input(piece) : context.wait(peer);
        context.reduce(call, at(call.outputs[0], piece.begin_elems, bytes), piece.num_elems);
      });
}

// The maximum that a rank stages for one other in a phase of an update: the data that it reads,
// updates and writes should stay in its L2 cache. With 2 and 4 ranks on two cores, half of it costs
// up to 8 % more at 64 MB; twice of it (with 2 ranks) saves nothing measurable.
constexpr std::size_t kUpdateSliceBytes = std::size_t{256} << 10;

// Slice by slice of every rank's chunk: each rank stages its part of the others' slices, reduces
// its own slice of all parts, stages the result, and gathers the others'. With an update the result
// is the owner's new parameters, whose elements may differ in size.
class TwoShot {
 public:
  TwoShot(ShmContext& context, const Collective& call)
      : context_(context),
        call_(call),
        rank_(context.rank()),
        world_size_(context.world_size()),
        layout_(call.num_elems, world_size_),
        input_bytes_(element_bytes(call.dtype)),
        output_bytes_(input_bytes_) {
    if (!call.has_update) return;
    update_.emplace(call, rank_, world_size_);
    output_bytes_ = update_->param_bytes();
  }

  std::uint64_t run() {
    const std::size_t room_bytes = context_.phase_bytes() / static_cast<std::size_t>(world_size_);
    const std::size_t slice_bytes = update_ ? std::min(kUpdateSliceBytes, room_bytes) : room_bytes;
    context_.for_each_piece(
        layout_.max_chunk_elems(), slice_bytes / std::max(input_bytes_, output_bytes_),
        [&](const ElemRange& piece) { stage_input(piece); },
        [&](const ElemRange& piece) {
          reduce_own(piece);
          context_.step().step = 2;
          static_cast<void>(context_.publish());  // no handles after the first phase
          gather_results(piece);
        },
        2);
    const std::size_t own_elems = layout_.chunk(rank_).num_elems;
    return (call_.num_elems - own_elems) * input_bytes_ +
           context_.num_peers() * own_elems * output_bytes_;
  }

 private:
  // `piece` is the slice's place in the longest chunk. Chunks differ by one element, which the last
  // slice of the shorter ones lacks.
  ElemRange slice_of_rank(int rank, const ElemRange& piece) const {
    const ElemRange chunk = layout_.chunk(rank);
    const std::size_t begin_elems = std::min(piece.begin_elems, chunk.num_elems);
    const std::size_t end_elems = std::min(piece.end_elems(), chunk.num_elems);
    return {chunk.begin_elems + begin_elems, end_elems - begin_elems};
  }

  template <class Byte>
  Byte* staged_for(Byte* region, int rank, const ElemRange& piece) const {
    return at(region, static_cast<std::size_t>(rank) * piece.num_elems, input_bytes_);
  }

  void stage_input(const ElemRange& piece) {
    std::byte* region = context_.open();
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer == rank_) continue;
      const ElemRange slice = slice_of_rank(peer, piece);
      context_.stage(staged_for(region, peer, piece),
                     at(call_.inputs[0], slice.begin_elems, input_bytes_),
                     slice.num_elems * input_bytes_);
    }
  }

  void reduce_own(const ElemRange& piece) {
    const ElemRange slice = slice_of_rank(rank_, piece);
    std::vector<const void*>& sources = context_.sources();
    for (int peer = 0; peer < world_size_; ++peer)
      sources[peer] = peer == rank_ ? at(call_.inputs[0], slice.begin_elems, input_bytes_)
                                    : staged_for(context_.wait(peer), rank_, piece);
    std::byte* region = context_.open();
    std::byte* output = at(call_.outputs[0], slice.begin_elems, output_bytes_);
    // Plain stores fill both in one pass; a region that is streamed is copied.
    const bool is_streaming = context_.staging().kind() == cpu::StoreKind::kStreaming;
    std::byte* also_to = is_streaming ? nullptr : region;
    context_.reduce(call_, sources, output, also_to, slice, divisor_of(call_, world_size_),
                    update_ ? &*update_ : nullptr);
    if (is_streaming)
      context_.stage(region, output, slice.num_elems * output_bytes_);
    else
      context_.count_copied(slice.num_elems * output_bytes_);
  }

  void gather_results(const ElemRange& piece) {
    // The lines of an all_reduce's result are in a cache: its input was staged from there, or next
    // to it. So they are not streamed.
    const std::size_t result_bytes = update_ ? call_.num_elems * output_bytes_ : 0;
    for (int distance = 1; distance < world_size_; ++distance) {
      const int peer = (rank_ + distance) % world_size_;
      const ElemRange slice = slice_of_rank(peer, piece);
      context_.copy_result(at(call_.outputs[0], slice.begin_elems, output_bytes_),
                           context_.wait(peer), slice.num_elems * output_bytes_, result_bytes);
    }
  }

  ShmContext& context_;
  const Collective& call_;
  int rank_;
  int world_size_;
  ChunkLayout layout_;
  std::size_t input_bytes_;   // of one element
  std::size_t output_bytes_;  // of one element
  std::optional<OwnerUpdate> update_;
};

}  // namespace

// One phase per piece; N - 1 times the bytes.
std::uint64_t all_reduce_one_shot(ShmContext& context, const Collective& call) {
  reduce_staged(context, call, true, true);
  return context.num_peers() * call.num_bytes();
}

// Every rank but the root stages; the root reduces.
std::uint64_t reduce(ShmContext& context, const Collective& call) {
  const bool is_root = context.rank() == call.root;
  reduce_staged(context, call, !is_root, is_root);
  return is_root ? 0 : call.num_bytes();
}

std::uint64_t run_two_shot(ShmContext& context, const Collective& call) {
  return TwoShot(context, call).run();
}

// The block that is read from all ranks, reduced, and written to all of them before the next one
// (docs/decisions.md). With several threads each takes four times as much.
// After a peer's failure, at most one more block is written to it.
constexpr std::size_t kBlockBytes = 16 << 10;

// Each rank reduces its own chunk of all buffers into all of them: one rank reads and writes every
// byte once, which is the minimum.
std::uint64_t all_reduce_zero_copy(ShmContext& context, const Collective& call) {
  const int rank = context.rank();
  const int world_size = context.world_size();
  const std::size_t bytes = element_bytes(call.dtype);
  const ElemRange own = ChunkLayout(call.num_elems, world_size).chunk(rank);
  std::vector<const std::byte*> inputs;
  std::vector<std::byte*> outputs;
  for (int peer = 0; peer < world_size; ++peer) {
    const BufferHandle& handle = context.handle_of(peer);
    const std::size_t begin_bytes = own.begin_elems * bytes;
    inputs.push_back(context.find_shared(peer, handle.input, begin_bytes, own.num_elems * bytes));
    outputs.push_back(context.find_shared(peer, handle.output, begin_bytes, own.num_elems * bytes));
  }
  const auto output_of = [&](int distance) {
    return outputs[static_cast<std::size_t>((rank + distance) % world_size)];
  };
  const ReduceOp& op = reduce_op_of(call);
  const std::size_t num_threads = context.thread_pool().num_threads();
  const std::size_t block_elems = (num_threads == 1 ? 1 : 4 * num_threads) * kBlockBytes / bytes;
  for (std::size_t i = 0; i < num_slices(own.num_elems, block_elems); ++i) {
    // A failed peer may have returned to its caller, which may reuse the buffer.
    context.check(context.group().state_of(rank));
    const ElemRange block = slice_of({0, own.num_elems}, i, block_elems);
    for (std::size_t peer = 0; peer < inputs.size(); ++peer)
      context.sources()[peer] = at(inputs[peer], block.begin_elems, bytes);
    context.thread_pool().split_sources(
        context.sources(), block.num_elems, bytes,
        [&](const void* const* sources, const ElemRange& part) {
          const std::size_t offset_bytes = (block.begin_elems + part.begin_elems) * bytes;
          std::byte* result = output_of(0) + offset_bytes;
          op.combine(result, output_of(1) + offset_bytes, sources, world_size, part.num_elems,
                     divisor_of(call, world_size));
          for (int distance = 2; distance < world_size; ++distance)
            std::memcpy(output_of(distance) + offset_bytes, result, part.num_elems * bytes);
        });
  }
  context.rejoin();
  return (call.num_elems - own.num_elems + context.num_peers() * own.num_elems) * bytes;
}

}  // namespace ringcomm
