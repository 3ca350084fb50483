// How a call starts: recorded, profiled, coalesced, on the CPU or another device; and what needs no
// more than that, sends and receives.

#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <tuple>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"

// Since about torch 2.12 the event also has a field for asynchronous calls.
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define RINGCOMM_RECORD_COMMS(is_async, ...) \
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(__VA_ARGS__, is_async)
#else
#define RINGCOMM_RECORD_COMMS(is_async, ...) RECORD_PARAM_COMMS_DATA(__VA_ARGS__)
#endif

namespace ringcomm {
namespace {

constexpr std::size_t kMaxFinishedWorks = 1024;  // of one coalesced block

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

}  // namespace

std::vector<std::string> call_titles() { return {std::begin(kTitles), std::end(kTitles)}; }

WorkPtr ProcessGroupRingcomm::start(const CallInfo& info, TensorCall item, Tensors results) {
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(info, std::move(calls), std::move(results));
}

WorkPtr ProcessGroupRingcomm::start(const CallInfo& info, std::vector<TensorCall> calls,
                                    Tensors results) {
  const recorder::Span traced([&] { return trace_event_of(info, calls); });
  const c10::Device device = info.device ? *info.device : device_of(calls, results, info.title);
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
                                                     const std::vector<TensorCall>& calls) const {
  const std::shared_ptr<Communicator> engine = communicator();
  const bool is_message = c10d::isP2POp(info.op_type);
  recorder::Event event{.seq = is_message ? recorder::kNoSeq : engine->next_seq(),
                        .group = engine->recorded_as(),
                        .peer = static_cast<std::int16_t>(info.peer),
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

// Runs `body` within the event record_param_comms of torch's own backends, with their fields. It
// has none for the algorithm, so that is part of the name: "all_reduce/two_shot".
WorkPtr ProcessGroupRingcomm::profiled(c10::Device device, const CallInfo& info,
                                       const std::vector<TensorCall>& calls, const Tensors& results,
                                       c10::function_ref<WorkPtr()> body) const {
  Tensors inputs;
  for (const TensorCall& item : calls)
    if (item.call.op != OpKind::kRecv)
      inputs.insert(inputs.end(), item.profiled.begin(), item.profiled.end());
  const Tensors outputs = info.op_type == c10d::OpType::SEND ? Tensors{} : results;
  const at::ScalarType dtype = !outputs.empty()  ? outputs.front().scalar_type()
                               : !inputs.empty() ? inputs.front().scalar_type()
                                                 : at::kByte;
  const auto num_elems = [](const Tensors& tensors) {
    std::int64_t sum = 0;
    for (const at::Tensor& tensor : tensors) sum += tensor.numel();
    return sum;
  };
  // The elements of each shard of the last call, if they differ.
  const auto splits = [&](std::vector<std::size_t> TensorCall::* uneven) {
    std::vector<std::int64_t> result;
    if (calls.empty()) return result;
    const std::size_t element = element_bytes(calls.back().call.dtype);
    for (const std::size_t elems : calls.back().*uneven)
      result.push_back(static_cast<std::int64_t>(elems * element / c10::elementSize(dtype)));
    return result;
  };
  std::string name = std::strchr(info.title, ':') + 1;
  if (!calls.empty() && calls.front().call.op == OpKind::kAllReduce) {
    const Collective& call = calls.front().call;
    name += std::string("/") + name_of(device.is_cpu() ? communicator()->algorithm_of(call)
                                                       : devices()->algorithm_of(call, device));
  }
  const auto seq = static_cast<std::int64_t>(communicator()->next_seq());
  int start_rank = 0, stride = 0;
  c10d::getGlobalRankStartAndStride(options_->global_ranks_in_group, start_rank, stride);
  RINGCOMM_RECORD_COMMS(info.is_async, std::make_tuple(seq, c10d::isP2POp(info.op_type)),
                        std::make_tuple(getGroupUid(), getGroupDesc()), inputs, outputs, getRank(),
                        name.c_str(), num_elems(inputs), num_elems(outputs), dtype,
                        splits(&TensorCall::input_elems), splits(&TensorCall::output_elems),
                        start_rank, stride, getSize());
  return body();
}

// ---- Coalescing

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

WorkPtr ProcessGroupRingcomm::coalesced(WorkPtr work) {
  std::vector<WorkPtr> finished;
  const std::lock_guard lock(mutex_);
  if (!is_coalescing_ || work == nullptr) return work;
  // A block that an exception has left open must not keep all later works.
  if (coalesced_works_.size() >= kMaxFinishedWorks)
    std::erase_if(coalesced_works_, [&](const WorkPtr& other) {
      if (!other->isCompleted() || !other->isSuccess()) return false;
      finished.push_back(other);
      return true;
    });
  coalesced_works_.push_back(work);
  return work;
}

// ---- Messages

WorkPtr ProcessGroupRingcomm::send(Tensors& tensors, int dstRank, int tag) {
  return start_message(c10d::OpType::SEND, "ringcomm:send", only_tensor(tensors, "send"),
                       checked_rank(dstRank, "the destination of send"), tag);
}

WorkPtr ProcessGroupRingcomm::recv(Tensors& tensors, int srcRank, int tag) {
  return start_message(c10d::OpType::RECV, "ringcomm:recv", only_tensor(tensors, "recv"),
                       checked_rank(srcRank, "the source of recv"), tag);
}

WorkPtr ProcessGroupRingcomm::recvAnysource(Tensors& tensors, int tag) {
  return start_message(c10d::OpType::RECVANYSOURCE, "ringcomm:recvAnySource",
                       only_tensor(tensors, "recv"), -1, tag);
}

WorkPtr ProcessGroupRingcomm::start_message(c10d::OpType op_type, const char* title,
                                            const at::Tensor& tensor, int peer, int tag) {
  const bool is_send = op_type == c10d::OpType::SEND;
  TORCH_CHECK_VALUE(peer != getRank(), "ringcomm: rank ", peer, " cannot ",
                    is_send ? "send to" : "receive from", " itself");
  TORCH_CHECK_VALUE(getSize() > 1, "ringcomm: a group of one rank has no peer to receive from");
  TORCH_CHECK_VALUE(tag >= 0, "ringcomm: the tag of a message must be 0 or more, got ", tag);
  CallInfo info{op_type, title};
  info.is_async = true;
  info.peer = peer;
  info.tag = tag;
  TensorCall item{
      .call = {.op = is_send ? OpKind::kSend : OpKind::kRecv, .num_elems = tensor.nbytes()}};
  if (is_send)
    item.inputs = {readable(tensor, item)};
  else
    // With what it has: a message may be shorter.
    item.outputs = {writable(tensor, item, /*is_input_too=*/true).data_ptr()};
  item.profiled = {tensor};
  return start(info, std::move(item), {tensor});
}

}  // namespace ringcomm
