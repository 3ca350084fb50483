#include <cstddef>
#include <vector>

#include "collectives/reduction.h"
#include "collectives/ring_turns.h"
#include "core/ring_schedule.h"
#include "cuda/messages/collectives.h"
#include "cuda/messages/operators.h"

namespace ringcomm {
namespace {

// One rank's part of a ring. A turn is one batch: a send to the next rank and a receive from the
// previous rank, which sends in the same turn. Up to num_slots turns are in flight, so that one
// slice is reduced while others are transferred.
//
// In all steps except the first, a turn sends what was received in the turn of the same slice one
// step earlier, so that turn completes before this one is posted. A turn also needs slots, which
// the turn num_slots earlier has released.
class DeviceRing {
 public:
  DeviceRing(DeviceEngine& engine, const Collective& call, const MessageShares& shares,
             const RingPlan& plan)
      : engine_(engine),
        shares_(shares),
        plan_(plan),
        reduce_(call.reduction, call.dtype, engine.device()),
        schedule_(engine.rank(), engine.world_size()),
        slot_bytes_(plan.slice_elems * shares.element_bytes),
        batches_(plan.num_slots) {
    const std::size_t slots_bytes = plan.num_slots * slot_bytes_;
    if (plan.has_reduce_scatter) receive_slots_ = engine.stage(slots_bytes);
    if (plan.has_reduce_scatter && !plan.has_all_gather) send_slots_ = engine.stage(slots_bytes);
  }

  void run() {
    RingTurn next = plan_.first();
    std::size_t num_posted = 0;
    std::size_t num_done = 0;
    for (RingTurn turn = plan_.first(); !plan_.is_over(turn); plan_.advance(turn), ++num_done) {
      for (; !plan_.is_over(next) && num_posted < num_done + window(next); plan_.advance(next))
        post(next, num_posted++);
      engine_.wait(batches_[slot_of(num_done)]);
      if (!turn.is_gather) reduce(turn, num_done);
    }
  }

 private:
  bool is_first_step(const RingTurn& turn) const {
    return turn.step == 0 && turn.is_gather != plan_.has_reduce_scatter;
  }
  // How many turns may be under way when this one is posted.
  std::size_t window(const RingTurn& turn) const {
    return is_first_step(turn) ? plan_.num_slots : plan_.group_slices(turn.group);
  }
  std::size_t slot_of(std::size_t turn_count) const { return turn_count % plan_.num_slots; }
  ElemRange slice_at(int chunk, const RingTurn& turn) const {
    return shares_.slice(chunk, plan_.slice_idx(turn), plan_.slice_elems);
  }
  int receive_chunk(const RingTurn& turn) const {
    return turn.is_gather ? schedule_.all_gather_recv_chunk(turn.step)
                          : schedule_.reduce_scatter_recv_chunk(turn.step);
  }

  void post(const RingTurn& turn, std::size_t turn_count) {
    const int send_chunk = turn.is_gather ? schedule_.all_gather_send_chunk(turn.step)
                                          : schedule_.reduce_scatter_send_chunk(turn.step);
    const ElemRange sent = slice_at(send_chunk, turn);
    engine_.send(source_of(turn, turn_count, send_chunk, sent),
                 sent.num_elems * shares_.element_bytes, schedule_.next());
    const int chunk = receive_chunk(turn);
    const ElemRange received = slice_at(chunk, turn);
    engine_.recv(turn.is_gather ? shares_.output(chunk, received)
                                : receive_slots_ + slot_of(turn_count) * slot_bytes_,
                 received.num_elems * shares_.element_bytes, schedule_.previous());
    batches_[slot_of(turn_count)] = engine_.post();
  }

  const std::byte* source_of(const RingTurn& turn, std::size_t turn_count, int chunk,
                             const ElemRange& slice) const {
    if (turn.is_gather) return shares_.output(chunk, slice);
    if (turn.step == 0) return shares_.input(chunk, slice);
    if (send_slots_ == nullptr) return shares_.output(chunk, slice);
    return send_slots_ + slot_of(turn_count - plan_.group_slices(turn.group)) * slot_bytes_;
  }

  void reduce(const RingTurn& turn, std::size_t turn_count) {
    const int chunk = receive_chunk(turn);
    const ElemRange slice = slice_at(chunk, turn);
    const bool is_last = turn.step == plan_.num_steps - 1;
    std::byte* to = shares_.of(chunk).output != nullptr
                        ? shares_.output(chunk, slice)
                        : send_slots_ + slot_of(turn_count) * slot_bytes_;
    reduce_.combine(
        to, {receive_slots_ + slot_of(turn_count) * slot_bytes_, shares_.input(chunk, slice)},
        slice.num_elems, is_last ? shares_.divisor : 1);
  }

  DeviceEngine& engine_;
  const MessageShares& shares_;
  RingPlan plan_;
  DeviceReduceOp reduce_;
  RingSchedule schedule_;
  std::size_t slot_bytes_;
  std::byte* receive_slots_ = nullptr;
  std::byte* send_slots_ = nullptr;           // of partial sums that have no place in the output
  std::vector<DeviceEngine::Batch> batches_;  // by slot
};

}  // namespace

void device_ring(DeviceEngine& engine, const Collective& call, const MessageShares& shares,
                 DeviceRingParts parts) {
  const std::size_t slice_elems = DeviceEngine::kSlotBytes / shares.element_bytes;
  const std::size_t num_pieces = num_slices(shares.max_elems(), slice_elems);
  if (num_pieces == 0) return;
  DeviceRing(engine, call, shares,
             {.num_slices = num_pieces,
              .slice_elems = slice_elems,
              .num_slots = DeviceEngine::kNumSlots,
              .num_steps = engine.world_size() - 1,
              .has_reduce_scatter = parts.has_reduce_scatter,
              .has_all_gather = parts.has_all_gather})
      .run();
}

}  // namespace ringcomm
