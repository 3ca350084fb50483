// How a call starts: recorded, profiled, coalesced, on the CPU or another device; and messages,
// which need no more than that.

#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>

#include "bindings/process_group.h"
#include "bindings/work.h"

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

// The first of the ranks and their distance, which is 0 if they are not evenly spaced.
std::pair<int, int> start_and_stride(const std::vector<std::uint64_t>& ranks) {
  if (ranks.empty()) return {0, 1};
  const auto at = [&](std::size_t idx) { return static_cast<int>(ranks[idx]); };
  int stride = ranks.size() > 1 ? at(1) - at(0) : 1;
  for (std::size_t i = 1; i < ranks.size(); ++i)
    if (at(i) - at(i - 1) != stride) stride = 0;
  return {at(0), stride};
}

}  // namespace

WorkPtr ProcessGroupRingcomm::start(const CallInfo& info, TensorCall item, Tensors results) {
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(info, std::move(calls), std::move(results));
}

WorkPtr ProcessGroupRingcomm::start(const CallInfo& info, std::vector<TensorCall> calls,
                                    Tensors results) {
  const trace::Span traced([&] { return trace_event_of(info, calls); });
  const c10::Device device = info.device ? *info.device : device_of(calls, results, info.title);
  const auto run = [&] {
    const auto begin = c10d::isP2POp(info.op_type) ? &ProcessGroupRingcomm::start_message_on
                                                   : &ProcessGroupRingcomm::start_on;
    return coalesced((this->*begin)(device, info, std::move(calls), std::move(results)));
  };
  // An event costs as much as a small collective.
  return at::hasCallbacks() ? profiled(device, info, calls, results, run) : run();
}

WorkPtr ProcessGroupRingcomm::start_on(c10::Device device, const CallInfo& info,
                                       std::vector<TensorCall> calls, Tensors results) {
  const std::chrono::milliseconds timeout = effective(info.timeout);
  if (!device.is_cpu()) {
    DeviceCallInfo device_info{.op_type = info.op_type,
                               .title = info.title,
                               .results = std::move(results),
                               .is_async = info.is_async};
    if (info.op_type == c10d::OpType::BARRIER) device_info.barrier_timeout = timeout;
    return devices()->start(device, std::move(calls), std::move(device_info));
  }
  const std::shared_ptr<Communicator> engine = communicator();
  auto work = c10::make_intrusive<EngineWork>(engine, info.op_type, info.title, std::move(calls),
                                              std::move(results));
  if (info.is_async)
    work->submit(*engine, timeout);
  else
    work->run(*engine, timeout);
  return work;
}

trace::Event ProcessGroupRingcomm::trace_event_of(const CallInfo& info,
                                                  const std::vector<TensorCall>& calls) const {
  const std::shared_ptr<Communicator> engine = communicator();
  trace::Event event{.seq = engine->next_seq(),
                     .group = engine->trace_group(),
                     .kind = trace::Kind::kCall,
                     .name = trace::name_number(info.title)};
  for (const TensorCall& item : calls) event.num_bytes += item.call.num_bytes();
  if (c10d::isP2POp(info.op_type)) {
    event.seq = trace::kNoSeq;
    (info.op_type == c10d::OpType::SEND ? event.to : event.from) = info.peer;
  } else if (!calls.empty()) {
    event.dtype = trace::name_number(name_of(calls.front().call.dtype));
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
  // Elements of `dtype` in the shares that the calls read or write, and in each share of the last
  // call if they differ.
  std::int64_t num_read = 0, num_written = 0;
  std::vector<std::int64_t> read_splits, written_splits;
  const auto add = [&](const Collective& call, std::size_t num_shares,
                       const std::vector<std::size_t>& shares, std::int64_t& sum, auto& splits) {
    const auto in_dtype = [&](std::size_t elems) {
      return static_cast<std::int64_t>(elems * element_bytes(call.dtype) / c10::elementSize(dtype));
    };
    splits.clear();
    if (shares.empty()) sum += in_dtype(num_shares * call.num_elems);
    for (const std::size_t share : shares) sum += splits.emplace_back(in_dtype(share));
  };
  for (const TensorCall& item : calls) {
    add(item.call, item.inputs.size(), item.input_elems, num_read, read_splits);
    add(item.call, item.outputs.size(), item.output_elems, num_written, written_splits);
  }
  std::string name = std::strchr(info.title, ':') + 1;
  if (!calls.empty() && calls.front().call.op == OpKind::kAllReduce) {
    const Collective& call = calls.front().call;
    name += std::string("/") + name_of(device.is_cpu() ? communicator()->algorithm_of(call)
                                                       : devices()->algorithm_of(call, device));
  }
  const auto seq = static_cast<std::int64_t>(communicator()->next_seq());
  const auto [start_rank, stride] = start_and_stride(options_->global_ranks_in_group);
  RINGCOMM_RECORD_COMMS(info.is_async, std::make_tuple(seq, c10d::isP2POp(info.op_type)),
                        std::make_tuple(getGroupUid(), getGroupDesc()), inputs, outputs, getRank(),
                        name.c_str(), num_read, num_written, dtype, read_splits, written_splits,
                        start_rank, stride, getSize());
  return body();
}

// ---- Coalescing

bool ProcessGroupRingcomm::supportsCoalescing() const { return at::getAccelerator().has_value(); }

void ProcessGroupRingcomm::startCoalescing() {
  const std::lock_guard lock(mutex_);
  is_coalescing_ = true;
  coalesced_works_.clear();  // of a block that an exception left
  coalesced_messages_.clear();
}

WorkPtr ProcessGroupRingcomm::endCoalescing() {
  std::vector<WorkPtr> works;
  std::vector<DeviceMessageCall> messages;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_VALUE(is_coalescing_, "ringcomm: endCoalescing() without startCoalescing()");
    is_coalescing_ = false;
    works.swap(coalesced_works_);
    messages.swap(coalesced_messages_);
  }
  if (!messages.empty()) {
    const c10::Device device = messages.front().device;
    works.push_back(devices()->exchange(
        device, std::move(messages),
        {.op_type = c10d::OpType::COALESCED, .title = "ringcomm:coalesced", .results = {}}));
  }
  return c10::make_intrusive<CoalescedWork>(getRank(), std::move(works));
}

WorkPtr ProcessGroupRingcomm::coalesced(WorkPtr work) {
  const std::lock_guard lock(mutex_);
  if (!is_coalescing_ || work == nullptr) return work;
  // A block that an exception has left open must not keep all later works.
  if (coalesced_works_.size() >= kMaxFinishedWorks)
    std::erase_if(coalesced_works_,
                  [](const WorkPtr& other) { return other->isCompleted() && other->isSuccess(); });
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
  CallInfo info{op_type, title};
  info.is_async = true;
  info.peer = peer;
  info.tag = tag;
  TensorCall item{
      .call = {.op = is_send ? OpKind::kSend : OpKind::kRecv, .num_elems = tensor.nbytes()}};
  if (is_send)
    item.inputs = {readable(tensor, item)};
  else
    item.outputs = {writable(tensor, item).data_ptr()};
  item.profiled = {tensor};
  return start(info, std::move(item), {tensor});
}

WorkPtr ProcessGroupRingcomm::start_message_on(c10::Device device, const CallInfo& info,
                                               std::vector<TensorCall> calls, Tensors results) {
  TensorCall& item = calls.front();
  const bool is_send = item.call.op == OpKind::kSend;
  void* data = is_send ? const_cast<void*>(item.inputs[0]) : item.outputs[0];
  const std::size_t num_bytes = item.call.num_elems;
  if (device.is_cpu()) {
    const std::shared_ptr<Communicator> engine = communicator();
    auto work = c10::make_intrusive<EngineWork>(engine, info.op_type, info.title, std::move(calls),
                                                std::move(results));
    work->post(*engine, {.kind = is_send ? P2pOp::Kind::kSend : P2pOp::Kind::kRecv,
                         .peer = info.peer,
                         .tag = static_cast<std::uint32_t>(info.tag),
                         .data = static_cast<std::byte*>(data),
                         .num_bytes = num_bytes,
                         .timeout = effective(info.timeout)});
    return work;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(info.peer >= 0, "ringcomm: a tensor on ", device,
                              " cannot be received from any source; name the rank");
  std::vector<DeviceMessageCall> messages;
  messages.push_back({.device = device,
                      .message = {.is_send = is_send,
                                  .data = data,
                                  .num_bytes = num_bytes,
                                  .peer = info.peer,
                                  .tag = info.tag},
                      .item = std::move(item)});
  {
    const std::lock_guard lock(mutex_);
    // A call in a coalesced block starts with the others.
    if (is_coalescing_) {
      TORCH_CHECK_VALUE(coalesced_messages_.empty() || coalesced_messages_[0].device == device,
                        "ringcomm: a batch of sends and receives got tensors on ", device,
                        " and on ", coalesced_messages_[0].device,
                        "; all tensors of a batch must be on one device");
      coalesced_messages_.push_back(std::move(messages[0]));
      return nullptr;
    }
  }
  // A single call is ordered with the group's calls on the device.
  return devices()->exchange(
      device, std::move(messages),
      {.op_type = info.op_type, .title = info.title, .results = std::move(results)});
}

}  // namespace ringcomm
