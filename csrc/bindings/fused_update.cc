// torch.ops.ringcomm.reduce_scatter_update_all_gather_: an optimizer's step between a
// reduce_scatter and an all_gather. Fakes and the wrapper are in ringcomm/ops/fused_update.py.

#include <c10/util/Exception.h>
#include <torch/library.h>

#include "bindings/process_group.h"
#include "collectives/call.h"
#include "core/chunk_layout.h"
#include "kernels/updates/torch_arguments.h"

namespace ringcomm {
namespace {

constexpr const char* kFusedUpdate = "reduce_scatter_update_all_gather_";

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
  TORCH_CHECK_VALUE(grad.sizes() == param.sizes(), "ringcomm: ", kFusedUpdate,
                    " needs a gradient of the parameters' shape, ", param.sizes(), ", got ",
                    grad.sizes());
  const ElemRange shard = ChunkLayout(num_elems_of(param), getSize()).chunk(getRank());
  const UpdateArrays arrays = checked_arrays(
      tensors, spec, static_cast<std::int64_t>(shard.num_elems),
      c10::str("this rank's shard, elements ", shard.begin_elems, " to ", shard.end_elems(), " (",
               shard.num_elems, "; see ringcomm.ops.shard_range)"),
      kFusedUpdate);
  TensorCall item;
  item.kept = {param, grad};
  item.kept.insert(item.kept.end(), states.begin(), states.end());
  if (master.has_value()) item.kept.push_back(*master);
  item.profiled = {grad};
  item.call = {{.num_elems = num_elems_of(param),
                .op = OpKind::kReduceUpdateGather,
                .dtype = float_dtype_of(grad),
                .reduction = is_average ? Reduction::kAvg : Reduction::kSum,
                .has_update = true,
                .update = spec}};
  item.call.master = arrays.master;
  item.call.states = arrays.states;
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
