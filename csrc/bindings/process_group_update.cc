// reduce_scatter_update_all_gather: checks of its tensors, and the engine's call.

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "bindings/process_group.h"
#include "bindings/tensors.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

constexpr const char* kFusedUpdate = "reduce_scatter_update_all_gather_";

void check_contiguous(const at::Tensor& tensor, const char* name) {
  check_tensor(tensor, kFusedUpdate);
  TORCH_CHECK_VALUE(tensor.is_contiguous() && !tensor.is_neg(), "ringcomm: ", kFusedUpdate,
                    " needs ", name, " contiguous, got shape ", tensor.sizes(), " with strides ",
                    tensor.strides());
}

void check_array(const at::Tensor& tensor, const char* name) {
  check_contiguous(tensor, name);
  check_float_dtype(tensor, name, kFusedUpdate);
}

// The data of this rank's shard of a state.
float* shard_data(const at::Tensor& tensor, const char* name, const ElemRange& shard,
                  TensorCall& item) {
  check_contiguous(tensor, name);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, "ringcomm: ", kFusedUpdate, " needs ", name,
                   " in float32, got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(num_elems_of(tensor) == shard.num_elems, "ringcomm: ", kFusedUpdate, " needs ",
                    name, " to be this rank's shard, elements ", shard.begin_elems, " to ",
                    shard.end_elems(), " (", shard.num_elems, "), got ", tensor.numel(),
                    "; see ringcomm.ops.shard_range");
  item.kept.push_back(tensor);
  return tensor.data_ptr<float>();
}

void check_disjoint(const std::vector<at::Tensor>& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      TORCH_CHECK_VALUE(at::get_overlap_status(tensors[i], tensors[j]) == at::MemOverlapStatus::No,
                        "ringcomm: ", kFusedUpdate,
                        " got tensors that share memory; parameters, gradient and state must "
                        "not overlap");
}

}  // namespace

void ProcessGroupRingcomm::reduce_update_gather(const UpdateTensors& tensors, UpdateSpec spec,
                                                bool is_average) {
  check_array(tensors.param, "the parameters");
  check_array(tensors.grad, "the gradient");
  TORCH_CHECK_VALUE(tensors.grad.sizes() == tensors.param.sizes(), "ringcomm: ", kFusedUpdate,
                    " needs a gradient of the parameters' shape, ", tensors.param.sizes(), ", got ",
                    tensors.grad.sizes());
  spec.param_dtype = reduced_dtype(tensors.param, kFusedUpdate);
  spec.has_master = tensors.master.has_value();

  TensorCall item;
  item.kept = {tensors.param, tensors.grad};
  const ElemRange shard = ChunkLayout(num_elems_of(tensors.param), getSize()).chunk(getRank());
  auto update = std::make_shared<ShardUpdate>(ShardUpdate{.spec = spec});
  if (spec.has_master) update->master = shard_data(*tensors.master, "master", shard, item);
  for (std::size_t i = 0; i < tensors.states.size(); ++i) {
    const auto& [name, state] = tensors.states[i];
    const bool is_needed = i < static_cast<std::size_t>(num_states(spec));
    TORCH_CHECK_VALUE(state.has_value() == is_needed, "ringcomm: ", kFusedUpdate,
                      is_needed ? " needs " : " does not take ", name, " in ", describe(spec));
    if (is_needed) update->states[i] = shard_data(*state, name, shard, item);
  }
  check_disjoint(item.kept);

  item.update = std::move(update);
  item.call = {.op = OpKind::kReduceUpdateGather,
               .dtype = reduced_dtype(tensors.grad, kFusedUpdate),
               .reduction = is_average ? Reduction::kAvg : Reduction::kSum,
               .num_elems = num_elems_of(tensors.param)};
  item.inputs = {tensors.grad.data_ptr()};
  item.outputs = {tensors.param.data_ptr()};
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  start(c10d::OpType::UNKNOWN, "ringcomm:reduce_scatter_update_all_gather", std::move(calls),
        {tensors.param}, options_->timeout, false);
}

}  // namespace ringcomm
