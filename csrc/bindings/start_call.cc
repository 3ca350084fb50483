// How every call begins: at once, or as a TensorCall that keeps the tensors. all_reduce shows both.
// And the blocks in which calls start together.

#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "collectives/call.h"

namespace ringcomm {
namespace {

// The engine reads and writes the tensor's memory; an empty or freed one takes the other way.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.is_conj() && !tensor.is_neg() && tensor.storage().nbytes() > 0;
}

// By torch or a trace, which get what start() knows of a call.
bool is_observed() { return torch_wants_works() || recorder::is_tracing(); }

TensorCall all_reduce_call(const at::Tensor& input, const at::Tensor& output,
                           const c10d::ReduceOp& op) {
  TensorCall item;
  const bool is_in_place = input.is_same(output);
  const at::Tensor buffer = as_real(writable(output, item, is_in_place), op);
  item.call = reducing(OpKind::kAllReduce, buffer, op, "all_reduce");
  item.inputs = {is_in_place ? input_of(buffer, op, item)
                             : readable(premultiplied(input, op), item)};
  item.outputs = {buffer.data_ptr()};
  return item;
}

}  // namespace

WorkPtr ProcessGroupRingcomm::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1) only_tensor(tensors, "all_reduce");  // throws
  return all_reduce(tensors[0], tensors[0], opts);
}

WorkPtr ProcessGroupRingcomm::all_reduce(const at::Tensor& input, const at::Tensor& output,
                                         const c10d::AllreduceOptions& opts,
                                         void (*adjust)(Collective& call)) {
  if (!opts.asyncOp && fits_at_once(input, output, &opts.reduceOp)) {
    Collective call = reducing(OpKind::kAllReduce, output, opts.reduceOp, "all_reduce");
    if (adjust != nullptr) adjust(call);
    return run_at_once(std::move(call), input, output, opts.timeout);
  }
  if (output.defined() && output.is_sparse()) {
    sparse_all_reduce(output, opts);
    return start({c10d::OpType::_ALLREDUCE_SPARSE, "ringcomm:sparse_all_reduce", opts},
                 std::vector<TensorCall>{}, {output});  // for profilers, and a complete work
  }
  check_tensor(input, "all_reduce");
  check_tensor(output, "all_reduce");
  TensorCall item = all_reduce_call(input, output, opts.reduceOp);
  if (adjust != nullptr) adjust(item.call);
  return start({c10d::OpType::ALLREDUCE, "ringcomm:all_reduce", opts}, std::move(item), {output});
}

WorkPtr ProcessGroupRingcomm::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<TensorCall> calls;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "all_reduce_coalesced");
    calls.push_back(all_reduce_call(tensor, tensor, opts.reduceOp));
  }
  return start({c10d::OpType::ALLREDUCE_COALESCED, "ringcomm:all_reduce", opts}, std::move(calls),
               tensors);
}

WorkPtr ProcessGroupRingcomm::barrier(const c10d::BarrierOptions& opts) {
  CallInfo info{c10d::OpType::BARRIER, "ringcomm:barrier", opts};
  info.device = opts.device.value_or(c10::Device(c10::kCPU));
  if (info.device->is_cpu() && !opts.asyncOp && !is_observed()) {
    with_python_errors([&] { communicator()->run({}, limits_of(opts.timeout)); });
    return {};
  }
  if (!info.device->is_cpu() && !info.device->has_index())
    info.device = c10::impl::VirtualGuardImpl(info.device->type()).getDevice();
  return start(info, TensorCall{}, {});
}

// ---- At once: the engine's call and its pointers are on the stack, and there is no work

bool ProcessGroupRingcomm::fits_at_once(const at::Tensor& input, const at::Tensor& output,
                                        const c10d::ReduceOp* op) const {
  if (!is_plain(input) || is_observed()) return false;
  if (!output.is_same(input) &&
      (!is_plain(output) || input.device() != output.device() || input.dtype() != output.dtype()))
    return false;
  if (op != nullptr && (input.is_complex() || op->op_ == c10d::ReduceOp::PREMUL_SUM)) return false;
  // In a coalesced block every call on a device has a work.
  return input.is_cpu() || (!input.is_meta() && !is_coalescing_);
}

WorkPtr ProcessGroupRingcomm::run_at_once(Collective&& call, const at::Tensor& input,
                                          const at::Tensor& output,
                                          std::chrono::milliseconds timeout) {
  void* const to = output.data_ptr();  // first: it may copy a storage that is copied on write
  const void* const from = input.const_data_ptr();
  PerRank<const void*> inputs;
  PerRank<void*> outputs;
  if (call.inputs == nullptr) {
    call.inputs = &from;
    call.outputs = &to;
  }
  if (call.op == OpKind::kReduceScatter) {
    add_parts(from, call.num_bytes(), getSize(), inputs);
    call.inputs = inputs.data();
  } else if (call.op == OpKind::kAllGather) {
    add_parts(to, call.num_bytes(), getSize(), outputs);
    call.outputs = outputs.data();
  }
  if (input.is_cpu())
    with_python_errors([&] { communicator()->run(std::move(call), limits_of(timeout)); });
  else
    devices()->run_at_once(input.device(), call, {input, output});
  return {};
}

// ---- As a TensorCall

WorkPtr ProcessGroupRingcomm::start(const CallInfo& info, TensorCall item, Tensors results) {
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(info, std::move(calls), std::move(results));
}

WorkPtr ProcessGroupRingcomm::start(const CallInfo& info, std::vector<TensorCall> calls,
                                    Tensors results) {
  const c10::Device device = info.device ? *info.device : device_of(calls, results, info.title);
  const recorder::Span traced([&] { return trace_event_of(info, calls, device); });
  const auto begin = [&] {
    if (!device.is_cpu())
      return add_if_coalescing(start_on_device(device, info, std::move(calls), std::move(results)));
    return add_if_coalescing(start_in_engine(communicator(), info, limits_of(info.timeout),
                                             std::move(calls), std::move(results)));
  };
  // An event costs as much as a small collective.
  return at::hasCallbacks() ? profiled(device, info, calls, results, begin) : begin();
}

WorkPtr ProcessGroupRingcomm::start_on_device(c10::Device device, CallInfo info,
                                              std::vector<TensorCall> calls, Tensors results) {
  info.timeout = effective(info.timeout);
  if (!c10d::isP2POp(info.op_type))
    return devices()->start(device, info, std::move(calls), std::move(results));
  TORCH_CHECK_NOT_IMPLEMENTED(info.peer >= 0, "ringcomm: a tensor on ", device,
                              " cannot be received from any source; name the rank");
  info.device = device;
  std::vector<DeviceMessage> messages;
  messages.push_back({.info = info, .item = std::move(calls.front())});
  {
    const std::lock_guard lock(mutex_);
    // A message in a coalesced block starts with the others.
    if (is_coalescing_) {
      TORCH_CHECK_VALUE(coalesced_messages_.empty() || coalesced_messages_[0].info.device == device,
                        "ringcomm: a batch of sends and receives got tensors on ", device,
                        " and on ", *coalesced_messages_[0].info.device,
                        "; all tensors of a batch must be on one device");
      coalesced_messages_.push_back(std::move(messages[0]));
      return nullptr;
    }
  }
  // A single one is ordered with the group's calls on the device.
  return devices()->exchange(info, std::move(messages), std::move(results));
}

// ---- Blocks of calls that start together

constexpr std::size_t kMaxFinishedWorks = 1024;  // of one coalesced block

bool ProcessGroupRingcomm::supportsCoalescing() const { return at::getAccelerator().has_value(); }

void ProcessGroupRingcomm::startCoalescing() {
  std::vector<WorkPtr> works;  // of a block that an exception left, as the next ones
  std::vector<DeviceMessage> messages;
  const std::lock_guard lock(mutex_);
  is_coalescing_ = true;
  works.swap(coalesced_works_);
  messages.swap(coalesced_messages_);
}

WorkPtr ProcessGroupRingcomm::endCoalescing() {
  std::vector<WorkPtr> works;
  std::vector<DeviceMessage> messages;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_VALUE(is_coalescing_, "ringcomm: endCoalescing() without startCoalescing()");
    is_coalescing_ = false;
    works.swap(coalesced_works_);
    messages.swap(coalesced_messages_);
  }
  if (!messages.empty()) {
    CallInfo info(c10d::OpType::COALESCED, "ringcomm:coalesced");
    info.is_async = true;
    works.push_back(devices()->exchange(info, std::move(messages), {}));
  }
  return coalesced_work(getRank(), std::move(works));
}

WorkPtr ProcessGroupRingcomm::add_if_coalescing(WorkPtr work) {
  if (!is_coalescing_ || work == nullptr) return work;
  std::vector<WorkPtr> finished;
  {
    const std::lock_guard lock(mutex_);
    coalesced_works_.push_back(work);
    // A block that an exception has left open must not keep all later works.
    if (coalesced_works_.size() > kMaxFinishedWorks) finished = coalesced_works_;
  }
  // Without the lock: a work that has ended may free a tensor, which takes the GIL.
  std::erase_if(finished, [&](const auto& other) {
    return !other->isCompleted() || !other->isSuccess() || other == work;
  });
  if (finished.empty()) return work;
  const std::lock_guard lock(mutex_);
  std::erase_if(coalesced_works_, [&](const auto& other) {
    return std::ranges::find(finished, other) != finished.end();
  });
  return work;
}

}  // namespace ringcomm
