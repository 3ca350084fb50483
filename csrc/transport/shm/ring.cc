#include <algorithm>
#include <optional>

#include "collectives/fused_update.h"
#include "collectives/trace.h"
#include "core/link_protocol.h"
#include "transport/shm/context.h"

namespace ringcomm {
namespace {

// An all_reduce around the ring: every rank receives from the previous rank and sends to the next
// one. Chunks go around slice by slice. In each of the N - 1 steps of the reduce-scatter a rank
// adds its own part of a slice to what it receives, and passes the sum on; rank r ends with chunk
// r. In each of the N - 1 steps of the all-gather it keeps a complete slice and passes it on. With
// an update, the first half sends gradients and the second half parameters.
//
// Several slices are under way, so that one is reduced while others are transferred: `depth_` of
// them take every step in turn. They are one less than a link has slots, because each rank waits
// for a free slot while it holds a full one.
class Ring {
 public:
  Ring(ShmContext& context, const Collective& call)
      : context_(context),
        call_(call),
        op_(reduce_op_of(call)),
        schedule_(context.rank(), context.world_size()),
        num_steps_(schedule_.num_steps()),
        layout_(call.num_elems, context.world_size()),
        output_bytes_(op_.element_bytes),
        to_next_(context.arch(), context.group().ring_link(context.rank()), schedule_.next()),
        from_previous_(context.arch(), context.group().ring_link(schedule_.previous()),
                       schedule_.previous()) {
    if (call.has_update) {
      update_.emplace(call, context.rank(), context.world_size());
      output_bytes_ = update_->param_bytes();
    }
    const LinkGeometry link = context.group().ring_link(context.rank());
    depth_ = link.num_slots - 1;
    slice_elems_ = link.slot_bytes / std::max(op_.element_bytes, output_bytes_);
    num_slices_ = num_slices(layout_.max_chunk_elems(), slice_elems_);
  }

  // Returns the bytes that the next rank consumed.
  std::uint64_t run() {
    for (std::size_t slice = 0; slice < std::min(depth_, num_slices_); ++slice) start(slice);
    for (std::size_t group = 0; group < num_slices_; group += depth_)
      for (int step = 0; step < 2 * num_steps_; ++step)
        for (std::size_t slice = group; slice < std::min(group + depth_, num_slices_); ++slice) {
          turn(step, slice);
          if (step + 1 == 2 * num_steps_ && slice + depth_ < num_slices_) start(slice + depth_);
        }
    return sent_bytes_;
  }

 private:
  // A slice of a chunk.
  struct Part {
    int chunk_idx;
    std::size_t slice_idx;
    ElemRange elems;  // of the call's buffers
    const std::byte* input;
    std::size_t input_bytes;
    std::byte* output;
    std::size_t output_bytes;
  };
  Part part_of(int chunk_idx, std::size_t slice_idx) const {
    const ElemRange elems = slice_of(layout_.chunk(chunk_idx), slice_idx, slice_elems_);
    return {.chunk_idx = chunk_idx,
            .slice_idx = slice_idx,
            .elems = elems,
            .input = at(call_.inputs[0], elems.begin_elems, op_.element_bytes),
            .input_bytes = elems.num_elems * op_.element_bytes,
            .output = at(call_.outputs[0], elems.begin_elems, output_bytes_),
            .output_bytes = elems.num_elems * output_bytes_};
  }

  // Sends the rank's own part, which needs nothing received before.
  void start(std::size_t slice_idx) {
    const Part own = part_of(schedule_.reduce_scatter_send_chunk(0), slice_idx);
    const recorder::Span recorded = record(own, 0, true);
    context_.check(send(context_.arch(), to_next_, own.input, own.input_bytes));
    count(own.input_bytes, own.input_bytes);
  }

  // Step `step` of a slice, counted from the reduce-scatter's first.
  void turn(int step, std::size_t slice_idx) {
    if (step < num_steps_) return reduce(step, slice_idx);
    const int gather_step = step - num_steps_;
    const Part part = part_of(schedule_.all_gather_recv_chunk(gather_step), slice_idx);
    const bool is_last = gather_step + 1 == num_steps_;
    const recorder::Span recorded = record(part, step, false);
    context_.check(is_last ? recv(context_.arch(), from_previous_, part.output, part.output_bytes)
                           : recv_copy_send(context_.arch(), from_previous_, to_next_, part.output,
                                            part.output_bytes));
    count(is_last ? 0 : part.output_bytes, (is_last ? 1 : 2) * part.output_bytes);
  }

  void reduce(int step, std::size_t slice_idx) {
    const Part part = part_of(schedule_.reduce_scatter_recv_chunk(step), slice_idx);
    const bool is_last = step + 1 == num_steps_;
    const recorder::Span recorded = record(part, step, false);
    const auto combine = [&](std::byte* to, std::byte* also_to, const std::byte* received,
                             const std::byte* local, std::size_t) {
      const void* const sources[] = {received, local};
      context_.reduce(call_, sources, to, also_to, part.elems,
                      is_last ? divisor_of(call_, context_.world_size()) : 1,
                      is_last && update_ ? &*update_ : nullptr);
    };
    context_.check(recv_reduce_send(from_previous_, to_next_, is_last ? part.output : nullptr,
                                    part.input, part.input_bytes, combine));
    const std::size_t num_bytes = is_last ? part.output_bytes : part.input_bytes;
    count(num_bytes, num_bytes);
  }

  void count(std::size_t sent_bytes, std::size_t copied_bytes) {
    sent_bytes_ += sent_bytes;
    context_.count_copied(copied_bytes);
  }

  // With `is_start` the rank receives nothing.
  recorder::Span record(const Part& part, int step, bool is_start) const {
    context_.step() = {step + 1, 2 * num_steps_, part.slice_idx + 1, num_slices_};
    return recorder::Span([&] {
      const auto rank_at = [&](bool is_there, int rank) {
        return is_there ? recorder::rank16(context_.group().group_rank(rank)) : recorder::kNobody;
      };
      const bool is_gather = step >= num_steps_;
      return recorder::Event{.num_bytes = is_gather ? part.output_bytes : part.input_bytes,
                             .peer = rank_at(step + 1 < 2 * num_steps_, schedule_.next()),
                             .waits_for = rank_at(!is_start, schedule_.previous()),
                             .step = {is_start ? 0 : step % num_steps_ + 1, num_steps_,
                                      part.slice_idx + 1, num_slices_},
                             .chunk = recorder::rank16(part.chunk_idx),
                             .kind = recorder::Kind::kStep,
                             .op = is_gather ? OpKind::kAllGather : OpKind::kReduceScatter};
    });
  }

  ShmContext& context_;
  const Collective& call_;
  const ReduceOp& op_;
  RingSchedule schedule_;
  int num_steps_;  // of the reduce-scatter, and of the all-gather
  ChunkLayout layout_;
  std::optional<OwnerUpdate> update_;
  std::size_t output_bytes_;  // of one element
  SendLink<ShmContext::Arch> to_next_;
  RecvLink<ShmContext::Arch> from_previous_;
  std::size_t depth_, slice_elems_, num_slices_;
  std::uint64_t sent_bytes_ = 0;
};

}  // namespace

std::uint64_t run_ring(ShmContext& context, const Collective& call) {
  if (!context.publish()) return 0;
  return Ring(context, call).run();
}

}  // namespace ringcomm
