#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "collectives/call.h"
#include "collectives/fused_update.h"
#include "collectives/ring.h"
#include "core/chunk_layout.h"
#include "cuda/messages/context.h"
#include "cuda/messages/operators.h"
#include "transport/messages/hosts.h"

namespace ringcomm {
namespace {

using Batch = DeviceMessageContext::Batch;
using Part = DeviceMessageContext::Part;
using Parts = DeviceMessageContext::Parts;

constexpr std::size_t kMaxStagingBytes = std::size_t{64} << 20;
// Pieces begin at multiples of this, so that an aligned buffer is copied 16 bytes at a time.
constexpr std::size_t kElemsAlignment = 16;

Part part(const void* data, std::size_t num_bytes) { return {const_cast<void*>(data), num_bytes}; }

template <class SentTo, class ReceivedFrom>
Batch post_exchange(DeviceMessageContext& context, const SentTo& sent_to,
                    const ReceivedFrom& received_from) {
  const auto world_size = static_cast<std::size_t>(context.world_size());
  Parts sent(world_size), received(world_size);
  for (int peer = 0; peer < context.world_size(); ++peer) {
    if (peer == context.rank()) continue;
    sent[static_cast<std::size_t>(peer)] = sent_to(peer);
    received[static_cast<std::size_t>(peer)] = received_from(peer);
  }
  return context.all_to_all(sent, received);
}

// Every rank gets the inputs of its shard, in pieces: one is received while another is reduced.
void exchange_and_reduce(DeviceMessageContext& context, const Collective& call,
                         const ShardTable& shards) {
  const std::size_t most_elems = shards.max_elems();
  if (most_elems == 0) return;
  const int rank = context.rank();
  const auto num_ranks = static_cast<std::size_t>(context.world_size());
  const std::size_t bytes = shards.element_bytes;
  const std::size_t piece_bytes =
      std::min(DeviceMessageContext::kNumSlots * DeviceMessageContext::kSlotBytes,
               kMaxStagingBytes / (2 * num_ranks));
  const std::size_t piece_elems =
      num_slices(std::min(most_elems, piece_bytes / bytes), kElemsAlignment) * kElemsAlignment;
  const std::size_t num_pieces = num_slices(most_elems, piece_elems);
  std::byte* const staging = context.stage(2 * num_ranks * piece_elems * bytes);
  const auto received = [&](int peer, std::size_t piece) {
    return staging + (piece % 2 * num_ranks + static_cast<std::size_t>(peer)) * piece_elems * bytes;
  };
  const auto slice = [&](int of, std::size_t piece) {
    return shards.slice(of, piece, piece_elems);
  };
  const auto post = [&](std::size_t piece) {
    const std::size_t own_bytes = slice(rank, piece).num_elems * bytes;
    return post_exchange(
        context,
        [&](int peer) {
          const ElemRange theirs = slice(peer, piece);
          return part(shards.input(peer, theirs), theirs.num_elems * bytes);
        },
        [&](int peer) { return part(received(peer, piece), own_bytes); });
  };

  const DeviceReduceOp op(call.reduction, call.dtype, context.device());
  Batch current = post(0);
  for (std::size_t piece = 0; piece < num_pieces; ++piece) {
    Batch next = piece + 1 < num_pieces ? post(piece + 1) : Batch{};
    context.wait(current);
    const ElemRange own = slice(rank, piece);
    std::vector<const void*> sources;
    for (int peer = 0; peer < context.world_size(); ++peer)
      sources.push_back(peer == rank ? shards.input(rank, own) : received(peer, piece));
    op.combine(shards.output(rank, own), sources, own.num_elems, shards.divisor);
    current = std::move(next);
  }
}

// The links of a ring as batches of a send to the next rank and a receive from the previous one. A
// batch is posted where its receive is expected, after the sum that it sends is in the stream.
class DeviceLinks {
 public:
  DeviceLinks(DeviceMessageContext& context, const Collective& call, const ShardTable& shards,
              const RingHalves& halves)
      : context_(context),
        shards_(shards),
        reduce_(call.reduction, call.dtype, context.device()),
        schedule_(context.rank(), context.world_size()),
        slice_elems_(DeviceMessageContext::kSlotBytes / shards.element_bytes),
        batches_(DeviceMessageContext::kNumSlots) {
    const std::size_t slots_bytes = depth() * slice_elems_ * shards.element_bytes;
    if (shards.max_elems() == 0 || !halves.has_reduce_scatter) return;
    received_ = context.stage(slots_bytes);
    if (!halves.has_all_gather) sums_ = context.stage(slots_bytes);
  }

  const RingSchedule& schedule() const { return schedule_; }
  std::size_t depth() const { return batches_.size(); }
  std::size_t slice_elems() const { return slice_elems_; }
  std::size_t input_element_bytes() const { return shards_.element_bytes; }
  std::size_t output_element_bytes() const { return shards_.element_bytes; }
  const RingChunk& chunk(int rank) const { return shards_.of(rank); }

  void expect(const RingPart& part) {
    context_.recv(part.is_gather ? part.output : place(received_, part), part.input_bytes,
                  schedule_.previous());
    batches_[slot_of(part)] = context_.post();
  }

  void send(const RingPart& part) {
    context_.send(part.is_gather ? part.output : part.input, part.input_bytes, schedule_.next());
  }

  void reduce(const RingPart& part) {
    context_.wait(batches_[slot_of(part)]);
    std::byte* sum = part.output != nullptr ? part.output : place(sums_, part);
    reduce_.combine(sum, {place(received_, part), part.input}, part.num_elems,
                    part.is_last ? shards_.divisor : 1);
    if (part.is_sent) context_.send(sum, part.input_bytes, schedule_.next());
  }

  void copy(const RingPart& part) {
    context_.wait(batches_[slot_of(part)]);
    if (part.is_sent) context_.send(part.output, part.output_bytes, schedule_.next());
  }

 private:
  std::size_t slot_of(const RingPart& part) const { return part.slice_idx % depth(); }
  std::byte* place(std::byte* slots, const RingPart& part) const {
    return slots + slot_of(part) * slice_elems_ * shards_.element_bytes;
  }

  DeviceMessageContext& context_;
  const ShardTable& shards_;
  DeviceReduceOp reduce_;
  RingSchedule schedule_;
  std::size_t slice_elems_;
  std::byte* received_ = nullptr;
  std::byte* sums_ = nullptr;   // of partial sums that have no place in the output
  std::vector<Batch> batches_;  // by slot
};

// Around the ring of collectives/ring.h.
void device_ring(DeviceMessageContext& context, const Collective& call, const ShardTable& shards,
                 const RingHalves& halves) {
  DeviceLinks links(context, call, shards, halves);
  Ring(links, halves).run();
}

void reduce_shards(DeviceMessageContext& context, const Collective& call,
                   const ShardTable& shards) {
  if (call.algorithm == Algorithm::kRing)
    device_ring(context, call, shards, {.has_reduce_scatter = true, .has_all_gather = false});
  else
    exchange_and_reduce(context, call, shards);
}

// This rank's own shard is in its output. The backend's all_gather needs one buffer for all
// outputs.
void gather_shards(DeviceMessageContext& context, const Collective& call,
                   const ShardTable& shards) {
  if (call.algorithm == Algorithm::kRing)
    return device_ring(context, call, shards,
                       {.has_reduce_scatter = false, .has_all_gather = true});
  const auto of = [&](int rank) { return part(shards.of(rank).output, shards.num_bytes(rank)); };
  context.wait(post_exchange(context, [&](int) { return of(context.rank()); }, of));
}

void all_reduce(DeviceMessageContext& context, const Collective& call) {
  ShardTable shards = ShardTable::of_call(call, context.rank(), context.world_size());
  if (call.algorithm == Algorithm::kOneShot) {  // every rank gets the whole buffers of all
    std::ranges::fill(shards.shards, RingChunk{at(call.inputs[0], 0, 1), at(call.outputs[0], 0, 1),
                                               call.num_elems});
    return exchange_and_reduce(context, call, shards);
  }
  if (call.algorithm == Algorithm::kRing)
    return device_ring(context, call, shards, {.has_reduce_scatter = true, .has_all_gather = true});
  exchange_and_reduce(context, call, shards);
  gather_shards(context, call, shards);
}

void all_gather(DeviceMessageContext& context, const Collective& call) {
  const auto shards = ShardTable::of_call(call, context.rank(), context.world_size());
  context.copy(call.outputs[context.rank()], call.inputs[0], shards.num_bytes(context.rank()));
  gather_shards(context, call, shards);
}

// Gather and scatter: parts of no bytes in an all_to_all would be messages, too.
void exchange_with_root(DeviceMessageContext& context, const Collective& call) {
  const int rank = context.rank();
  const std::size_t bytes = element_bytes(call.dtype);
  for (int peer = 0; peer < context.world_size(); ++peer) {
    if (peer == rank) continue;
    if (const auto given = part_given(call, rank, peer))
      context.send(given->data, given->num_elems * bytes, peer);
    if (const auto taken = part_taken(call, rank, peer))
      context.recv(taken->data, taken->num_elems * bytes, peer);
  }
  context.wait(context.post());
  if (const auto own = part_taken(call, rank, rank))
    context.copy(own->data, part_given(call, rank, rank)->data, own->num_elems * bytes);
}

// A reduce_scatter of chunks, and a gather.
void reduce(DeviceMessageContext& context, const Collective& call) {
  const ChunkLayout layout(call.num_elems, context.world_size());
  const std::size_t bytes = element_bytes(call.dtype);
  const auto chunk_of = [&](int rank) {
    const ElemRange chunk = layout.chunk(rank);
    return part(at(call.outputs[0], chunk.begin_elems, bytes), chunk.num_elems * bytes);
  };
  const bool is_root = context.rank() == call.root;
  Part own = chunk_of(context.rank());
  if (!is_root) own.data = context.stage(own.num_bytes);
  ShardTable shards = ShardTable::of_call(call, context.rank(), context.world_size());
  for (RingChunk& shard : shards.shards) shard.output = nullptr;
  shards.shards[static_cast<std::size_t>(context.rank())].output = at(own.data, 0, 1);
  reduce_shards(context, call, shards);
  if (!is_root) context.send(own.data, own.num_bytes, call.root);
  for (int peer = 0; is_root && peer < context.world_size(); ++peer)
    if (peer != call.root) context.recv(chunk_of(peer).data, chunk_of(peer).num_bytes, peer);
  context.wait(context.post());
}

void reduce_update_gather(DeviceMessageContext& context, const Collective& call,
                          const CommunicatorOptions& options) {
  const int world_size = context.world_size();
  const ElemRange own = ChunkLayout(call.num_elems, world_size).chunk(context.rank());
  std::byte* const grad = context.stage(own.num_elems * element_bytes(call.dtype));
  const auto update = [&] {
    const std::size_t bytes = call.output_element_bytes();
    std::byte* const param = at(call.outputs[0], own.begin_elems, bytes);
    update_chunk(call, grad, param, own.num_elems, context.device());
  };
  update_in_parts(call, context.rank(), world_size, grad, update, [&](Collective part) {
    plan_device_collective(world_size, options, part);
    run_device_collective(context, part, options);
    return Traffic{};
  });
}

bool overlap(const Part& a, const Part& b) {
  const auto begin_a = reinterpret_cast<std::uintptr_t>(a.data);
  const auto begin_b = reinterpret_cast<std::uintptr_t>(b.data);
  return begin_a < begin_b + b.num_bytes && begin_b < begin_a + a.num_bytes;
}

// May be in place.
void all_to_all(DeviceMessageContext& context, const Collective& call) {
  const std::size_t bytes = element_bytes(call.dtype);
  Parts inputs, outputs;
  for (int peer = 0; peer < context.world_size(); ++peer) {
    inputs.push_back(part(call.inputs[peer], call.input_shard(peer) * bytes));
    outputs.push_back(part(call.outputs[peer], call.output_shard(peer) * bytes));
  }
  const bool is_in_place = std::ranges::any_of(inputs, [&](const Part& input) {
    return std::ranges::any_of(outputs, [&](const Part& output) { return overlap(input, output); });
  });
  if (is_in_place) {
    for (Part& input : inputs) {
      std::byte* copy = context.stage(input.num_bytes);
      context.copy(copy, input.data, input.num_bytes);
      input.data = copy;
    }
  }
  const auto own = static_cast<std::size_t>(context.rank());
  context.copy(outputs[own].data, inputs[own].data, inputs[own].num_bytes);
  inputs[own] = outputs[own] = {};
  context.wait(context.all_to_all(inputs, outputs));
}

// In a group of one every output is its input, or that updated.
void run_alone(DeviceMessageContext& context, const Collective& call) {
  if (call.op == OpKind::kReduceUpdateGather)
    update_chunk(call, call.inputs[0], call.outputs[0], call.num_elems, context.device());
  else if (call.op != OpKind::kBarrier)
    context.copy(call.outputs[0], call.inputs[0], call.input_shard(0) * element_bytes(call.dtype));
}

}  // namespace

void plan_device_collective(int world_size, const CommunicatorOptions& options, Collective& call) {
  if (call.dtype == DType::kSoftmaxStats)
    throw std::invalid_argument("softmax statistics are merged in one step on CPUs only");
  if (world_size > 1 && call.op != OpKind::kBroadcast)
    plan_message_collective(world_size, options, call);
  else
    call.algorithm = Algorithm::kDirect;
}

void run_device_collective(DeviceMessageContext& context, const Collective& call,
                           const CommunicatorOptions& options) {
  if (context.world_size() == 1) return run_alone(context, call);
  switch (call.op) {
    case OpKind::kBarrier: {
      std::byte* const bytes = context.stage(2 * static_cast<std::size_t>(context.world_size()));
      return context.wait(post_exchange(
          context, [&](int peer) { return part(bytes + peer, 1); },
          [&](int peer) { return part(bytes + context.world_size() + peer, 1); }));
    }
    case OpKind::kAllReduce:
      return all_reduce(context, call);
    case OpKind::kReduce:
      return reduce(context, call);
    case OpKind::kReduceScatter:
      return reduce_shards(context, call,
                           ShardTable::of_call(call, context.rank(), context.world_size()));
    case OpKind::kAllGather:
      return all_gather(context, call);
    case OpKind::kBroadcast: {
      const bool is_root = context.rank() == call.root;
      return context.wait(
          context.broadcast(is_root ? const_cast<void*>(call.inputs[0]) : call.outputs[0],
                            call.num_bytes(), call.root));
    }
    case OpKind::kGather:
    case OpKind::kScatter:
      return exchange_with_root(context, call);
    case OpKind::kAllToAll:
      return all_to_all(context, call);
    case OpKind::kReduceUpdateGather:
      return reduce_update_gather(context, call, options);
    default:
      throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
  }
}

}  // namespace ringcomm
