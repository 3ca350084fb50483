#include <algorithm>
#include <cstddef>
#include <vector>

#include "collectives/collective.h"
#include "collectives/shm/algorithms.h"
#include "collectives/shm/ring_links.h"
#include "core/chunk_layout.h"
#include "core/link_primitives.h"

namespace ringcomm {
namespace {

constexpr const char* kPass = "all_gather";  // in the recording

// A ring that reduces on the way adds every chunk in a different order. Here the ranks' slices go
// around unreduced, (N-1)/2 times the bytes, and every rank reduces all of them in rank order.
class OrderedRing {
 public:
  OrderedRing(Engine& engine, const Collective& call)
      : engine_(engine),
        call_(call),
        links_(engine),
        op_(reduce_op_of(call)),
        slice_elems_(std::min<std::size_t>(links_.slot_bytes / op_.element_bytes,
                                           std::max<std::size_t>(1, call.num_elems))),
        received_(static_cast<std::size_t>(engine.world_size() - 1) * slice_elems_ *
                  op_.element_bytes),
        sources_(static_cast<std::size_t>(engine.world_size())) {}

  std::uint64_t run() {
    const std::size_t slices = num_slices(call_.num_elems, slice_elems_);
    for (std::size_t slice_idx = 0; slice_idx < slices; ++slice_idx)
      reduce(slice_of({0, call_.num_elems}, slice_idx, slice_elems_), slice_idx);
    Engine::check(links_.to_next.wait_drained(0));
    const auto passed = static_cast<std::uint64_t>(links_.schedule.num_steps()) * call_.num_bytes();
    engine_.count_copied(2 * passed);  // staged, and kept
    return passed;
  }

 private:
  void reduce(const ElemRange& slice, std::size_t slice_idx) {
    const std::size_t num_bytes = slice.num_elems * op_.element_bytes;
    const std::byte* own = at(call_.inputs[0], slice.begin_elems, op_.element_bytes);
    const int rank = engine_.rank();
    const int num_steps = links_.schedule.num_steps();
    sources_[static_cast<std::size_t>(rank)] = own;
    {
      const auto traced = links_.traced({kPass, -1, rank, slice_idx, num_bytes});
      Engine::check(send(engine_.arch(), links_.to_next, own, num_bytes));
    }
    for (int step = 0; step < num_steps; ++step) {
      // The rank that wrote it: the schedule of an all-gather, in which chunk r is rank r's slice.
      const int owner = links_.schedule.all_gather_recv_chunk(step);
      const auto traced =
          links_.traced({kPass, step, owner, slice_idx, num_bytes}, step + 1 < num_steps);
      std::byte* kept =
          at(received_.data(), static_cast<std::size_t>(step) * slice_elems_, op_.element_bytes);
      sources_[static_cast<std::size_t>(owner)] = kept;
      Engine::check(step + 1 < num_steps
                        ? recv_copy_send(engine_.arch(), links_.from_previous, links_.to_next, kept,
                                         num_bytes)
                        : recv(engine_.arch(), links_.from_previous, kept, num_bytes));
    }
    op_.combine(at(call_.outputs[0], slice.begin_elems, op_.element_bytes), nullptr,
                sources_.data(), engine_.world_size(), slice.num_elems,
                divisor_of(call_, engine_.world_size()));
  }

  Engine& engine_;
  const Collective& call_;
  RingLinks links_;
  const ReduceOp& op_;
  std::size_t slice_elems_;
  std::vector<std::byte> received_;   // by step
  std::vector<const void*> sources_;  // by rank
};

}  // namespace

std::uint64_t all_reduce_ring_ordered(Engine& engine, const Collective& call,
                                      const CallHeader& header) {
  engine.exchange_headers(header);
  return OrderedRing(engine, call).run();
}

}  // namespace ringcomm
