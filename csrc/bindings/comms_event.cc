#include "bindings/comms_event.h"

#include <ATen/record_function.h>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <utility>

// Since about torch 2.12 the event also has a field for asynchronous calls.
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define RINGCOMM_RECORD_COMMS(is_async, ...) \
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(__VA_ARGS__, is_async)
#else
#define RINGCOMM_RECORD_COMMS(is_async, ...) RECORD_PARAM_COMMS_DATA(__VA_ARGS__)
#endif

namespace ringcomm {
namespace {

// Bytes of the shares that a call reads or writes; `elems` is empty where all have num_elems.
std::int64_t bytes_of(const TensorCall& item, std::size_t num_shares,
                      const std::vector<std::size_t>& elems) {
  std::size_t sum = elems.empty() ? num_shares * item.call.num_elems : 0;
  for (const std::size_t share : elems) sum += share;
  return static_cast<std::int64_t>(sum * element_bytes(item.call.dtype));
}

std::vector<std::int64_t> splits_of(const TensorCall& item, const std::vector<std::size_t>& elems) {
  std::vector<std::int64_t> splits;
  for (const std::size_t share : elems)
    splits.push_back(static_cast<std::int64_t>(share * element_bytes(item.call.dtype)));
  return splits;
}

std::vector<std::int64_t> in_elems(std::vector<std::int64_t> splits, std::int64_t element_bytes) {
  for (std::int64_t& split : splits) split /= element_bytes;
  return splits;
}

}  // namespace

bool is_profiled() { return at::hasCallbacks(); }

void CommsEvent::describe(const std::vector<TensorCall>& calls,
                          const std::vector<at::Tensor>& results) {
  for (const TensorCall& item : calls) {
    input_bytes += bytes_of(item, item.inputs.size(), item.input_elems);
    output_bytes += bytes_of(item, item.outputs.size(), item.output_elems);
    input_splits = splits_of(item, item.input_elems);
    output_splits = splits_of(item, item.output_elems);
    inputs.insert(inputs.end(), item.profiled.begin(), item.profiled.end());
  }
  outputs = results;
}

c10::intrusive_ptr<c10d::Work> CommsEvent::around(
    c10::function_ref<c10::intrusive_ptr<c10d::Work>()> body) {
  const at::Tensor* sample = !outputs.empty()  ? &outputs.front()
                             : !inputs.empty() ? &inputs.front()
                                               : nullptr;
  const at::ScalarType dtype = sample != nullptr ? sample->scalar_type() : at::kByte;
  const auto element_bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  // Evenly spaced ranks are given by the first rank and the distance; other ranks by neither.
  const bool has_ranks = global_ranks != nullptr && !global_ranks->empty();
  const int start = has_ranks ? static_cast<int>(global_ranks->front()) : 0;
  int stride = has_ranks && global_ranks->size() > 1
                   ? static_cast<int>((*global_ranks)[1] - global_ranks->front())
                   : 1;
  for (std::size_t i = 1; has_ranks && i < global_ranks->size(); ++i)
    if (static_cast<int>((*global_ranks)[i] - (*global_ranks)[i - 1]) != stride) stride = 0;
  RINGCOMM_RECORD_COMMS(is_async, std::make_tuple(seq, is_p2p), group, inputs, outputs, rank,
                        name.c_str(), input_bytes / element_bytes, output_bytes / element_bytes,
                        dtype, in_elems(input_splits, element_bytes),
                        in_elems(output_splits, element_bytes), start, stride, world_size);
  return body();
}

}  // namespace ringcomm
