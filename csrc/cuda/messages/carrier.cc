#include "cuda/messages/carrier.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "collectives/collective.h"
#include "collectives/messages/collectives.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// This rank's share is at the place from which all_gather sends it.
MessageShares gathered_shares(DeviceEngine& engine, const Collective& call) {
  MessageShares result{.shares = {}, .element_bytes = element_bytes(call.dtype)};
  for (int peer = 0; peer < engine.world_size(); ++peer) {
    auto* output = static_cast<std::byte*>(call.outputs[peer]);
    result.shares.push_back({output, output, call.output_share(peer)});
  }
  engine.copy(call.outputs[engine.rank()], call.inputs[0], result.num_bytes(engine.rank()));
  return result;
}

}  // namespace

MessageDeviceCarrier::MessageDeviceCarrier(c10::intrusive_ptr<c10d::Backend> backend,
                                           const DeviceCarrierGroup& group, c10::Device device)
    : communicator_(*group.communicator),
      options_(group.options.engine),
      name_(backend != nullptr ? "p2p over " + backend->getBackendName() : "none: a group of one"),
      engine_(std::move(backend), group.rank, group.world_size, device),
      update_(device) {
  const int world_size = group.world_size;
  if (world_size > 1) {
    watch_.emplace(communicator_, std::min(group.options.timeout, kLongestTimeout),
                   [this] { engine_.abort(); });
    watch_->note_call(nullptr, false);  // what follows waits for all
  }
  if (world_size == 1) return;
  // NCCL connects ranks at the first message of a pair and at the first collective of a kind, and
  // blocks the host until they have arrived. So this happens here, where all ranks arrive.
  const at::AutoDispatchBelowADInplaceOrView unseen;
  try {
    in_order([&] {
      const auto num_ranks = static_cast<std::size_t>(world_size);
      std::byte* bytes = engine_.stage(2 * num_ranks);
      DeviceEngine::Parts sent, received;
      for (std::size_t peer = 0; peer < num_ranks; ++peer) {
        sent.push_back({bytes + peer, 1});
        received.push_back({bytes + num_ranks + peer, 1});
      }
      engine_.wait(engine_.all_to_all(sent, received));
      engine_.wait(engine_.all_gather(bytes, 1, bytes + num_ranks));
      engine_.wait(engine_.broadcast(bytes, 1, 0));
    });
  } catch (...) {
    engine_.abort();
    throw;
  }
}

// An exception in a collective leaves messages incomplete and the ranks out of step, so the group
// ends: the failure is reported to the other ranks first, then the messages are aborted.
template <class Body>
std::uint64_t MessageDeviceCarrier::in_order(const Body& body) {
  const at::AutoDispatchBelowADInplaceOrView unseen;  // by autograd, as all of a collective
  try {
    body();
  } catch (...) {
    engine_.abandon();
    throw;
  }
  const std::uint64_t sent_bytes = engine_.sent_bytes();
  engine_.finish();
  return sent_bytes;
}

// A rank that fails reports it before it aborts its messages, because its streams may still send
// incomplete data that completes this rank's receives.
bool MessageDeviceCarrier::may_have_given_up() const noexcept {
  Membership* const members = communicator_.members();
  return engine_.is_aborted() || (members != nullptr && members->is_given_up(/*asks=*/false));
}

void MessageDeviceCarrier::plan(const Collective& call, CallHeader& header) const {
  header.algorithm = Algorithm::kDirect;
  if (engine_.world_size() > 1 && call.op != OpKind::kBroadcast)
    plan_message_collective(engine_.world_size(), call, options_, header);
}

Traffic MessageDeviceCarrier::enqueue(const Collective& call, const CallHeader& header,
                                      const DevicePlace& place) {
  if (watch_) watch_->note_call(&header, place.is_captured());
  const std::uint64_t sent_bytes = in_order([&] { run(call, header); });
  return {.sent_bytes = sent_bytes, .algorithm = header.algorithm};
}

void MessageDeviceCarrier::exchange(const std::vector<DeviceMessage>& messages,
                                    const DevicePlace& place) {
  if (watch_) watch_->note_call(nullptr, place.is_captured());
  in_order([&] {
    for (const DeviceMessage& message : messages) {
      if (message.is_send)
        engine_.send(message.data, message.num_bytes, message.peer, message.tag);
      else
        engine_.recv(message.data, message.num_bytes, message.peer, message.tag);
    }
    engine_.post_and_wait();
  });
}

void MessageDeviceCarrier::run(const Collective& call, const CallHeader& header) {
  if (engine_.world_size() == 1) return run_alone(call);
  switch (call.op) {
    case OpKind::kBarrier:
      return device_barrier(engine_);
    case OpKind::kAllReduce:
      return all_reduce(call, header);
    case OpKind::kReduce:
      return reduce(call);
    case OpKind::kReduceScatter:
      return reduce_scatter(call, header);
    case OpKind::kAllGather:
      return all_gather(call, header);
    case OpKind::kBroadcast:
      return device_broadcast(engine_, call);
    case OpKind::kGather:
      return device_gather(engine_, call);
    case OpKind::kScatter:
      return device_scatter(engine_, call);
    case OpKind::kAllToAll:
      return device_all_to_all(engine_, call);
    case OpKind::kReduceUpdateGather:
      return reduce_update_gather(call);
    default:
      throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
  }
}

void MessageDeviceCarrier::run_planned(Collective call) {
  call.algorithm = Algorithm::kAuto;
  CallHeader header{.op = call.op};
  plan(call, header);
  run(call, header);
}

void MessageDeviceCarrier::all_reduce(const Collective& call, const CallHeader& header) {
  if (header.algorithm == Algorithm::kOneShot) return device_one_shot_all_reduce(engine_, call);
  const MessageShares shares = MessageShares::of_buffer(call, engine_.world_size());
  const bool is_ring = header.algorithm == Algorithm::kRing;
  if (is_ring && !options_.is_rank_ordered)
    return device_ring(engine_, call, shares, {.has_reduce_scatter = true, .has_all_gather = true});
  device_reduce_scatter(engine_, call, shares);
  if (is_ring)
    device_ring(engine_, call, shares, {.has_reduce_scatter = false, .has_all_gather = true});
  else
    device_all_gather(engine_, shares);
}

void MessageDeviceCarrier::reduce_scatter(const Collective& call, const CallHeader& header) {
  const MessageShares shares =
      MessageShares::of_reduce_scatter(call, engine_.rank(), engine_.world_size());
  if (header.algorithm == Algorithm::kRing)
    device_ring(engine_, call, shares, {.has_reduce_scatter = true, .has_all_gather = false});
  else
    device_reduce_scatter(engine_, call, shares);
}

void MessageDeviceCarrier::all_gather(const Collective& call, const CallHeader& header) {
  const MessageShares shares = gathered_shares(engine_, call);
  if (header.algorithm == Algorithm::kRing)
    device_ring(engine_, call, shares, {.has_reduce_scatter = false, .has_all_gather = true});
  else
    device_all_gather(engine_, shares);
}

// This rank's chunk of the buffers of all ranks.
void MessageDeviceCarrier::reduce_own_chunk(const Collective& call, void* reduced) {
  const ChunkLayout layout(call.num_elems, engine_.world_size());
  std::vector<const void*> inputs;
  std::vector<std::size_t> num_elems;
  for (int peer = 0; peer < engine_.world_size(); ++peer) {
    const ElemRange chunk = layout.chunk(peer);
    inputs.push_back(at(call.inputs[0], chunk.begin_elems, element_bytes(call.dtype)));
    num_elems.push_back(chunk.num_elems);
  }
  run_planned({.op = OpKind::kReduceScatter,
               .dtype = call.dtype,
               .reduction = call.reduction,
               .num_elems = layout.chunk(engine_.rank()).num_elems,
               .inputs = inputs.data(),
               .outputs = &reduced,
               .input_elems = num_elems.data()});
}

// Fills a buffer with the chunks of all ranks: on every rank, or on the root of a gather.
void MessageDeviceCarrier::collect_chunks(Collective call, const void* own, void* buffer) {
  const ChunkLayout layout(call.num_elems, engine_.world_size());
  std::vector<void*> outputs;
  std::vector<std::size_t> num_elems;
  for (int peer = 0; peer < engine_.world_size(); ++peer) {
    const ElemRange chunk = layout.chunk(peer);
    outputs.push_back(at(buffer, chunk.begin_elems, element_bytes(call.dtype)));
    num_elems.push_back(chunk.num_elems);
  }
  call.num_elems = layout.chunk(engine_.rank()).num_elems;
  call.inputs = &own;
  call.outputs = outputs.data();
  call.output_elems = num_elems.data();
  run_planned(call);
}

// A reduce_scatter, and a gather of the chunks.
void MessageDeviceCarrier::reduce(const Collective& call) {
  const ElemRange own = ChunkLayout(call.num_elems, engine_.world_size()).chunk(engine_.rank());
  const std::size_t bytes = element_bytes(call.dtype);
  const bool is_root = engine_.rank() == call.root;
  void* const reduced =
      is_root ? at(call.outputs[0], own.begin_elems, bytes) : engine_.stage(own.num_elems * bytes);
  reduce_own_chunk(call, reduced);
  collect_chunks(
      {.op = OpKind::kGather, .dtype = call.dtype, .root = call.root, .num_elems = call.num_elems},
      reduced, call.outputs[0]);
}

// A reduce_scatter, the update, and an all_gather.
void MessageDeviceCarrier::reduce_update_gather(const Collective& call) {
  const ElemRange own = ChunkLayout(call.num_elems, engine_.world_size()).chunk(engine_.rank());
  const DType param_dtype = call.update->spec.param_dtype;
  void* const reduced = engine_.stage(own.num_elems * element_bytes(call.dtype));
  reduce_own_chunk(call, reduced);
  void* const params = at(call.outputs[0], own.begin_elems, element_bytes(param_dtype));
  update_.run(call, reduced, params, own.num_elems);
  collect_chunks({.op = OpKind::kAllGather, .dtype = param_dtype, .num_elems = call.num_elems},
                 params, call.outputs[0]);
}

// In a group of one every output is its input, or that updated.
void MessageDeviceCarrier::run_alone(const Collective& call) {
  if (call.op == OpKind::kBarrier) return;
  if (call.op == OpKind::kReduceUpdateGather)
    return update_.run(call, call.inputs[0], call.outputs[0], call.num_elems);
  engine_.copy(call.outputs[0], call.inputs[0], call.input_share(0) * element_bytes(call.dtype));
}

}  // namespace ringcomm
