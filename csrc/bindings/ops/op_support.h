#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <typeinfo>

#include "bindings/process_group.h"

namespace ringcomm {

/// What the operators of torch.ops.ringcomm have in common.

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

/// The same where it is ringcomm's own; null where it is another, or the group is of a class of its
/// own, which may do more in a call than hand it to its backend.
inline c10::intrusive_ptr<ProcessGroupRingcomm> find_ringcomm(c10d::ProcessGroup& group,
                                                              const at::Tensor& tensor) {
  if (typeid(group) != typeid(c10d::ProcessGroup)) return {};
  // Not torch's dynamic_intrusive_pointer_cast, which leaks what is of another class.
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
  TORCH_CHECK_VALUE(false, "ringcomm: ", op, " wants a group of backend ringcomm for ",
                    tensor.device(), ", this one has ",
                    other != nullptr ? other->getBackendName() : "none");
}

/// In-place forms have no gradient: what they overwrite may be needed by somebody's backward.
/// `instead` is the form that has one, or "".
inline void check_no_grad(const at::Tensor& tensor, const char* op, const char* instead) {
  TORCH_CHECK_VALUE(!(tensor.requires_grad() && at::GradMode::is_enabled()), "ringcomm: ", op,
                    " writes into its input, which requires grad; use ", instead,
                    *instead != '\0' ? ", or " : "", "torch.no_grad()");
}

/// What was overwritten has another version: a backward pass that saved the old one must not use
/// it.
inline void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace ringcomm
