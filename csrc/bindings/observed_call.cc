// What traces and profilers get of a call.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <tuple>
#include <vector>

#include "bindings/process_group.h"
#include "collectives/call.h"
#include "kernels/common/types.h"

// Since about torch 2.12 the event also has a field for asynchronous calls.
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define RINGCOMM_RECORD_COMMS(is_async, ...) \
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(__VA_ARGS__, is_async)
#else
#define RINGCOMM_RECORD_COMMS(is_async, ...) RECORD_PARAM_COMMS_DATA(__VA_ARGS__)
#endif

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

}  // namespace

std::vector<std::string> call_titles() { return {std::begin(kTitles), std::end(kTitles)}; }

recorder::Event ProcessGroupRingcomm::trace_event_of(const CallInfo& info,
                                                     const std::vector<TensorCall>& calls,
                                                     c10::Device device) const {
  const std::shared_ptr<Communicator> engine = communicator();
  const bool is_message = c10d::isP2POp(info.op_type);
  recorder::Event event{.seq = is_message ? recorder::kNoSeq : engine->next_seq(!device.is_cpu()),
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
  const auto splits = [&](PerRank<std::size_t> TensorCall::* uneven) {
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
  const auto seq = static_cast<std::int64_t>(communicator()->next_seq(!device.is_cpu()));
  int start_rank = 0, stride = 0;
  c10d::getGlobalRankStartAndStride(options_->global_ranks_in_group, start_rank, stride);
  RINGCOMM_RECORD_COMMS(info.is_async, std::make_tuple(seq, c10d::isP2POp(info.op_type)),
                        std::make_tuple(getGroupUid(), getGroupDesc()), inputs, outputs, getRank(),
                        name.c_str(), num_elems(inputs), num_elems(outputs), dtype,
                        splits(&TensorCall::input_elems), splits(&TensorCall::output_elems),
                        start_rank, stride, getSize());
  return body();
}

}  // namespace ringcomm
