// The two ways of a call: at once, and as a TensorCall that keeps the tensors.

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>
#include <vector>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "collectives/op_kind.h"
#include "kernels/common/types.h"

namespace ringcomm {
namespace {

constexpr const char* kTitles[] = {
    "ringcomm:barrier",
    "ringcomm:monitored_barrier",
    "ringcomm:all_reduce",
    "ringcomm:sparse_all_reduce",
    "ringcomm:reduce",
    "ringcomm:reduce_scatter",
    "ringcomm:_reduce_scatter_base",
    "ringcomm:reduce_scatter_tensor_coalesced",
    "ringcomm:reduce_scatter_update_all_gather",
    "ringcomm:all_gather",
    "ringcomm:_all_gather_base",
    "ringcomm:all_gather_into_tensor_coalesced",
    "ringcomm:broadcast",
    "ringcomm:gather",
    "ringcomm:scatter",
    "ringcomm:all_to_all",
    "ringcomm:coalesced",
    "ringcomm:send",
    "ringcomm:recv",
    "ringcomm:recvAnySource",
};

std::uint8_t title_number(const std::string& title) {
  return static_cast<std::uint8_t>(std::ranges::find(kTitles, title) - std::begin(kTitles));
}

// Of a call without tensors, and of a message.
constexpr DType kNoType{kNumDTypes};

// The engine reads and writes its memory; an empty or freed one takes the other way.
bool is_dense(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.is_conj() && !tensor.is_neg() && tensor.storage().nbytes() > 0;
}

// By a profiler or a trace, which get what start() knows of a call.
bool is_observed() { return at::hasCallbacks() || recorder::is_tracing(); }

}  // namespace

// ---- At once: the engine's call and its pointers are on the stack, and there is no work

bool ProcessGroupRingcomm::fits_at_once(const at::Tensor& input, const at::Tensor& output,
                                        const c10d::ReduceOp* op) const {
  if (!is_dense(input) || is_observed()) return false;
  if (!output.is_same(input) &&
      (!is_dense(output) || input.device() != output.device() || input.dtype() != output.dtype()))
    return false;
  if (op != nullptr && (input.is_complex() || op->op_ == c10d::ReduceOp::PREMUL_SUM)) return false;
  // In a coalesced block every call on a device has a work.
  return input.is_cpu() || (!input.is_meta() && !is_coalescing_);
}

WorkPtr ProcessGroupRingcomm::run_at_once(Collective call, const at::Tensor& input,
                                          const at::Tensor& output,
                                          std::chrono::milliseconds timeout) {
  void* const to = output.data_ptr();  // first: it may give a shared storage memory of its own
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
    run_on_cpu(call, timeout);
  else
    devices()->run_at_once(input.device(), call, {input, output});
  return {};
}

bool ProcessGroupRingcomm::barrier_at_once(const c10d::BarrierOptions& opts) {
  if (opts.asyncOp || is_observed() || (opts.device && !opts.device->is_cpu())) return false;
  run_on_cpu({}, opts.timeout);
  return true;
}

void ProcessGroupRingcomm::run_on_cpu(const Collective& call, std::chrono::milliseconds timeout) {
  const std::shared_ptr<Communicator> engine = communicator();
  const WaitLimits limits{.timeout = effective(timeout), .is_interrupted = is_interrupted};
  with_python_errors([&] { engine->run(call, limits); });
}

// ---- As a TensorCall

std::vector<std::string> call_titles() { return {std::begin(kTitles), std::end(kTitles)}; }

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
      return coalesced(start_on_device(device, info, std::move(calls), std::move(results)));
    return coalesced(start_in_engine(communicator(), info, effective(info.timeout),
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

recorder::Event ProcessGroupRingcomm::trace_event_of(const CallInfo& info,
                                                     const std::vector<TensorCall>& calls,
                                                     c10::Device device) const {
  const std::shared_ptr<Communicator> engine = communicator();
  const bool is_message = c10d::isP2POp(info.op_type);
  recorder::Event event{.seq = is_message        ? recorder::kNoSeq
                               : device.is_cpu() ? engine->next_seq()
                                                 : engine->next_device_seq(),
                        .group = engine->recorded_as(),
                        .peer = recorder::rank16(info.peer),
                        .kind = recorder::Kind::kCall,
                        .dtype = kNoType,
                        .title = title_number(info.title)};
  for (const TensorCall& item : calls) event.num_bytes += item.call.num_bytes();
  if (!calls.empty()) {
    event.op = calls.front().call.op;
    if (!is_message) event.dtype = calls.front().call.dtype;
  }
  return event;
}

}  // namespace ringcomm
