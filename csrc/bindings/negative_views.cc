// Views with a negative bit, such as z.conj().imag: torch's dispatcher would hand a backend copies
// of them, and drop what a collective writes there. ringcomm gets the views; other backends get
// copies, as before.

#include <torch/library.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/process_group.h"

namespace ringcomm {
namespace {

bool is_ours(const c10::IValue& value) {
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  if (!value.isObject() || *value.type() != *c10::getCustomClassType<Group>()) return false;
  const auto group = value.toCustomClass<c10d::ProcessGroup>();
  if (!group->hasBackendForDeviceType(c10::DeviceType::CPU)) return false;
  const auto backend = group->getBackend(c10::DeviceType::CPU);
  return dynamic_cast<ProcessGroupRingcomm*>(backend.get()) != nullptr;
}

void pass_views(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  if (std::none_of(begin, stack->end(), is_ours))
    std::for_each(begin, stack->end(), [](c10::IValue& value) {
      if (value.isTensor() && value.toTensor().defined()) value = value.toTensor().resolve_neg();
      if (!value.isTensorList()) return;
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector())
        tensors.push_back(tensor.resolve_neg());
      value = std::move(tensors);
    });
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Negative);
  op.redispatchBoxed(keys & below, stack);
}

}  // namespace
}  // namespace ringcomm

TORCH_LIBRARY_IMPL(c10d, Negative, library) {
  for (const char* name :
       {"_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "allreduce_", "allreduce_coalesced_", "alltoall_",
        "alltoall_base_", "broadcast_", "gather_", "recv_", "recv_any_source_", "reduce_",
        "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "scatter_", "send"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&ringcomm::pass_views>());
}
