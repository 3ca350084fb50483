#include "collectives/all_reduce.h"
#include "collectives/reduction.h"
#include "collectives/ring_links.h"
#include "core/chunk_layout.h"
#include "core/link_primitives.h"

namespace ringcomm {
namespace {

// The buffer that goes around the ring.
class Ring {
 public:
  Ring(Engine& engine, const Collective& call, const CallHeader& header)
      : engine_(engine),
        call_(call),
        links_(engine, header),
        layout_(call.num_elems, engine.world_size()),
        op_(reduce_op_of(call)),
        slice_elems_(header.ring_slot_bytes / element_bytes(call.dtype)) {}

  std::uint64_t run() {
    const std::size_t slices = num_slices(layout_.max_chunk_elems(), slice_elems_);
    // Slice by slice through all steps, not step by step through all slices: what was reduced is
    // still in cache when it is passed on. Every chunk has the same number of slices, the last ones
    // perhaps empty.
    for (std::size_t slice_idx = 0; slice_idx < slices; ++slice_idx) {
      reduce_scatter(slice_idx);
      all_gather(slice_idx);
    }
    // Drained, so that the next call may cut the link otherwise.
    Engine::check(links_.to_next.wait_drained(0));
    engine_.count_copied(sent_bytes_ + received_bytes_);
    return sent_bytes_;
  }

 private:
  // Ends with the complete slice of this rank's own chunk in the output and on its way to the next
  // rank.
  void reduce_scatter(std::size_t slice_idx) {
    const int last_step = links_.schedule.num_steps() - 1;
    const Span first = span(links_.schedule.reduce_scatter_send_chunk(0), slice_idx);
    Engine::check(send(engine_.arch(), links_.to_next, first.input, first.num_bytes));
    sent_bytes_ += first.num_bytes;
    for (int step = 0; step <= last_step; ++step) {
      const Span own = span(links_.schedule.reduce_scatter_recv_chunk(step), slice_idx);
      const int divisor = step == last_step ? divisor_of(call_, engine_.world_size()) : 1;
      const auto combine = [&](std::byte* to, std::byte* also_to, const std::byte* received,
                               const std::byte* local, std::size_t num_bytes) {
        const void* sources[] = {received, local};
        op_.combine(to, also_to, sources, 2, num_bytes / op_.element_bytes, divisor);
      };
      Engine::check(step < last_step
                        ? recv_reduce_send(links_.from_previous, links_.to_next, own.input,
                                           own.num_bytes, combine)
                        : recv_reduce_copy_send(links_.from_previous, links_.to_next, own.output,
                                                own.input, own.num_bytes, combine));
      sent_bytes_ += own.num_bytes;
    }
  }

  void all_gather(std::size_t slice_idx) {
    const int last_step = links_.schedule.num_steps() - 1;
    for (int step = 0; step < last_step; ++step) {
      const Span other = span(links_.schedule.all_gather_recv_chunk(step), slice_idx);
      Engine::check(recv_copy_send(engine_.arch(), links_.from_previous, links_.to_next,
                                   other.output, other.num_bytes));
      sent_bytes_ += other.num_bytes;
      received_bytes_ += other.num_bytes;
    }
    const Span other = span(links_.schedule.all_gather_recv_chunk(last_step), slice_idx);
    Engine::check(recv(engine_.arch(), links_.from_previous, other.output, other.num_bytes));
    received_bytes_ += other.num_bytes;
  }

  struct Span {
    const std::byte* input;
    std::byte* output;
    std::size_t num_bytes;
  };
  Span span(int chunk_idx, std::size_t slice_idx) const {
    const ElemRange slice = slice_of(layout_.chunk(chunk_idx), slice_idx, slice_elems_);
    return {at(call_.inputs[0], slice.begin_elems, op_.element_bytes),
            at(call_.outputs[0], slice.begin_elems, op_.element_bytes),
            slice.num_elems * op_.element_bytes};
  }

  Engine& engine_;
  const Collective& call_;
  RingLinks links_;
  ChunkLayout layout_;
  const ReduceOp& op_;
  std::size_t slice_elems_;
  std::uint64_t sent_bytes_ = 0;      // all of them staged
  std::uint64_t received_bytes_ = 0;  // copied into the output
};

}  // namespace

std::uint64_t all_reduce_ring(Engine& engine, const Collective& call, const CallHeader& header) {
  engine.exchange_headers(header);
  return Ring(engine, call, header).run();
}

}  // namespace ringcomm
