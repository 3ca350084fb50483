#include "collectives/ring.h"

#include <array>
#include <functional>
#include <optional>
#include <vector>

#include "collectives/collective.h"
#include "collectives/op_kind.h"
#include "host/call_step.h"
#include "transport/messages/collectives.h"

namespace ringcomm {
namespace {

constexpr std::size_t kNumSlots = 2;  // receives that are posted ahead
// A message costs much more than a slot in shared memory.
constexpr std::size_t kSliceBytes = std::size_t{1} << 20;

// The links of a ring as messages. A slice that is added to needs memory: a slot for what is
// received, and another for the sum if the output has no room for it.
//
// Why this cannot deadlock if sends complete only when their receive is posted: this rank waits for
// receives only, each sent by a rank that had only earlier steps to do, and has posted the receives
// of the steps before. In a reduce_scatter a sum is in its slot until it is sent: the receive of
// that send is posted by a rank that is one step behind, or in a chain waits for later slots only.
class MessageLinks {
 public:
  MessageLinks(MessageContext& context, const ShardTable& shards, int previous, int next,
               const RingHalves& halves)
      : context_(context), shards_(shards), previous_(previous), next_(next) {
    const std::size_t slots_bytes = kNumSlots * slice_elems() * shards.element_bytes;
    if (shards.max_elems() == 0 || !halves.has_reduce_scatter) return;
    received_ = context.stage(slots_bytes);
    if (!halves.has_all_gather) sums_ = context.stage(slots_bytes);
  }

  RingSchedule schedule() const { return {context_.rank(), context_.world_size()}; }
  int whole_rank(int rank) const { return rank; }
  CallStep& step() { return context_.step(); }
  std::size_t depth() const { return kNumSlots; }
  bool sends_early() const { return true; }
  std::size_t slice_elems() const { return kSliceBytes / shards_.element_bytes; }
  std::size_t input_element_bytes() const { return shards_.element_bytes; }
  std::size_t output_element_bytes() const { return shards_.element_bytes; }
  const RingChunk& chunk(int rank) const { return shards_.of(rank); }

  void expect(const RingPart& part) {
    if (part.num_elems == 0) return;
    context_.count(previous_, 0, part.input_bytes);
    receive_of(part) =
        context_.irecv(previous_, tag_of(part.is_gather),
                       part.is_gather ? part.output : place(received_, part), part.input_bytes);
  }

  void send(const RingPart& part) {
    post(part, part.is_gather ? part.output : part.input, part.is_gather);
  }

  void reduce(const RingPart& part) {
    if (part.num_elems == 0) return;
    wait(receive_of(part));
    const bool has_room = part.output != nullptr;
    auto& send = sends_[slot_of(part)];
    if (!has_room) wait(send);
    std::byte* sum = has_room ? part.output : place(sums_, part);
    const void* sources[] = {place(received_, part), part.input};
    shards_.op->combine(sum, nullptr, sources, 2, part.num_elems,
                        part.is_last ? shards_.divisor : 1);
    if (part.is_sent) post(part, sum, part.is_last, has_room ? nullptr : &send);
  }

  void copy(const RingPart& part) {
    wait(receive_of(part));
    if (part.is_sent) post(part, part.output, true);
  }

  void start_sends() {
    for (const auto& start : to_send_) start();
    to_send_.clear();
  }

 private:
  using Message = std::optional<MessageContext::Handle>;

  static int tag_of(bool is_gather) {
    return is_gather ? MessageTags::kAllGather : MessageTags::kReduceScatter;
  }
  std::size_t slot_of(const RingPart& part) const { return part.slice_idx % kNumSlots; }
  Message& receive_of(const RingPart& part) { return receives_[part.is_gather][slot_of(part)]; }
  std::byte* place(std::byte* slots, const RingPart& part) const {
    return slots + slot_of(part) * slice_elems() * shards_.element_bytes;
  }

  // Chunks differ in size; of a short one the last slices are empty, and no message. With two ranks
  // a send would be on the connection in front of what this rank says it expects: that goes first.
  void post(const RingPart& part, const std::byte* data, bool is_gather, Message* kept = nullptr) {
    if (part.num_elems == 0) return;
    to_send_.emplace_back([this, data, num_bytes = part.input_bytes, is_gather, kept] {
      context_.count(next_, num_bytes, 0);
      const Message sent = context_.isend(next_, tag_of(is_gather), data, num_bytes);
      if (kept != nullptr) *kept = sent;
    });
  }

  void wait(Message& message) {
    if (message) context_.wait(*message);
    message.reset();
  }

  MessageContext& context_;
  const ShardTable& shards_;
  int previous_;
  int next_;
  std::byte* received_ = nullptr;
  std::byte* sums_ = nullptr;
  std::array<std::array<Message, kNumSlots>, 2> receives_;  // by tag and slot
  std::array<Message, kNumSlots> sends_;                    // of sums without room, by slot
  std::vector<std::function<void()>> to_send_;              // once what comes next is expected
};

}  // namespace

std::uint64_t run_message_ring(MessageContext& context, const ShardTable& shards,
                               const RingHalves& halves) {
  const RingSchedule ring(context.rank(), context.world_size());
  MessageLinks links(context, shards, ring.previous(), ring.next(), halves);
  return Ring(links, halves).run();
}

// In a reduce each rank adds its part, with one rounding per hop.
std::uint64_t run_message_chain(MessageContext& context, const Collective& call,
                                const std::vector<int>& ranks) {
  const auto place = std::find(ranks.begin(), ranks.end(), context.rank()) - ranks.begin();
  const RingSchedule ring(static_cast<int>(place), static_cast<int>(ranks.size()));
  const int previous = ranks[static_cast<std::size_t>(ring.previous())];
  const int next = ranks[static_cast<std::size_t>(ring.next())];
  const bool reduces = call.op == OpKind::kReduce;
  const bool is_first = reduces ? previous == call.root : context.rank() == call.root;
  const bool is_last = reduces ? context.rank() == call.root : next == call.root;
  void* const own = const_cast<void*>(reduces || is_first ? call.inputs[0] : call.outputs[0]);
  void* const result = !reduces ? own : is_last ? call.outputs[0] : nullptr;
  const ShardTable whole{
      .shards = {{at(own, 0, 1), static_cast<std::byte*>(result), call.num_elems}},
      .element_bytes = element_bytes(call.dtype),
      .op = reduces ? &reduce_op_of(call) : nullptr,
      .divisor = divisor_of(call, context.world_size())};
  MessageLinks links(context, whole, previous, next,
                     {.has_reduce_scatter = reduces && !is_first, .has_all_gather = is_last});
  const auto part = [&](std::size_t idx) {
    return RingPart{.is_gather = !reduces,
                    .is_last = is_last,
                    .is_sent = !is_last,
                    .chunk_idx = 0,
                    .slice_idx = idx}
        .in(links);
  };
  const std::size_t num_slices = ringcomm::num_slices(call.num_elems, links.slice_elems());
  std::size_t num_expected = 0;
  for (std::size_t idx = 0; idx < num_slices; ++idx) {
    context.step() = {1, 1, idx + 1, num_slices};
    for (; !is_first && num_expected < std::min(idx + kNumSlots, num_slices); ++num_expected)
      links.expect(part(num_expected));
    if (is_first)
      links.send(part(idx));
    else if (reduces)
      links.reduce(part(idx));
    else
      links.copy(part(idx));
    links.start_sends();
  }
  return is_last ? 0 : call.num_bytes();
}

}  // namespace ringcomm
