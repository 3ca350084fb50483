#include <algorithm>
#include <memory>

#include "collectives/collective.h"
#include "collectives/fused_update.h"
#include "collectives/shm/algorithms.h"
#include "collectives/shm/ring_links.h"
#include "core/chunk_layout.h"
#include "core/link_primitives.h"

namespace ringcomm {
namespace {

// Names of the recording.
constexpr const char* kReduceScatter = "reduce_scatter";
constexpr const char* kAllGather = "all_gather";

// The buffer of the ring. With an update, the first half sends gradients and the second half
// parameters; their elements may differ in size.
class Ring {
 public:
  Ring(Engine& engine, const Collective& call)
      : engine_(engine),
        call_(call),
        links_(engine),
        layout_(call.num_elems, engine.world_size()),
        op_(reduce_op_of(call)),
        output_bytes_(op_.element_bytes) {
    if (call.update != nullptr) {
      update_ = std::make_unique<OwnerUpdate>(call, engine.rank(), engine.world_size());
      output_bytes_ = update_->param_bytes();
    }
    slice_elems_ = links_.slot_bytes / std::max(op_.element_bytes, output_bytes_);
  }

  std::uint64_t run() {
    const std::size_t slices = num_slices(layout_.max_chunk_elems(), slice_elems_);
    // Runs each slice through all steps before the next slice, so that a reduced slice is still in
    // cache when it is sent. Every chunk has the same number of slices, the last ones perhaps
    // empty.
    for (std::size_t slice_idx = 0; slice_idx < slices; ++slice_idx) {
      reduce_scatter(slice_idx);
      all_gather(slice_idx);
    }
    // No rank returns before the next one has all of its slices.
    Engine::check(links_.to_next.wait_drained(0));
    engine_.count_copied(sent_bytes_ + received_bytes_);
    return sent_bytes_;
  }

 private:
  // Ends with the complete slice of this rank's own chunk in the output and on its way to the next
  // rank.
  void reduce_scatter(std::size_t slice_idx) {
    const int last_step = links_.schedule.num_steps() - 1;
    send_first(slice_idx);
    for (int step = 0; step < last_step; ++step) {
      const int chunk = links_.schedule.reduce_scatter_recv_chunk(step);
      const Span part = span(chunk, slice_idx);
      const auto traced = links_.traced({kReduceScatter, step, chunk, slice_idx, part.input_bytes});
      const auto combine = [&](std::byte* to, std::byte* also_to, const std::byte* received,
                               const std::byte* local, std::size_t num_bytes) {
        const void* sources[] = {received, local};
        op_.combine(to, also_to, sources, 2, num_bytes / op_.element_bytes, 1);
      };
      Engine::check(recv_reduce_send(links_.from_previous, links_.to_next, part.input,
                                     part.input_bytes, combine));
      sent_bytes_ += part.input_bytes;
    }
    const int own_chunk = links_.schedule.reduce_scatter_recv_chunk(last_step);
    const Span own = span(own_chunk, slice_idx);
    const auto traced =
        links_.traced({kReduceScatter, last_step, own_chunk, slice_idx, own.input_bytes});
    const auto complete = [&](std::byte* to, std::byte* also_to, const std::byte* received,
                              const std::byte* local, std::size_t num_bytes) {
      const void* sources[] = {received, local};
      if (update_)
        update_->run(sources, 2, own.elems, also_to);
      else
        op_.combine(to, also_to, sources, 2, num_bytes / op_.element_bytes,
                    divisor_of(call_, engine_.world_size()));
    };
    Engine::check(recv_reduce_copy_send(links_.from_previous, links_.to_next, own.output, own.input,
                                        own.input_bytes, complete));
    sent_bytes_ += own.output_bytes;
  }

  void send_first(std::size_t slice_idx) {
    const int chunk = links_.schedule.reduce_scatter_send_chunk(0);
    const Span first = span(chunk, slice_idx);
    const auto traced = links_.traced({kReduceScatter, -1, chunk, slice_idx, first.input_bytes});
    Engine::check(send(engine_.arch(), links_.to_next, first.input, first.input_bytes));
    sent_bytes_ += first.input_bytes;
  }

  void all_gather(std::size_t slice_idx) {
    const int last_step = links_.schedule.num_steps() - 1;
    for (int step = 0; step <= last_step; ++step) {
      const int chunk = links_.schedule.all_gather_recv_chunk(step);
      const Span other = span(chunk, slice_idx);
      const bool passes_on = step < last_step;
      const auto traced =
          links_.traced({kAllGather, step, chunk, slice_idx, other.output_bytes}, passes_on);
      Engine::check(
          passes_on ? recv_copy_send(engine_.arch(), links_.from_previous, links_.to_next,
                                     other.output, other.output_bytes)
                    : recv(engine_.arch(), links_.from_previous, other.output, other.output_bytes));
      if (passes_on) sent_bytes_ += other.output_bytes;
      received_bytes_ += other.output_bytes;
    }
  }

  struct Span {
    ElemRange elems;
    const std::byte* input;
    std::size_t input_bytes;
    std::byte* output;
    std::size_t output_bytes;
  };
  Span span(int chunk_idx, std::size_t slice_idx) const {
    const ElemRange slice = slice_of(layout_.chunk(chunk_idx), slice_idx, slice_elems_);
    return {slice, at(call_.inputs[0], slice.begin_elems, op_.element_bytes),
            slice.num_elems * op_.element_bytes,
            at(call_.outputs[0], slice.begin_elems, output_bytes_),
            slice.num_elems * output_bytes_};
  }

  Engine& engine_;
  const Collective& call_;
  RingLinks links_;
  ChunkLayout layout_;
  const ReduceOp& op_;
  std::unique_ptr<OwnerUpdate> update_;  ///< null where the call updates nothing
  std::size_t output_bytes_;
  std::size_t slice_elems_ = 0;
  std::uint64_t sent_bytes_ = 0;      // all of them staged
  std::uint64_t received_bytes_ = 0;  // copied into the output
};

}  // namespace

std::uint64_t all_reduce_ring(Engine& engine, const Collective& call, const CallHeader& header) {
  engine.exchange_headers(header);
  return Ring(engine, call).run();
}

}  // namespace ringcomm
