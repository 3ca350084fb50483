#include "cuda/messages/backend_calls.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/python_errors.h"
#include "collectives/fused_update.h"
#include "core/chunk_layout.h"
#include "core/errors.h"
#include "cuda/bindings/driver_device.h"
#include "cuda/collectives/kernels.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/messages/device_links.h"

namespace ringcomm {
namespace {

// By DType, for reductions; undefined where NCCL has none.
constexpr at::ScalarType kScalarTypes[] = {at::kByte,
                                           at::kBool,
                                           at::kByte,
                                           at::kChar,
                                           at::ScalarType::Undefined,
                                           at::kInt,
                                           at::kLong,
                                           at::ScalarType::Undefined,
                                           at::ScalarType::Undefined,
                                           at::ScalarType::Undefined,
                                           at::kHalf,
                                           at::kBFloat16,
                                           at::kFloat,
                                           at::kDouble};
static_assert(std::size(kScalarTypes) == static_cast<std::size_t>(DType::kSoftmaxStats));

at::ScalarType type_of(const Collective& call) {
  return kScalarTypes[static_cast<std::size_t>(call.dtype)];
}

c10d::ReduceOp op_of(const Collective& call) {
  constexpr c10d::ReduceOp::RedOpType kOps[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG,
                                                c10d::ReduceOp::PRODUCT, c10d::ReduceOp::MIN,
                                                c10d::ReduceOp::MAX};
  static_assert(std::size(kOps) == static_cast<std::size_t>(Reduction::kBitAnd));
  return kOps[static_cast<std::size_t>(call.reduction)];
}

template <class Options>
Options options_of(const Collective& call) {
  Options options;
  if constexpr (requires { options.reduceOp; }) options.reduceOp = op_of(call);
  if constexpr (requires { options.rootRank; }) options.rootRank = call.root;
  return options;
}

// Throws Error, NotImplementedError where the device has none.
const cuda::Kernels& update_kernels(c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(has_driver_for(device),
                              "ringcomm: there are no kernels of optimizers for ", device);
  return cuda::Kernels::of(device.index());
}

}  // namespace

BackendCalls::~BackendCalls() {
  // The backend ends before the memory that its calls may still use.
  without_gil([&] {
    try {
      if (backend_ != nullptr && !is_aborted_) backend_->shutdown();
    } catch (const std::exception&) {
      // It ends with its object, then.
    }
    backend_.reset();
  });
}

c10d::Backend& BackendCalls::backend() const {
  if (is_aborted_)
    throw Error({.kind = ErrorKind::kAborted, .rank = rank_},
                "ringcomm: the messages of this group's device tensors have been aborted");
  return *backend_;
}

void BackendCalls::abort() noexcept {
  if (backend_ == nullptr || is_aborted_.exchange(true)) return;
  try {
    backend_->abort();
  } catch (const std::exception&) {
    // Its calls end with their connections, then.
  }
}

// ---- memory and batches

at::Tensor BackendCalls::array(const void* data, std::size_t num_elems, at::ScalarType type) const {
  return at::for_blob(const_cast<void*>(data), {static_cast<std::int64_t>(num_elems)})
      .options(at::TensorOptions(type).device(device_))
      .target_device(device_)
      .make_tensor();
}

std::byte* BackendCalls::stage(std::size_t num_bytes) {
  staging_.push_back(at::empty({static_cast<std::int64_t>(num_bytes)},
                               at::TensorOptions(at::kByte).device(device_)));
  return static_cast<std::byte*>(staging_.back().data_ptr());
}

void BackendCalls::copy(void* to, const void* from, std::size_t num_bytes) const {
  if (num_bytes == 0 || to == from) return;
  bytes(to, num_bytes).copy_(bytes(from, num_bytes), /*non_blocking=*/true);
}

void BackendCalls::send(const void* data, std::size_t num_bytes, int peer, int tag) {
  if (num_bytes == 0) return;
  next_.push_back({true, bytes(data, num_bytes), peer, tag});
  sent_bytes_ += num_bytes;
}

void BackendCalls::recv(void* data, std::size_t num_bytes, int peer, int tag) {
  if (num_bytes > 0) next_.push_back({false, bytes(data, num_bytes), peer, tag});
}

std::vector<BackendCalls::Work> BackendCalls::post() {
  const std::vector<Message> messages = std::exchange(next_, {});
  if (messages.empty()) return {};
  c10d::Backend& used = backend();
  std::vector<Work> works;
  const bool is_coalesced = used.supportsCoalescing();
  if (is_coalesced) used.startCoalescing();
  try {
    for (const Message& message : messages) {
      std::vector<at::Tensor> tensors{message.data};
      works.push_back(message.is_send ? used.send(tensors, message.peer, message.tag)
                                      : used.recv(tensors, message.peer, message.tag));
    }
  } catch (...) {
    try {
      if (is_coalesced) used.endCoalescing();
    } catch (...) {  // of the same cause
    }
    throw;
  }
  if (is_coalesced) works = {used.endCoalescing()};  // of which the others are parts
  return works;
}

void BackendCalls::wait(const Work& work) {
  if (work == nullptr) return;
  work->wait();
  outcomes_.push_back([work] { return work->exception(); });
}

void BackendCalls::wait(std::vector<Work>&& works) {
  for (const Work& work : std::exchange(works, {})) wait(work);
}

void BackendCalls::exchange(const std::vector<cuda::P2pMessage>& messages) {
  const at::AutoDispatchBelowADInplaceOrView unseen;  // by autograd
  for (const cuda::P2pMessage& message : messages) {
    if (message.is_send)
      send(message.data, message.num_bytes, message.peer, message.tag);
    else
      recv(message.data, message.num_bytes, message.peer, message.tag);
  }
  wait(post());
  sent_bytes_ = 0;
}

// ---- collectives

void BackendCalls::connect() {
  const auto num_ranks = static_cast<std::size_t>(world_size_);
  std::byte* const place = stage(2 * num_ranks);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    inputs.push_back(place + peer);
    outputs.push_back(place + num_ranks + peer);
  }
  for (const OpKind op : {OpKind::kAllToAll, OpKind::kBroadcast, OpKind::kAllReduce})
    collective({{.num_elems = 1, .root = 0, .op = op}, inputs.data(), outputs.data()});
  staging_.clear();
}

void BackendCalls::plan(const CommunicatorOptions& options, Collective& call) const {
  if (call.dtype == DType::kSoftmaxStats)
    throw std::invalid_argument("softmax statistics are merged in one step on CPUs only");
  if (call.op == OpKind::kReduceUpdateGather) update_kernels(device_);  // or throws
  const Algorithm asked = call.algorithm == Algorithm::kAuto ? options.algorithm : call.algorithm;
  const bool is_ring =
      world_size_ > 1 && call.op == OpKind::kAllReduce && asked == Algorithm::kRing;
  call.algorithm = is_ring ? Algorithm::kRing : Algorithm::kDirect;
  if (world_size_ == 1 || !is_reduction(call.op)) return;
  const std::string name = backend_->getBackendName();
  if (call.reduction >= Reduction::kBitAnd || type_of(call) == at::ScalarType::Undefined)
    throw std::invalid_argument(std::string(name_of(call.reduction)) + " of " +
                                name_of(call.dtype) + " on " + device_.str() + ": " + name +
                                ", by which these ranks reach each other, does not have it; reduce "
                                "a copy on the CPU, or in another type");
  const bool rounds = call.dtype >= DType::kFloat16 && call.reduction <= Reduction::kProduct;
  if (options.is_rank_ordered && rounds)
    throw std::invalid_argument("deterministic=\"rank_order\" on " + device_.str() + ": " + name +
                                ", by which these ranks reach each other, adds in an order of its "
                                "own; reduce a copy on the CPU, or leave the option out");
}

std::uint64_t BackendCalls::run(const Collective& call) {
  const at::AutoDispatchBelowADInplaceOrView unseen;  // by autograd, as all of a collective
  sent_bytes_ = 0;
  if (world_size_ == 1)
    run_alone(call);
  else
    collective(call);
  staging_.clear();
  return sent_bytes_;
}

// In a group of one every output is its input, or that updated.
void BackendCalls::run_alone(const Collective& call) const {
  if (call.op == OpKind::kReduceUpdateGather)
    update(call, call.inputs[0], call.outputs[0], call.num_elems);
  else if (call.op != OpKind::kBarrier)
    copy(call.outputs[0], call.inputs[0], call.input_shard(0) * element_bytes(call.dtype));
}

void BackendCalls::collective(const Collective& call) {
  const std::size_t num_bytes = call.num_bytes();
  const auto others = static_cast<std::size_t>(world_size_ - 1);
  const bool is_root = rank_ == call.root;
  std::vector<at::Tensor> tensors;
  switch (call.op) {
    case OpKind::kBarrier:
      tensors = {bytes(stage(1), 1)};
      return wait(backend().allreduce(tensors));
    case OpKind::kAllReduce:
      if (call.num_elems == 0) return;
      if (call.algorithm == Algorithm::kRing) {
        const auto shards = ShardTable::of_call(call, rank_, world_size_);
        DeviceLinks links(*this, call, type_of(call), shards);
        Ring(links, {.has_reduce_scatter = true, .has_all_gather = true}).run();
        return;
      }
      copy(call.outputs[0], call.inputs[0], num_bytes);
      sent_bytes_ += 2 * others * num_bytes / static_cast<std::size_t>(world_size_);
      tensors = {array(call.outputs[0], call.num_elems, type_of(call))};
      return wait(backend().allreduce(tensors, options_of<c10d::AllreduceOptions>(call)));
    case OpKind::kReduce:
      if (call.num_elems == 0) return;
      if (is_root) copy(call.outputs[0], call.inputs[0], num_bytes);
      sent_bytes_ += is_root ? 0 : num_bytes;
      tensors = {array(is_root ? call.outputs[0] : call.inputs[0], call.num_elems, type_of(call))};
      return wait(backend().reduce(tensors, options_of<c10d::ReduceOptions>(call)));
    case OpKind::kBroadcast:
      if (call.num_elems == 0) return;
      sent_bytes_ += is_root ? others * num_bytes : 0;
      tensors = {bytes(is_root ? call.inputs[0] : call.outputs[0], num_bytes)};
      return wait(backend().broadcast(tensors, options_of<c10d::BroadcastOptions>(call)));
    case OpKind::kReduceScatter:
      return reduce_scatter(call);
    case OpKind::kAllGather:
      return all_gather(call);
    case OpKind::kGather:
    case OpKind::kScatter:
      return exchange_with_root(call);
    case OpKind::kAllToAll:
      return all_to_all(call);
    case OpKind::kReduceUpdateGather:
      return reduce_update_gather(call);
    default:
      throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
  }
}

// One tensor over shards of one size that follow each other; else an undefined one.
at::Tensor BackendCalls::joined(const std::vector<at::Tensor>& shards) const {
  const auto* const begin = static_cast<const std::byte*>(shards[0].const_data_ptr());
  const std::size_t num_bytes = shards[0].nbytes();
  for (std::size_t idx = 0; idx < shards.size(); ++idx)
    if (shards[idx].nbytes() != num_bytes ||
        shards[idx].const_data_ptr() != begin + idx * num_bytes)
      return {};
  return array(begin, shards.size() * static_cast<std::size_t>(shards[0].numel()),
               shards[0].scalar_type());
}

void BackendCalls::reduce_scatter(const Collective& call) {
  std::vector<std::vector<at::Tensor>> inputs(1);
  std::int64_t num_elems = 0;
  for (int peer = 0; peer < world_size_; ++peer) {
    inputs[0].push_back(array(call.inputs[peer], call.input_shard(peer), type_of(call)));
    num_elems += inputs[0].back().numel();
    if (peer != rank_) sent_bytes_ += inputs[0].back().nbytes();
  }
  if (num_elems == 0) return;
  std::vector<at::Tensor> outputs{array(call.outputs[0], call.input_shard(rank_), type_of(call))};
  const auto options = options_of<c10d::ReduceScatterOptions>(call);
  at::Tensor whole = joined(inputs[0]);
  wait(whole.defined() ? backend()._reduce_scatter_base(outputs[0], whole, options)
                       : backend().reduce_scatter(outputs, inputs, options));
}

void BackendCalls::all_gather(const Collective& call) {
  const std::size_t elem_bytes = element_bytes(call.dtype);
  std::vector<std::vector<at::Tensor>> outputs(1);
  std::int64_t num_bytes = 0;
  for (int peer = 0; peer < world_size_; ++peer) {
    outputs[0].push_back(bytes(call.outputs[peer], call.output_shard(peer) * elem_bytes));
    num_bytes += outputs[0].back().numel();
  }
  if (num_bytes == 0) return;
  std::vector<at::Tensor> inputs{bytes(call.inputs[0], call.output_shard(rank_) * elem_bytes)};
  sent_bytes_ += static_cast<std::size_t>(world_size_ - 1) * inputs[0].nbytes();
  at::Tensor whole = joined(outputs[0]);
  wait(whole.defined() ? backend()._allgather_base(whole, inputs[0])
                       : backend().allgather(outputs, inputs));
}

// May be in place.
void BackendCalls::all_to_all(const Collective& call) {
  const std::size_t elem_bytes = element_bytes(call.dtype);
  std::vector<at::Tensor> inputs, outputs;
  for (int peer = 0; peer < world_size_; ++peer) {
    inputs.push_back(bytes(call.inputs[peer], call.input_shard(peer) * elem_bytes));
    outputs.push_back(bytes(call.outputs[peer], call.output_shard(peer) * elem_bytes));
    if (peer != rank_) sent_bytes_ += inputs.back().nbytes();
  }
  const auto overlap = [](const at::Tensor& a, const at::Tensor& b) {
    const auto* const of_a = static_cast<const std::byte*>(a.const_data_ptr());
    const auto* const of_b = static_cast<const std::byte*>(b.const_data_ptr());
    return of_a < of_b + b.nbytes() && of_b < of_a + a.nbytes();
  };
  const bool is_in_place = std::ranges::any_of(inputs, [&](const at::Tensor& input) {
    return std::ranges::any_of(outputs,
                               [&](const at::Tensor& output) { return overlap(input, output); });
  });
  if (is_in_place) {
    for (at::Tensor& input : inputs) {
      const std::size_t num_bytes = input.nbytes();
      std::byte* const copied = stage(num_bytes);
      copy(copied, input.const_data_ptr(), num_bytes);
      input = bytes(copied, num_bytes);
    }
  }
  const auto own = static_cast<std::size_t>(rank_);
  copy(outputs[own].mutable_data_ptr(), inputs[own].const_data_ptr(), inputs[own].nbytes());
  inputs[own] = outputs[own] = bytes(nullptr, 0);
  wait(backend().alltoall(outputs, inputs));
}

// Gather and scatter: their shards may differ in size.
void BackendCalls::exchange_with_root(const Collective& call) {
  const std::size_t elem_bytes = element_bytes(call.dtype);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    if (const auto given = part_given(call, rank_, peer))
      send(given->data, given->num_elems * elem_bytes, peer);
    if (const auto taken = part_taken(call, rank_, peer))
      recv(taken->data, taken->num_elems * elem_bytes, peer);
  }
  wait(post());
  if (const auto own = part_taken(call, rank_, rank_))
    copy(own->data, part_given(call, rank_, rank_)->data, own->num_elems * elem_bytes);
}

void BackendCalls::reduce_update_gather(const Collective& call) {
  const ElemRange own = ChunkLayout(call.num_elems, world_size_).chunk(rank_);
  std::byte* const grad = stage(own.num_elems * element_bytes(call.dtype));
  std::byte* const param = at(call.outputs[0], own.begin_elems, call.output_element_bytes());
  update_in_parts(
      call, rank_, world_size_, grad, [&] { update(call, grad, param, own.num_elems); },
      [&](const Collective& part) {
        collective(part);
        return Traffic{};
      });
}

// The optimizer's step on a reduced gradient, by ringcomm's kernel.
void BackendCalls::update(const Collective& call, const void* grad, void* param,
                          std::size_t num_elems) const {
  if (num_elems == 0) return;
  const cuda::Kernels& kernels = update_kernels(device_);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  const cuda::ContextGuard guard(device_.index());
  cuda::KernelCall kernel_call;
  const cuda::LaunchPlan plan = cuda::plan_own_update(call, grad, param, num_elems, kernel_call);
  kernels.launch(kernels.find(plan.kernel), plan.num_blocks, kernel_call, handle_of(stream));
}

}  // namespace ringcomm
