#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>
#include <vector>

#include "bindings/process_group.h"

namespace ringcomm {

WorkPtr ProcessGroupRingcomm::start(const CallInfo& info, TensorCall item, Tensors results) {
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(info, std::move(calls), std::move(results));
}

WorkPtr ProcessGroupRingcomm::start(const CallInfo& info, std::vector<TensorCall> calls,
                                    Tensors results) {
  const trace::Span traced([&] { return trace_event_of(info, calls); });
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

}  // namespace ringcomm
