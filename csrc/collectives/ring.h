#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/call.h"
#include "collectives/trace.h"
#include "core/chunk_layout.h"
#include "reduce/reduce_op.h"

namespace ringcomm {

/// The chunk of one rank in this rank's buffers.
struct RingChunk {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;  ///< null if this rank has no room for it
  std::size_t num_elems = 0;
};

/// One slice of a chunk in one step: what a rank receives there, adds its own part to, or keeps.
struct RingPart {
  bool is_gather;  ///< a complete slice, which is copied and not reduced
  bool is_last;    ///< of its half: a reduced slice is complete, a gathered one goes no further
  bool is_sent;    ///< passed on to the next rank
  int chunk_idx;
  std::size_t slice_idx;
  std::size_t num_elems = 0;
  const std::byte* input = nullptr;
  std::size_t input_bytes = 0;
  std::byte* output = nullptr;
  std::size_t output_bytes = 0;

  /// This part with its data in these links.
  template <class Links>
  RingPart in(const Links& links) const {
    const RingChunk chunk = links.chunk(chunk_idx);
    const ElemRange elems = slice_of({0, chunk.num_elems}, slice_idx, links.slice_elems());
    RingPart part = *this;
    part.num_elems = elems.num_elems;
    part.input = chunk.input + elems.begin_elems * links.input_element_bytes();
    part.input_bytes = elems.num_elems * links.input_element_bytes();
    part.output_bytes = elems.num_elems * links.output_element_bytes();
    if (chunk.output != nullptr)
      part.output = chunk.output + elems.begin_elems * links.output_element_bytes();
    return part;
  }
};

/// An all_reduce around the ring: every rank receives from the previous rank and sends to the next
/// one. Chunks go around slice by slice. In each of the N - 1 steps of the reduce-scatter a rank
/// adds its own part of a slice to what it receives, and passes the sum on; rank r ends with chunk
/// r. In each of the N - 1 steps of the all-gather it keeps a complete slice and passes it on.
///
/// Several slices are under way, so that one is reduced while others are transferred: `depth` of
/// them take every step in turn. What a slice uses on a link, the slice `depth` later uses next.
///
/// `Links` moves the data:
///
/// - schedule(), chunk(rank), input_element_bytes(), output_element_bytes(), slice_elems()
/// - whole_rank(rank) and step(), for recordings
/// - depth(): slices under way. Slots of memory hold one less than there are: each rank of the ring
///   waits for a free one while it holds a full one.
/// - send(part): sends the rank's own input.
/// - reduce(part): receives a partial sum, adds the input, and sends or keeps the sum.
/// - copy(part): receives a complete slice into the output, and sends it unless it is the last.
/// Nothing that was sent uses the call's buffers after the end of the engine's call.
template <class Links>
class Ring {
 public:
  explicit Ring(Links& links)
      : links_(links), schedule_(links.schedule()), num_steps_(schedule_.num_steps()) {
    std::size_t max_elems = 0;
    for (int rank = 0; rank <= num_steps_; ++rank)
      max_elems = std::max(max_elems, links.chunk(rank).num_elems);
    num_slices_ = num_slices(max_elems, links.slice_elems());
  }

  /// Returns the bytes that the next rank consumed.
  std::uint64_t run() {
    const std::size_t depth = links_.depth();
    for (std::size_t slice = 0; slice < std::min(depth, num_slices_); ++slice) start(slice);
    for (std::size_t group = 0; group < num_slices_; group += depth)
      for (int step = 0; step < 2 * num_steps_; ++step)
        for (std::size_t slice = group; slice < std::min(group + depth, num_slices_); ++slice) {
          turn(step, slice);
          if (step + 1 == 2 * num_steps_ && slice + depth < num_slices_) start(slice + depth);
        }
    return sent_bytes_;
  }

 private:
  // What is received in a step, counted from the reduce-scatter's first. The all-gather continues
  // its sequence of chunks.
  RingPart part(int step, std::size_t slice_idx) const {
    const bool is_gather = step >= num_steps_;
    const bool is_last = step == num_steps_ - 1 || step == 2 * num_steps_ - 1;
    return RingPart{.is_gather = is_gather,
                    .is_last = is_last,
                    .is_sent = !is_last || !is_gather,
                    .chunk_idx = is_gather ? schedule_.all_gather_recv_chunk(step - num_steps_)
                                           : schedule_.reduce_scatter_recv_chunk(step),
                    .slice_idx = slice_idx}
        .in(links_);
  }

  // Sends what needs nothing received before.
  void start(std::size_t slice_idx) {
    const RingPart own = RingPart{.is_gather = false,
                                  .is_last = false,
                                  .is_sent = true,
                                  .chunk_idx = schedule_.reduce_scatter_send_chunk(0),
                                  .slice_idx = slice_idx}
                             .in(links_);
    const recorder::Span recorded = record(own, 0, true);
    links_.send(own);
    sent_bytes_ += own.input_bytes;
  }

  void turn(int step, std::size_t slice_idx) {
    const RingPart received = part(step, slice_idx);
    const recorder::Span recorded = record(received, step, false);
    if (received.is_gather)
      links_.copy(received);
    else
      links_.reduce(received);
    const bool is_complete = received.is_gather || received.is_last;
    if (received.is_sent) sent_bytes_ += is_complete ? received.output_bytes : received.input_bytes;
  }

  // In `start` the rank sends its own part.
  recorder::Span record(const RingPart& part, int step, bool is_start) const {
    links_.step() = {step + 1, 2 * num_steps_, part.slice_idx + 1, num_slices_};
    return recorder::Span([&] {
      const int to = part.is_sent ? links_.whole_rank(schedule_.next()) : recorder::kNobody;
      const int from = is_start ? recorder::kNobody : links_.whole_rank(schedule_.previous());
      return recorder::Event{.num_bytes = part.is_gather ? part.output_bytes : part.input_bytes,
                             .peer = recorder::rank16(to),
                             .waits_for = recorder::rank16(from),
                             .step = {is_start ? 0 : step % num_steps_ + 1, num_steps_,
                                      part.slice_idx + 1, num_slices_},
                             .chunk = recorder::rank16(part.chunk_idx),
                             .kind = recorder::Kind::kStep,
                             .op = part.is_gather ? OpKind::kAllGather : OpKind::kReduceScatter};
    });
  }

  Links& links_;
  RingSchedule schedule_;
  int num_steps_;  // of the reduce-scatter, and of the all-gather
  std::size_t num_slices_;
  std::uint64_t sent_bytes_ = 0;
};

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
