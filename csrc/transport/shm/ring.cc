#include "collectives/ring.h"

#include <optional>

#include "collectives/fused_update.h"
#include "core/link_protocol.h"
#include "host/peer_event.h"
#include "transport/shm/context.h"

namespace ringcomm {
namespace {

// The links of a ring in shared memory. With an update, the first half sends gradients and the
// second half parameters; their elements may differ in size.
class MemoryLinks {
 public:
  MemoryLinks(ShmContext& context, const Collective& call)
      : context_(context),
        call_(call),
        op_(reduce_op_of(call)),
        schedule_(context.rank(), context.world_size()),
        layout_(call.num_elems, context.world_size()),
        output_bytes_(op_.element_bytes),
        geometry_(context.group().ring_link(context.rank())),
        to_next_(context.arch(), geometry_, schedule_.next()),
        from_previous_(context.arch(), context.group().ring_link(schedule_.previous()),
                       schedule_.previous()) {
    if (!call.has_update) return;
    update_.emplace(call, context.rank(), context.world_size());
    output_bytes_ = update_->param_bytes();
  }

  const RingSchedule& schedule() const { return schedule_; }
  int whole_rank(int rank) const { return context_.group().whole_rank(rank); }
  CallStep& step() { return context_.step(); }
  std::size_t depth() const { return geometry_.num_slots - 1; }
  std::size_t slice_elems() const {
    return geometry_.slot_bytes / std::max(op_.element_bytes, output_bytes_);
  }
  std::size_t input_element_bytes() const { return op_.element_bytes; }
  std::size_t output_element_bytes() const { return output_bytes_; }
  RingChunk chunk(int rank) const {
    const ElemRange elems = layout_.chunk(rank);
    return {at(call_.inputs[0], elems.begin_elems, op_.element_bytes),
            at(call_.outputs[0], elems.begin_elems, output_bytes_), elems.num_elems};
  }

  void send(const RingPart& part) {
    context_.check(ringcomm::send(context_.arch(), to_next_, part.input, part.input_bytes));
    context_.count_copied(part.input_bytes);
  }

  void reduce(const RingPart& part) {
    const auto combine = [&](std::byte* to, std::byte* also_to, const std::byte* received,
                             const std::byte* local, std::size_t) {
      const void* const sources[] = {received, local};
      context_.reduce(call_, sources, to, also_to,
                      slice_of(layout_.chunk(part.chunk_idx), part.slice_idx, slice_elems()),
                      part.is_last ? divisor_of(call_, context_.world_size()) : 1,
                      part.is_last && update_ ? &*update_ : nullptr);
    };
    context_.check(recv_reduce_send(from_previous_, to_next_, part.is_last ? part.output : nullptr,
                                    part.input, part.input_bytes, combine));
    context_.count_copied(part.is_last ? part.output_bytes : part.input_bytes);
  }

  void copy(const RingPart& part) {
    context_.check(part.is_sent
                       ? recv_copy_send(context_.arch(), from_previous_, to_next_, part.output,
                                        part.output_bytes)
                       : recv(context_.arch(), from_previous_, part.output, part.output_bytes));
    context_.count_copied((part.is_sent ? 2 : 1) * part.output_bytes);
  }

 private:
  ShmContext& context_;
  const Collective& call_;
  const ReduceOp& op_;
  RingSchedule schedule_;
  ChunkLayout layout_;
  std::optional<OwnerUpdate> update_;
  std::size_t output_bytes_;
  LinkGeometry geometry_;
  SendLink<ShmContext::Arch> to_next_;
  RecvLink<ShmContext::Arch> from_previous_;
};

}  // namespace

std::uint64_t run_ring(ShmContext& context, const Collective& call) {
  if (!context.publish()) return 0;
  MemoryLinks links(context, call);
  return Ring(links).run();
}

}  // namespace ringcomm
