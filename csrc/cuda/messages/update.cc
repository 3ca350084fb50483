#include <ATen/ops/clamp.h>
#include <ATen/ops/sqrt.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>

#include "core/errors.h"
#include "cuda/bindings/driver_device.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/messages/algorithms.h"
#include "cuda/messages/reduce.h"
#include "reduce/update_op.h"

namespace ringcomm {
namespace {

// The operands of a step: fp32, except the parameters if they are the rounded form of a master.
struct Operands {
  at::Tensor weight;  // what is read and written: master, parameters, or a copy of 16-bit ones
  at::Tensor grad;    // scaled; a copy
  at::Tensor states[2];
};

void sgd_step(const UpdateScalars& s, Operands& of) {
  if (s.weight_decay != 0) of.grad.add_(of.weight, s.weight_decay);
  at::Tensor direction = of.grad;
  if (const at::Tensor& momentum = of.states[0]; momentum.defined()) {
    if (s.is_first)
      momentum.copy_(of.grad);
    else
      momentum.mul_(s.momentum).add_(of.grad, s.damped);
    direction = s.is_nesterov ? of.grad.add_(momentum, s.momentum) : momentum;
  }
  of.weight.add_(direction, s.lr_minus);
}

void adamw_step(const UpdateScalars& s, Operands& of) {
  const auto& [first, second] = of.states;
  of.weight.mul_(s.decay);
  first.lerp_(of.grad, s.lerp_weight);
  second.mul_(s.beta2).addcmul_(of.grad, of.grad, s.beta2_rest);
  const at::Tensor denominator = at::sqrt(second).div_(s.bias_sqrt).add_(s.eps);
  of.weight.addcdiv_(first, denominator, s.lr_minus);
}

void lomo_step(const UpdateScalars& s, Operands& of) {
  if (std::isfinite(s.clip_value)) of.grad.clamp_(-s.clip_value, s.clip_value);
  of.weight.mul_(s.decay).add_(of.grad, s.lr_minus);
}

// Updates with a sequence of torch operators, for devices without kernels of ringcomm.
void update_by_operators(const Collective& call, const void* grad, void* param,
                         std::size_t num_elems, c10::Device device) {
  const ShardUpdate& shard = *call.update;
  const UpdateScalars scalars = make_update_op(shard.spec, call.dtype).scalars;
  const auto fp32 = [&](float* data) {
    return data != nullptr ? device_array(data, num_elems, at::kFloat, device) : at::Tensor();
  };
  const at::Tensor params =
      device_array(param, num_elems, scalar_type_of(shard.spec.param_dtype), device);
  const at::Tensor grads = device_array(grad, num_elems, scalar_type_of(call.dtype), device);
  Operands of{.weight = shard.master != nullptr ? fp32(shard.master) : params.to(at::kFloat),
              .grad = grads.to(at::kFloat, /*non_blocking=*/true, /*copy=*/true),
              .states = {fp32(shard.states[0]), fp32(shard.states[1])}};
  if (scalars.grad_scale != 1) of.grad.mul_(scalars.grad_scale);
  switch (shard.spec.optimizer) {
    case Optimizer::kAdamW:
      adamw_step(scalars, of);
      break;
    case Optimizer::kLomo:
      lomo_step(scalars, of);
      break;
    default:
      sgd_step(scalars, of);
  }
  if (!of.weight.is_same(params)) params.copy_(of.weight);
}

// Null if there are none for the device.
const cuda::Kernels* find_kernels(c10::Device device) {
  if (!is_of_driver(device)) return nullptr;
  try {
    const cuda::RelaxedCapture relaxed;
    return &cuda::Kernels::of(device.index());
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace

void DeviceUpdate::run(const Collective& call, const void* grad, void* param,
                       std::size_t num_elems) {
  if (num_elems == 0) return;
  if (!kernels_) kernels_ = find_kernels(device_);
  const cuda::Kernels* const kernels = *kernels_;
  if (kernels == nullptr) return update_by_operators(call, grad, param, num_elems, device_);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  const cuda::ContextGuard guard(device_.index());
  cuda::KernelCall kernel_call;
  const cuda::LaunchPlan plan = cuda::plan_own_update(call, grad, param, num_elems, kernel_call);
  kernels->launch(kernels->find(plan.kernel), plan.num_blocks, kernel_call, handle_of(stream));
}

}  // namespace ringcomm
