#include "collectives/messages/trees.h"

#include <functional>
#include <optional>
#include <vector>

#include "collectives/collective.h"
#include "collectives/messages/exchange.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// The slices of a buffer on their way along a chain of ranks, receives posted ahead.
class ChainReceives {
 public:
  using Place = std::function<std::byte*(std::size_t slice_idx)>;

  ChainReceives(MessageEngine& engine, int from, const ElemRange& all, std::size_t element_bytes,
                Place place)
      : engine_(engine),
        from_(from),
        all_(all),
        element_bytes_(element_bytes),
        slice_elems_(engine.cut().slot_bytes / element_bytes),
        place_(std::move(place)),
        receives_(engine.cut().num_slots) {}

  // The next slice; may be called when the one before is done with.
  void wait(std::size_t slice_idx) {
    for (; num_posted_ < slice_idx + receives_.size() &&
           num_posted_ < num_slices(all_.num_elems, slice_elems_);
         ++num_posted_)
      receives_[num_posted_ % receives_.size()] =
          engine_.irecv(from_, MessageTags::kChain, place_(num_posted_),
                        slice_of(all_, num_posted_, slice_elems_).num_elems * element_bytes_);
    engine_.wait(*receives_[slice_idx % receives_.size()]);
  }

 private:
  MessageEngine& engine_;
  int from_;
  ElemRange all_;
  std::size_t element_bytes_;
  std::size_t slice_elems_;
  Place place_;
  std::size_t num_posted_ = 0;
  std::vector<std::optional<MessageEngine::Handle>> receives_;
};

}  // namespace

std::uint64_t tree_broadcast(MessageEngine& engine, const Collective& call,
                             const CallHeader& header) {
  greet_neighbours(engine, header);
  const int world_size = engine.world_size();
  const int place = (engine.rank() - call.root + world_size) % world_size;  // the root's is 0
  const auto rank_at = [&](int other) { return (other + call.root) % world_size; };
  const void* data = place == 0 ? call.inputs[0] : call.outputs[0];
  MessageExchange exchange(engine, header);
  int bit = 1;
  for (; bit < world_size && (place & bit) == 0; bit <<= 1) {
  }
  if (place != 0) {
    exchange.recv(rank_at(place - bit), call.outputs[0], call.num_bytes());
    exchange.finish();
  }
  std::uint64_t sent_bytes = 0;
  for (bit >>= 1; bit > 0; bit >>= 1) {
    if (place + bit >= world_size) continue;
    exchange.send(rank_at(place + bit), data, call.num_bytes());
    sent_bytes += call.num_bytes();
  }
  exchange.finish();
  return sent_bytes;
}

std::uint64_t chain_broadcast(MessageEngine& engine, const Collective& call,
                              const CallHeader& header) {
  greet_neighbours(engine, header);
  const int world_size = engine.world_size();
  const int next = (engine.rank() + 1) % world_size;
  const bool is_root = engine.rank() == call.root;
  const std::size_t bytes = element_bytes(call.dtype);
  const std::size_t slice_elems = engine.cut().slot_bytes / bytes;
  const ElemRange all{0, call.num_elems};
  ChainReceives receives(
      engine, (engine.rank() + world_size - 1) % world_size, all, bytes, [&](std::size_t idx) {
        return at(call.outputs[0], slice_of(all, idx, slice_elems).begin_elems, bytes);
      });
  for (std::size_t idx = 0; idx < num_slices(call.num_elems, slice_elems); ++idx) {
    const ElemRange slice = slice_of(all, idx, slice_elems);
    if (!is_root) receives.wait(idx);
    if (next != call.root)
      engine.post_send(next, MessageTags::kChain,
                       at(is_root ? call.inputs[0] : call.outputs[0], slice.begin_elems, bytes),
                       slice.num_elems * bytes);
  }
  return next != call.root ? call.num_bytes() : 0;
}

std::uint64_t chain_reduce(MessageEngine& engine, const Collective& call,
                           const CallHeader& header) {
  greet_neighbours(engine, header);
  const int world_size = engine.world_size();
  const int previous = (engine.rank() + world_size - 1) % world_size;
  const int next = (engine.rank() + 1) % world_size;
  const bool is_root = engine.rank() == call.root;
  const bool is_first = previous == call.root;
  const ReduceOp& op = reduce_op_of(call);
  const std::size_t slice_elems = engine.cut().slot_bytes / op.element_bytes;
  const std::size_t slot_bytes = slice_elems * op.element_bytes;
  const std::size_t num_slots = engine.cut().num_slots;
  const ElemRange all{0, call.num_elems};
  // Data is received into one slot, summed into another, and sent from there. A slot is free again
  // when the next rank has posted its receive, which only waits for that rank's later slots.
  std::byte* received = is_first ? nullptr : engine.stage(num_slots * slot_bytes);
  std::byte* sums = is_first || is_root ? nullptr : engine.stage(num_slots * slot_bytes);
  std::vector<std::optional<MessageEngine::Handle>> sends(num_slots);
  ChainReceives receives(engine, previous, all, op.element_bytes,
                         [&](std::size_t idx) { return received + idx % num_slots * slot_bytes; });
  for (std::size_t idx = 0; idx < num_slices(call.num_elems, slice_elems); ++idx) {
    const ElemRange slice = slice_of(all, idx, slice_elems);
    const std::byte* input = at(call.inputs[0], slice.begin_elems, op.element_bytes);
    auto& send = sends[idx % num_slots];
    if (send) engine.wait(*send);
    const std::byte* sum = input;
    if (!is_first) {
      receives.wait(idx);
      std::byte* to = is_root ? at(call.outputs[0], slice.begin_elems, op.element_bytes)
                              : sums + idx % num_slots * slot_bytes;
      const void* sources[] = {received + idx % num_slots * slot_bytes, input};
      op.combine(to, nullptr, sources, 2, slice.num_elems,
                 is_root ? divisor_of(call, world_size) : 1);
      sum = to;
    }
    if (!is_root)
      send = engine.isend(next, MessageTags::kChain, sum, slice.num_elems * op.element_bytes);
  }
  for (const auto& send : sends)
    if (send) engine.wait(*send);
  return is_root ? 0 : call.num_bytes();
}

void tree_barrier(MessageEngine& engine, const CallHeader& header) {
  const int world_size = engine.world_size();
  MessageExchange exchange(engine, header);
  for (int distance = 1; distance < world_size; distance *= 2) {
    exchange.recv((engine.rank() + world_size - distance) % world_size, nullptr, 0);
    exchange.send((engine.rank() + distance) % world_size, nullptr, 0);
    exchange.finish();
  }
}

}  // namespace ringcomm
