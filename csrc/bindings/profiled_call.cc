#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <tuple>
#include <vector>

#include "bindings/process_group.h"
#include "collectives/op_kind.h"

// Since about torch 2.12 the event also has a field for asynchronous calls.
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define RINGCOMM_RECORD_COMMS(is_async, ...) \
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(__VA_ARGS__, is_async)
#else
#define RINGCOMM_RECORD_COMMS(is_async, ...) RECORD_PARAM_COMMS_DATA(__VA_ARGS__)
#endif

namespace ringcomm {

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
  const auto seq = static_cast<std::int64_t>(device.is_cpu() ? communicator()->next_seq()
                                                             : communicator()->next_device_seq());
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
