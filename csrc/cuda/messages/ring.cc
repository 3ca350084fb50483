#include "collectives/ring.h"

#include <cstddef>
#include <vector>

#include "collectives/collective.h"
#include "cuda/messages/collectives.h"
#include "cuda/messages/operators.h"

namespace ringcomm {
namespace {

// The links of a ring as batches: a send to the next rank and a receive from the previous rank,
// which sends in the same batch. What a step sends was received in the step before, so a batch is
// posted where its receive is expected, after the sum is in the stream.
class DeviceLinks {
 public:
  DeviceLinks(DeviceEngine& engine, const Collective& call, const MessageShares& shares,
              const RingHalves& halves)
      : engine_(engine),
        shares_(shares),
        reduce_(call.reduction, call.dtype, engine.device()),
        schedule_(engine.rank(), engine.world_size()),
        slice_elems_(DeviceEngine::kSlotBytes / shares.element_bytes),
        batches_(DeviceEngine::kNumSlots) {
    const std::size_t slots_bytes = depth() * slice_elems_ * shares.element_bytes;
    if (shares.max_elems() == 0 || !halves.has_reduce_scatter) return;
    received_ = engine.stage(slots_bytes);
    if (!halves.has_all_gather) sums_ = engine.stage(slots_bytes);
  }

  const RingSchedule& schedule() const { return schedule_; }
  std::size_t depth() const { return batches_.size(); }
  bool sends_early() const { return false; }  // the receive of a batch must follow its send
  std::size_t slice_elems() const { return slice_elems_; }
  std::size_t input_element_bytes() const { return shares_.element_bytes; }
  std::size_t output_element_bytes() const { return shares_.element_bytes; }
  RingChunk chunk(int rank) const {
    const MessageShares::Share& share = shares_.of(rank);
    return {share.input, share.output, share.num_elems};
  }

  void expect(const RingPart& part) {
    engine_.recv(part.is_gather ? part.output : place(received_, part), part.input_bytes,
                 schedule_.previous());
    batches_[slot_of(part)] = engine_.post();
  }

  void send(const RingPart& part) {
    engine_.send(part.is_gather ? part.output : part.input, part.input_bytes, schedule_.next());
  }

  void reduce(const RingPart& part) {
    engine_.wait(batches_[slot_of(part)]);
    std::byte* sum = part.output != nullptr ? part.output : place(sums_, part);
    reduce_.combine(sum, {place(received_, part), part.input}, part.num_elems,
                    part.is_last ? shares_.divisor : 1);
    if (part.is_sent) engine_.send(sum, part.input_bytes, schedule_.next());
  }

  void copy(const RingPart& part) {
    engine_.wait(batches_[slot_of(part)]);
    if (part.is_sent) engine_.send(part.output, part.output_bytes, schedule_.next());
  }

  void finish() {}

 private:
  std::size_t slot_of(const RingPart& part) const { return part.slice_idx % depth(); }
  std::byte* place(std::byte* slots, const RingPart& part) const {
    return slots + slot_of(part) * slice_elems_ * shares_.element_bytes;
  }

  DeviceEngine& engine_;
  const MessageShares& shares_;
  DeviceReduceOp reduce_;
  RingSchedule schedule_;
  std::size_t slice_elems_;
  std::byte* received_ = nullptr;
  std::byte* sums_ = nullptr;                 // of partial sums that have no place in the output
  std::vector<DeviceEngine::Batch> batches_;  // by slot
};

}  // namespace

void device_ring(DeviceEngine& engine, const Collective& call, const MessageShares& shares,
                 const RingHalves& halves) {
  DeviceLinks links(engine, call, shares, halves);
  Ring(links, halves).run();
}

}  // namespace ringcomm
