#include "collectives/messages/ring.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "collectives/ring_turns.h"
#include "collectives/trace.h"
#include "core/chunk_layout.h"
#include "core/ring_schedule.h"

namespace ringcomm {
namespace {

// Names of the recording.
constexpr const char* kReduceScatter = "reduce_scatter";
constexpr const char* kAllGather = "all_gather";

// One rank's part of a ring.
//
// Why the ring cannot deadlock if sends complete only when their receive is posted: this rank posts
// the receive of turn k after turn k - num_slots, and waits for receives only, each sent by a rank
// that had only earlier turns to do. In a reduce_scatter a partial sum is in a slot until it is
// sent. A group of turns is at most the number of slots, so the receive of that send is posted by a
// rank that is num_slots turns behind.
class Ring {
 public:
  Ring(MessageEngine& engine, const MessageShares& shares, const RingPlan& plan)
      : engine_(engine),
        shares_(shares),
        plan_(plan),
        schedule_(engine.rank(), engine.world_size()),
        slot_bytes_(plan.slice_elems * shares.element_bytes),
        next_posted_(plan.first()) {
    if (plan.num_slices == 0) return;
    const std::size_t slots_bytes = plan.num_slots * slot_bytes_;
    if (plan.has_reduce_scatter) receive_slots_ = engine.stage(slots_bytes);
    if (plan.has_reduce_scatter && !plan.has_all_gather) {
      send_slots_ = engine.stage(slots_bytes);
      sends_.resize(plan.num_slots);
    }
    receives_.resize(plan.num_slots);
  }

  std::uint64_t run() {
    if (plan_.num_slices == 0) return 0;
    start_group(0);
    for (RingTurn turn = plan_.first(); !plan_.is_over(turn); plan_.advance(turn)) {
      // The next group starts after this group's last message with its tag.
      const bool is_first_phase = turn.is_gather != plan_.has_reduce_scatter;
      if (is_first_phase && turn.step == plan_.num_steps - 1 && turn.place == 0)
        start_group(turn.group + 1);
      const trace::Span traced([&] { return step_of(turn); });
      const std::byte* received = receive();
      if (turn.is_gather)
        pass_on(turn);
      else
        reduce(turn, received);
      ++num_done_;
    }
    for (const auto& send : sends_)
      if (send) engine_.wait(*send);
    return sent_bytes_;
  }

 private:
  int chunk_of(const RingTurn& turn) const {
    return turn.is_gather ? schedule_.all_gather_recv_chunk(turn.step)
                          : schedule_.reduce_scatter_recv_chunk(turn.step);
  }
  ElemRange slice_at(int chunk, const RingTurn& turn) const {
    return shares_.slice(chunk, plan_.slice_idx(turn), plan_.slice_elems);
  }
  std::size_t slot_of(std::size_t turn_count) const { return turn_count % plan_.num_slots; }

  // For the recording. What is complete is passed on unless the ring ends there.
  trace::Event step_of(const RingTurn& turn) const {
    const int chunk = chunk_of(turn);
    const bool is_last = turn.step == plan_.num_steps - 1;
    const bool passes_on = !is_last || (!turn.is_gather && plan_.has_all_gather);
    return trace::event_of({.phase = turn.is_gather ? kAllGather : kReduceScatter,
                            .step = turn.step,
                            .chunk = chunk,
                            .slice = plan_.slice_idx(turn),
                            .num_bytes = slice_at(chunk, turn).num_elems * shares_.element_bytes,
                            .from = engine_.whole_rank(schedule_.previous()),
                            .to = passes_on ? engine_.whole_rank(schedule_.next()) : -1});
  }

  // Chunks differ in size; of a short one the last slices are empty, and no message.
  void send(bool is_gather, const std::byte* data, const ElemRange& slice) {
    if (slice.num_elems == 0) return;
    const std::size_t num_bytes = slice.num_elems * shares_.element_bytes;
    sent_bytes_ += num_bytes;
    engine_.post_send(schedule_.next(),
                      is_gather ? MessageTags::kAllGather : MessageTags::kReduceScatter, data,
                      num_bytes);
  }

  // Sends what a rank can send before it has received anything of the group.
  void start_group(std::size_t group) {
    if (group >= plan_.num_groups()) return;
    const bool is_gather = !plan_.has_reduce_scatter;
    const int chunk =
        is_gather ? schedule_.all_gather_send_chunk(0) : schedule_.reduce_scatter_send_chunk(0);
    for (std::size_t place = 0; place < plan_.group_slices(group); ++place) {
      const RingTurn turn{.group = group, .is_gather = is_gather, .place = place};
      const ElemRange slice = slice_at(chunk, turn);
      const trace::Span traced([&] {
        return trace::event_of({.phase = is_gather ? kAllGather : kReduceScatter,
                                .step = -1,
                                .chunk = chunk,
                                .slice = plan_.slice_idx(turn),
                                .num_bytes = slice.num_elems * shares_.element_bytes,
                                .from = -1,
                                .to = engine_.whole_rank(schedule_.next())});
      });
      send(is_gather, is_gather ? shares_.output(chunk, slice) : shares_.input(chunk, slice),
           slice);
    }
  }

  // Posts the receives of the following messages, then waits for the next one.
  const std::byte* receive() {
    for (; num_posted_ < num_done_ + plan_.num_slots && !plan_.is_over(next_posted_);
         ++num_posted_, plan_.advance(next_posted_)) {
      const int chunk = chunk_of(next_posted_);
      const ElemRange slice = slice_at(chunk, next_posted_);
      if (slice.num_elems == 0) continue;
      std::byte* to = next_posted_.is_gather ? shares_.output(chunk, slice)
                                             : receive_slots_ + slot_of(num_posted_) * slot_bytes_;
      receives_[slot_of(num_posted_)] = engine_.irecv(
          schedule_.previous(),
          next_posted_.is_gather ? MessageTags::kAllGather : MessageTags::kReduceScatter, to,
          slice.num_elems * shares_.element_bytes);
    }
    auto& message = receives_[slot_of(num_done_)];
    if (message) engine_.wait(*message);
    message.reset();
    return receive_slots_ + slot_of(num_done_) * slot_bytes_;
  }

  void reduce(const RingTurn& turn, const std::byte* received) {
    const int chunk = chunk_of(turn);
    const ElemRange slice = slice_at(chunk, turn);
    if (slice.num_elems == 0) return;
    const bool is_last = turn.step == plan_.num_steps - 1;
    const bool has_place = shares_.of(chunk).output != nullptr;
    std::byte* to = has_place ? shares_.output(chunk, slice) : free_send_slot();
    const void* sources[] = {received, shares_.input(chunk, slice)};
    shares_.op->combine(to, nullptr, sources, 2, slice.num_elems, is_last ? shares_.divisor : 1);
    if (is_last && !plan_.has_all_gather) return;
    if (has_place) {
      send(is_last, to, slice);
    } else {
      const std::size_t num_bytes = slice.num_elems * shares_.element_bytes;
      sent_bytes_ += num_bytes;
      sends_[slot_of(num_done_)] =
          engine_.isend(schedule_.next(), MessageTags::kReduceScatter, to, num_bytes);
    }
  }

  std::byte* free_send_slot() {
    auto& previous = sends_[slot_of(num_done_)];
    if (previous) engine_.wait(*previous);
    previous.reset();
    return send_slots_ + slot_of(num_done_) * slot_bytes_;
  }

  void pass_on(const RingTurn& turn) {
    if (turn.step == plan_.num_steps - 1) return;
    const int chunk = chunk_of(turn);
    const ElemRange slice = slice_at(chunk, turn);
    if (slice.num_elems > 0) send(true, shares_.output(chunk, slice), slice);
  }

  MessageEngine& engine_;
  const MessageShares& shares_;
  RingPlan plan_;
  RingSchedule schedule_;
  std::size_t slot_bytes_;
  std::byte* receive_slots_ = nullptr;
  std::byte* send_slots_ = nullptr;
  RingTurn next_posted_;
  std::size_t num_posted_ = 0;                                  // turns whose receive is posted
  std::size_t num_done_ = 0;                                    // turns done
  std::vector<std::optional<MessageEngine::Handle>> receives_;  // by slot
  std::vector<std::optional<MessageEngine::Handle>> sends_;     // sends of partial sums, by slot
  std::uint64_t sent_bytes_ = 0;
};

std::uint64_t run_ring(MessageEngine& engine, const MessageShares& shares, std::uint32_t num_slots,
                       std::size_t slot_bytes, bool has_reduce_scatter, bool has_all_gather) {
  const std::size_t slice_elems = slot_bytes / shares.element_bytes;
  return Ring(engine, shares,
              {.num_slices = num_slices(shares.max_elems(), slice_elems),
               .slice_elems = slice_elems,
               .num_slots = num_slots,
               .num_steps = engine.world_size() - 1,
               .has_reduce_scatter = has_reduce_scatter,
               .has_all_gather = has_all_gather})
      .run();
}

}  // namespace

std::uint64_t ring_all_reduce(MessageEngine& engine, const MessageShares& shares,
                              std::uint32_t num_slots, std::size_t slot_bytes) {
  return run_ring(engine, shares, num_slots, slot_bytes, true, true);
}

std::uint64_t ring_reduce_scatter(MessageEngine& engine, const MessageShares& shares,
                                  std::uint32_t num_slots, std::size_t slot_bytes) {
  return run_ring(engine, shares, num_slots, slot_bytes, true, false);
}

std::uint64_t ring_all_gather(MessageEngine& engine, const MessageShares& shares,
                              std::uint32_t num_slots, std::size_t slot_bytes) {
  return run_ring(engine, shares, num_slots, slot_bytes, false, true);
}

}  // namespace ringcomm
