#pragma once

#include "core/chunk_layout.h"
#include "core/link_protocol.h"
#include "cuda/kernels/reducers.h"
#include "cuda/kernels/rendezvous.h"

// all_reduce around a ring of links, several rings side by side: block b of every rank is channel
// b, and has its own part of every chunk. The schedule is that of transport/shm/ring.cc.

namespace ringcomm::cuda {

struct PairSources {
  const std::byte* received;
  const std::byte* local;
  RINGCOMM_HD int num() const { return 2; }
  RINGCOMM_HD const std::byte* at(int source) const { return source == 0 ? received : local; }
};

template <class Reducer, Block B>
class Ring {
 public:
  RINGCOMM_HD Ring(B& block, const KernelCall& call)
      : block_(block),
        call_(call),
        schedule_(call.rank, call.world_size),
        to_next_(block, link(call.rank, schedule_.next()), schedule_.next()),
        from_previous_(block, link(schedule_.previous(), call.rank), schedule_.previous()),
        layout_(call.num_elems, call.world_size),
        reducer_(call.dtype, call.reduction),
        slice_elems_(call.staging.layout.ring_slot_bytes / reducer_.elem_bytes()) {}

  RINGCOMM_HD WaitStatus run() {
    const std::size_t slices = num_slices(layout_.max_chunk_elems(), slice_elems_);
    RINGCOMM_ROLLED
    for (std::size_t slice_idx = block_.block_idx(); slice_idx < slices;
         slice_idx += block_.num_blocks()) {
      if (const WaitStatus stop = reduce_scatter(slice_idx); stop != WaitStatus::kNone) return stop;
      if (const WaitStatus stop = all_gather(slice_idx); stop != WaitStatus::kNone) return stop;
    }
    return to_next_.wait_drained(0);
  }

 private:
  RINGCOMM_HD LinkGeometry link(int from, int to) const {
    return call_.staging.ring_link(from, to, block_.block_idx());
  }

  struct Span {
    const std::byte* input;
    std::byte* output;
    std::size_t num_bytes;
  };
  RINGCOMM_HD Span span(int chunk_idx, std::size_t slice_idx) const {
    const ElemRange slice = slice_of(layout_.chunk(chunk_idx), slice_idx, slice_elems_);
    const std::size_t offset = slice.begin_elems * reducer_.elem_bytes();
    return {call_.inputs[0] + offset, call_.outputs[0] + offset,
            slice.num_elems * reducer_.elem_bytes()};
  }

  RINGCOMM_HD WaitStatus reduce_scatter(std::size_t slice_idx) {
    const int last_step = schedule_.num_steps() - 1;
    const Span first = span(schedule_.reduce_scatter_send_chunk(0), slice_idx);
    if (const WaitStatus stop = send(block_, to_next_, first.input, first.num_bytes);
        stop != WaitStatus::kNone)
      return stop;
    const auto add = [&](int divisor) {
      return [this, divisor](std::byte* to, std::byte* also_to, const std::byte* received,
                             const std::byte* local, std::size_t num_bytes) {
        // Next to a ring's state only half as many vectors fit the registers.
        reducer_.template combine<4>(block_, Outputs{to, also_to}, PairSources{received, local},
                                     static_cast<std::uint32_t>(num_bytes / reducer_.elem_bytes()),
                                     divisor);
      };
    };
    RINGCOMM_ROLLED
    for (int step = 0; step < last_step; ++step) {
      const Span part = span(schedule_.reduce_scatter_recv_chunk(step), slice_idx);
      const WaitStatus stop =
          recv_reduce_send(from_previous_, to_next_, nullptr, part.input, part.num_bytes, add(1));
      if (stop != WaitStatus::kNone) return stop;
    }
    const Span own = span(schedule_.reduce_scatter_recv_chunk(last_step), slice_idx);
    return recv_reduce_send(from_previous_, to_next_, own.output, own.input, own.num_bytes,
                            add(call_.divisor));
  }

  RINGCOMM_HD WaitStatus all_gather(std::size_t slice_idx) {
    const int last_step = schedule_.num_steps() - 1;
    RINGCOMM_ROLLED
    for (int step = 0; step < last_step; ++step) {
      const Span other = span(schedule_.all_gather_recv_chunk(step), slice_idx);
      const WaitStatus stop =
          recv_copy_send(block_, from_previous_, to_next_, other.output, other.num_bytes);
      if (stop != WaitStatus::kNone) return stop;
    }
    const Span other = span(schedule_.all_gather_recv_chunk(last_step), slice_idx);
    return recv(block_, from_previous_, other.output, other.num_bytes);
  }

  B& block_;
  const KernelCall& call_;
  RingSchedule schedule_;
  SendLink<B> to_next_;
  RecvLink<B> from_previous_;
  ChunkLayout layout_;
  Reducer reducer_;
  std::size_t slice_elems_;
};

/// After a rendezvous, in which ranks have compared their calls.
template <class Reducer, Block B>
RINGCOMM_HD void all_reduce_ring(B& block, const KernelCall& call) {
  if (call.staging.table(call.rank).is_open == 0) return;
  finish_call(block, call, Ring<Reducer, B>(block, call).run());
}

}  // namespace ringcomm::cuda
