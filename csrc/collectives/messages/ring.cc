#include "collectives/ring.h"

#include <optional>
#include <vector>

#include "collectives/messages/ring.h"
#include "collectives/messages/engine.h"

namespace ringcomm {
namespace {

// The links of a ring as messages. A slice that is added to needs memory: a slot for what is
// received, and another for the sum if the output has no room for it.
//
// Why this cannot deadlock if sends complete only when their receive is posted: this rank waits for
// receives only, each sent by a rank that had only earlier steps to do, and has posted the receives
// of the steps before. In a reduce_scatter a sum is in its slot until it is sent: the receive of
// that send is posted by a rank that is one step behind.
class MessageLinks {
 public:
  MessageLinks(MessageEngine& engine, const MessageShares& shares, const RingHalves& halves)
      : engine_(engine),
        shares_(shares),
        schedule_(engine.rank(), engine.world_size()),
        receives_(depth()),
        sends_(depth()) {
    const std::size_t slots_bytes = depth() * slice_elems() * shares.element_bytes;
    if (shares.max_elems() == 0 || !halves.has_reduce_scatter) return;
    received_ = engine.stage(slots_bytes);
    if (!halves.has_all_gather) sums_ = engine.stage(slots_bytes);
  }

  const RingSchedule& schedule() const { return schedule_; }
  int whole_rank(int rank) const { return engine_.whole_rank(rank); }
  std::size_t depth() const { return engine_.cut().num_slots; }
  bool sends_early() const { return true; }
  std::size_t slice_elems() const { return engine_.cut().slot_bytes / shares_.element_bytes; }
  std::size_t input_element_bytes() const { return shares_.element_bytes; }
  std::size_t output_element_bytes() const { return shares_.element_bytes; }
  RingChunk chunk(int rank) const {
    const MessageShares::Share& share = shares_.of(rank);
    return {share.input, share.output, share.num_elems};
  }

  void expect(const RingPart& part) {
    if (part.num_elems == 0) return;
    receives_[slot_of(part)] =
        engine_.irecv(schedule_.previous(), tag_of(part.is_gather),
                      part.is_gather ? part.output : place(received_, part), part.input_bytes);
  }

  void send(const RingPart& part) {
    post(part, part.is_gather ? part.output : part.input, part.is_gather);
  }

  void reduce(const RingPart& part) {
    if (part.num_elems == 0) return;
    wait(receives_[slot_of(part)]);
    const bool has_room = part.output != nullptr;
    auto& send = sends_[slot_of(part)];
    if (!has_room) wait(send);
    std::byte* sum = has_room ? part.output : place(sums_, part);
    const void* sources[] = {place(received_, part), part.input};
    shares_.op->combine(sum, nullptr, sources, 2, part.num_elems,
                        part.is_last ? shares_.divisor : 1);
    if (!part.is_sent) return;
    if (has_room)
      post(part, sum, part.is_last);
    else
      send = engine_.isend(schedule_.next(), tag_of(false), sum, part.input_bytes);
  }

  void copy(const RingPart& part) {
    wait(receives_[slot_of(part)]);
    if (part.is_sent) post(part, part.output, true);
  }

  void finish() {
    for (auto& send : sends_) wait(send);
  }

 private:
  using Message = std::optional<MessageEngine::Handle>;

  static int tag_of(bool is_gather) {
    return is_gather ? MessageTags::kAllGather : MessageTags::kReduceScatter;
  }
  std::size_t slot_of(const RingPart& part) const { return part.slice_idx % depth(); }
  std::byte* place(std::byte* slots, const RingPart& part) const {
    return slots + slot_of(part) * slice_elems() * shares_.element_bytes;
  }

  // Chunks differ in size; of a short one the last slices are empty, and no message.
  void post(const RingPart& part, const std::byte* data, bool is_gather) {
    if (part.num_elems > 0)
      engine_.post_send(schedule_.next(), tag_of(is_gather), data, part.input_bytes);
  }

  void wait(Message& message) {
    if (message) engine_.wait(*message);
    message.reset();
  }

  MessageEngine& engine_;
  const MessageShares& shares_;
  RingSchedule schedule_;
  std::byte* received_ = nullptr;
  std::byte* sums_ = nullptr;
  std::vector<Message> receives_;  // by slot
  std::vector<Message> sends_;     // of sums without room, by slot
};

std::uint64_t run_ring(MessageEngine& engine, const MessageShares& shares,
                       const RingHalves& halves) {
  MessageLinks links(engine, shares, halves);
  return Ring(links, halves).run();
}

}  // namespace

std::uint64_t ring_all_reduce(MessageEngine& engine, const MessageShares& shares) {
  return run_ring(engine, shares, {});
}

std::uint64_t ring_reduce_scatter(MessageEngine& engine, const MessageShares& shares) {
  return run_ring(engine, shares, {.has_all_gather = false});
}

std::uint64_t ring_all_gather(MessageEngine& engine, const MessageShares& shares) {
  return run_ring(engine, shares, {.has_reduce_scatter = false});
}

}  // namespace ringcomm
