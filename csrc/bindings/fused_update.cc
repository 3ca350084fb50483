// torch.ops.ringcomm.reduce_scatter_update_all_gather_: an optimizer's step between a
// reduce_scatter and an all_gather. Fakes and the wrapper are in ringcomm/ops/fused_update.py.

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "bindings/process_group.h"
#include "collectives/call.h"
#include "core/chunk_layout.h"
#include "kernels/updates/torch_arguments.h"

namespace ringcomm {
namespace {

constexpr const char* kFusedUpdate = "reduce_scatter_update_all_gather_";

void check_array(const at::Tensor& tensor, const char* name) {
  check_tensor(tensor, kFusedUpdate);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "ringcomm: ", kFusedUpdate, " needs ", name,
                    " contiguous, got shape ", tensor.sizes(), " with strides ", tensor.strides());
}

// The data of this rank's shard of a state.
float* shard_data(const at::Tensor& tensor, const char* name, const ElemRange& shard,
                  TensorCall& item) {
  check_array(tensor, name);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, "ringcomm: ", kFusedUpdate, " needs ", name,
                   " in float32, got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(num_elems_of(tensor) == shard.num_elems, "ringcomm: ", kFusedUpdate, " needs ",
                    name, " to be this rank's shard, elements ", shard.begin_elems, " to ",
                    shard.end_elems(), " (", shard.num_elems, "), got ", tensor.numel(),
                    "; see ringcomm.ops.shard_range");
  item.kept.push_back(tensor);
  return tensor.data_ptr<float>();
}

void reduce_scatter_update_all_gather_(const at::Tensor& param, const at::Tensor& grad,
                                       at::TensorList states,
                                       const std::optional<at::Tensor>& master,
                                       const std::string& group_name, const std::string& optimizer,
                                       at::ArrayRef<double> numbers, bool nesterov, int64_t step,
                                       bool average, double grad_scale) {
  const UpdateTensors tensors = {param, grad, states, master};
  ringcomm_group_of(group_name, param, kFusedUpdate)
      ->reduce_update_gather(
          tensors, update_spec_of(tensors, optimizer, numbers, nesterov, step, grad_scale),
          average);
  tensors.mark_written();
}

}  // namespace

void ProcessGroupRingcomm::reduce_update_gather(const UpdateTensors& tensors, UpdateSpec spec,
                                                bool is_average) {
  const auto& [param, grad, states, master] = tensors;
  for (const auto& [tensor, name] : {std::pair(param, "the parameters"), {grad, "the gradient"}}) {
    check_array(tensor, name);
    check_float_dtype(tensor, name, kFusedUpdate);
  }
  TORCH_CHECK_VALUE(grad.sizes() == param.sizes(), "ringcomm: ", kFusedUpdate,
                    " needs a gradient of the parameters' shape, ", param.sizes(), ", got ",
                    grad.sizes());
  spec.param_dtype = reduced_dtype(param, kFusedUpdate);

  TensorCall item;
  item.kept = {param, grad};
  item.profiled = {grad};
  const ElemRange shard = ChunkLayout(num_elems_of(param), getSize()).chunk(getRank());
  item.call = {{.num_elems = num_elems_of(param),
                .op = OpKind::kReduceUpdateGather,
                .dtype = reduced_dtype(grad, kFusedUpdate),
                .reduction = is_average ? Reduction::kAvg : Reduction::kSum,
                .has_update = true,
                .update = spec}};
  if (spec.has_master) item.call.master = shard_data(*master, "master", shard, item);
  for (std::size_t i = 0; i < states.size(); ++i)
    item.call.states[i] = shard_data(states[i], state_name(spec, i), shard, item);
  for (auto one = item.kept.begin(); one != item.kept.end(); ++one)
    for (auto other = item.kept.begin(); other != one; ++other)
      TORCH_CHECK_VALUE(at::get_overlap_status(*one, *other) == at::MemOverlapStatus::No,
                        "ringcomm: ", kFusedUpdate,
                        " got tensors that share memory; parameters, gradient and state must "
                        "not overlap");

  item.inputs = {grad.data_ptr()};
  item.outputs = {param.data_ptr()};
  start({c10d::OpType::UNKNOWN, "ringcomm:reduce_scatter_update_all_gather"}, std::move(item),
        {param});
}

TORCH_LIBRARY_FRAGMENT(ringcomm, m) {
  m.def(
      "reduce_scatter_update_all_gather_(Tensor(a!) param, Tensor grad, Tensor(b!)[] states, "
      "Tensor(c!)? master, str group_name, *, str optimizer, float[] numbers, bool nesterov, "
      "int step, bool average, float grad_scale) -> ()");
  // The group's backend checks which tensors it can update.
  for (const auto key :
       {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::PrivateUse1})
    m.impl(kFusedUpdate, key, reduce_scatter_update_all_gather_);
}

}  // namespace ringcomm
