#include "cuda/messages/operators.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "core/errors.h"
#include "cuda/bindings/driver_device.h"
#include "cuda/collectives/kernels.h"
#include "cuda/collectives/launch_plan.h"
#include "reduce/softmax_merge.h"
#include "reduce/update_op.h"

namespace ringcomm {
namespace {

bool is_unsigned(DType dtype) {
  return dtype == DType::kUint16 || dtype == DType::kUint32 || dtype == DType::kUint64;
}

// The type in which torch computes with elements of ours: unsigned integers of 16 bits and more
// have the operators of the signed ones.
at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat32:
    case DType::kSoftmaxStats:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kInt8:
      return at::kChar;
    default:
      break;
  }
  switch (element_bytes(dtype)) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

// The sign bit of the signed type, as a number of that type.
std::int64_t sign_bit(DType dtype) {
  return std::numeric_limits<std::int64_t>::min() >> (64 - 8 * element_bytes(dtype));
}

// Numbers of 64 bits without a sign, by a small one: the quotient of their upper 63 bits is half of
// that, or half of one less.
at::Tensor divided_unsigned(const at::Tensor& sum, std::int64_t divisor) {
  const at::Tensor half =
      at::bitwise_and(at::bitwise_right_shift(sum, 1), std::numeric_limits<std::int64_t>::max());
  at::Tensor quotient = at::div(half, divisor, "trunc").mul_(2);
  const at::Tensor rest = at::add(sum, at::mul(quotient, divisor), -1);
  return quotient.add_(at::ge(rest, divisor));
}

// The members of SoftmaxStats, as columns of a table of floats.
enum Column : int { kMax, kSum, kTarget, kWeighted, kEntropy, kArgmax };
static_assert(offsetof(SoftmaxStats, argmax) == kArgmax * sizeof(float));

// The terms that a part adds to the sums of both.
struct Terms {
  at::Tensor sum;
  at::Tensor entropy;
};

Terms terms_of(const at::Tensor& part, const at::Tensor& max) {
  const at::Tensor own_max = part.select(1, kMax);
  const at::Tensor own_sum = part.select(1, kSum);
  // Without a logit above -infinity the sum is 0, or NaN where a logit is.
  const at::Tensor distance = at::where(at::eq(own_max, -std::numeric_limits<double>::infinity()),
                                        0.0, at::sub(own_max, max));
  const at::Tensor factor = at::exp(distance);
  const at::Tensor entropy =
      at::add(part.select(1, kEntropy), at::mul(own_sum, distance)).mul_(factor);
  // A distance too large for the sum to count may be too large for a product, too.
  return {at::mul(own_sum, factor), at::where(at::ne(factor, 0), entropy, 0.0)};
}

// Merges SoftmaxStats, as rows of floats; reduce/softmax_merge.h has the rules. Either may be `to`.
void merge_stats(const at::Tensor& to, const at::Tensor& a, const at::Tensor& b) {
  const auto table = [](const at::Tensor& array) { return array.view({-1, kNumSoftmaxStats}); };
  const at::Tensor rows_a = table(a), rows_b = table(b), rows = table(to);
  const auto indices = [](const at::Tensor& rows_of) {
    return rows_of.view(at::kInt).select(1, kArgmax);
  };
  const at::Tensor max_a = rows_a.select(1, kMax), max_b = rows_b.select(1, kMax);
  const at::Tensor max = at::where(at::lt(max_a, max_b), max_b, max_a);
  const Terms of_a = terms_of(rows_a, max), of_b = terms_of(rows_b, max);
  const at::Tensor argmax =
      at::where(at::eq(max_a, max_b), at::minimum(indices(rows_a), indices(rows_b)),
                at::where(at::gt(max_a, max_b), indices(rows_a), indices(rows_b)));
  const at::Tensor target = at::add(rows_a.select(1, kTarget), rows_b.select(1, kTarget));
  const at::Tensor weighted = at::add(rows_a.select(1, kWeighted), rows_b.select(1, kWeighted));
  rows.select(1, kMax).copy_(max);
  rows.select(1, kSum).copy_(at::add(of_a.sum, of_b.sum));
  rows.select(1, kTarget).copy_(target);
  rows.select(1, kWeighted).copy_(weighted);
  rows.select(1, kEntropy).copy_(at::add(of_a.entropy, of_b.entropy));
  indices(rows).copy_(argmax);
}

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
  struct Found {
    const cuda::Kernels* kernels = nullptr;
  };
  if (!has_driver_for(device)) return nullptr;
  const auto find = [&] {
    auto found = std::make_unique<Found>();
    try {
      const cuda::RelaxedCapture relaxed;
      found->kernels = &cuda::Kernels::of(device.index());
    } catch (const Error&) {
      // Not tried again.
    }
    return found;
  };
  return cuda::per_device<Found>(device.index(), find).kernels;
}

}  // namespace

at::Tensor device_array(const void* data, std::size_t num_elems, at::ScalarType type,
                        c10::Device device) {
  return at::for_blob(const_cast<void*>(data), {static_cast<std::int64_t>(num_elems)})
      .options(at::TensorOptions(type).device(device))
      .target_device(device)
      .make_tensor();
}

bool DeviceReduceOp::needs_flip() const {
  return is_unsigned(dtype_) && (reduction_ == Reduction::kMin || reduction_ == Reduction::kMax);
}

at::Tensor DeviceReduceOp::flipped(const at::Tensor& array) const {
  return at::bitwise_xor(array, sign_bit(dtype_));
}

at::Tensor DeviceReduceOp::readable(const at::Tensor& array) const {
  if (dtype_ == DType::kBool) return at::ne(array, 0);  // any byte but zero counts as true
  if (dtype_ == DType::kFloat16 || dtype_ == DType::kBFloat16) return array.to(at::kFloat);
  return needs_flip() ? flipped(array) : array;
}

void DeviceReduceOp::apply(at::Tensor& to, const at::Tensor& a, const at::Tensor& b) const {
  switch (reduction_) {
    case Reduction::kProduct:
      at::mul_out(to, a, b);
      break;
    case Reduction::kMin:
      at::minimum_out(to, a, b);
      break;
    case Reduction::kMax:
      at::maximum_out(to, a, b);
      break;
    case Reduction::kBitAnd:
      at::bitwise_and_out(to, a, b);
      break;
    case Reduction::kBitOr:
      at::bitwise_or_out(to, a, b);
      break;
    case Reduction::kBitXor:
      at::bitwise_xor_out(to, a, b);
      break;
    case Reduction::kMerge:
      merge_stats(to, a, b);
      break;
    default:
      at::add_out(to, a, b);
  }
}

at::Tensor DeviceReduceOp::divided(const at::Tensor& sum, int divisor) const {
  if (sum.is_floating_point()) return at::div(sum, divisor);
  if (dtype_ == DType::kUint64) return divided_unsigned(sum, divisor);
  at::Tensor wide = sum.to(at::kLong);  // which also holds the divisor
  if (is_unsigned(dtype_)) wide.bitwise_and_(sign_bit(dtype_) * -2 - 1);
  return at::div(wide, divisor, "trunc");
}

void DeviceReduceOp::combine(void* to, const std::vector<const void*>& srcs, std::size_t num_elems,
                             int divisor) const {
  if (num_elems == 0) return;
  const std::size_t per_elem = dtype_ == DType::kSoftmaxStats ? kNumSoftmaxStats : 1;
  const auto array = [&](const void* data) {
    return device_array(data, num_elems * per_elem, scalar_type_of(dtype_), device_);
  };
  at::Tensor result = array(to);
  if (srcs.size() == 2 && divisor == 1 && dtype_ != DType::kBool && !needs_flip()) {
    // Torch's own operators compute with 16-bit floats in fp32, too.
    apply(result, array(srcs[0]), array(srcs[1]));
    return;
  }
  const at::Tensor first = readable(array(srcs[0]));
  at::Tensor all = first;
  for (std::size_t i = 1; i < srcs.size(); ++i) {
    at::Tensor into = all.is_same(first) ? at::empty_like(all) : all;
    apply(into, all, readable(array(srcs[i])));
    all = into;
  }
  if (divisor > 1) all = divided(all, divisor);
  result.copy_(needs_flip() ? flipped(all) : all);
}

void update_chunk(const Collective& call, const void* grad, void* param, std::size_t num_elems,
                  c10::Device device) {
  if (num_elems == 0) return;
  const cuda::Kernels* const kernels = find_kernels(device);
  if (kernels == nullptr) return update_by_operators(call, grad, param, num_elems, device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const cuda::ContextGuard guard(device.index());
  cuda::KernelCall kernel_call;
  const cuda::LaunchPlan plan = cuda::plan_own_update(call, grad, param, num_elems, kernel_call);
  kernels->launch(kernels->find(plan.kernel), plan.num_blocks, kernel_call, handle_of(stream));
}

}  // namespace ringcomm
