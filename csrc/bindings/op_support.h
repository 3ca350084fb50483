#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <typeinfo>

#include "bindings/process_group.h"

namespace ringcomm {

/// Helpers of the operators of torch.ops.ringcomm.

inline c10::intrusive_ptr<c10d::ProcessGroup> group_of(const std::string& group_name) {
  return c10d::resolve_process_group(group_name);
}

/// A group's backend for the tensor's device; null where it has none.
inline c10::intrusive_ptr<c10d::Backend> backend_for(c10d::ProcessGroup& group,
                                                     const at::Tensor& tensor) {
  const auto type = tensor.device().type();
  const auto devices = group.getDeviceTypes();
  if (std::none_of(devices.begin(), devices.end(),
                   [&](const c10::Device& device) { return device.type() == type; }))
    return {};
  return group.getBackend(type);
}

/// The same if it is ringcomm's backend. Null if it is another one, or if the group is a subclass,
/// whose calls may do more than forward to the backend.
inline c10::intrusive_ptr<ProcessGroupRingcomm> find_ringcomm(c10d::ProcessGroup& group,
                                                              const at::Tensor& tensor) {
  if (typeid(group) != typeid(c10d::ProcessGroup)) return {};
  // Not torch's dynamic_intrusive_pointer_cast, which leaks objects of another class.
  auto* const ringcomm = dynamic_cast<ProcessGroupRingcomm*>(backend_for(group, tensor).get());
  if (ringcomm == nullptr) return {};
  return c10::intrusive_ptr<ProcessGroupRingcomm>::reclaim_copy(ringcomm);
}

/// The same for operators that c10d has no name for.
inline c10::intrusive_ptr<ProcessGroupRingcomm> ringcomm_group_of(const std::string& group_name,
                                                                  const at::Tensor& tensor,
                                                                  const char* op) {
  const auto group = group_of(group_name);
  const auto ringcomm = find_ringcomm(*group, tensor);
  if (ringcomm != nullptr) return ringcomm;
  const auto other = backend_for(*group, tensor);
  TORCH_CHECK_VALUE(false, "ringcomm: ", op, " needs a group with backend ringcomm for ",
                    tensor.device(), ", got one with ",
                    other != nullptr ? other->getBackendName() : "none");
}

/// In-place forms have no gradient, because another operator's backward may need the overwritten
/// values. `instead` is the form that has one, or "".
inline void check_no_grad(const at::Tensor& tensor, const char* op, const char* instead) {
  TORCH_CHECK_VALUE(!(tensor.requires_grad() && at::GradMode::is_enabled()), "ringcomm: ", op,
                    " writes into its input, which requires grad; use ", instead,
                    *instead != '\0' ? ", or " : "", "torch.no_grad()");
}

/// Increments the version of an overwritten tensor, so that a backward pass that saved the old one
/// fails.
inline void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace ringcomm
