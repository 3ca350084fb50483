#include "cuda/messages/operators.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <iterator>
#include <limits>

#include "cuda/bindings/driver_device.h"
#include "cuda/collectives/launch_plan.h"

namespace ringcomm {
namespace {

bool is_unsigned(DType dtype) {
  return dtype == DType::kUint16 || dtype == DType::kUint32 || dtype == DType::kUint64;
}

// The type in which torch computes with elements of ours, by DType: unsigned integers of 16 bits
// and more have the operators of the signed ones.
constexpr at::ScalarType kScalarTypes[] = {
    at::kByte,  at::kByte, at::kByte, at::kChar, at::kShort,    at::kInt,   at::kLong,
    at::kShort, at::kInt,  at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
static_assert(std::size(kScalarTypes) == static_cast<std::size_t>(DType::kSoftmaxStats));

at::Tensor& add_out(at::Tensor& to, const at::Tensor& a, const at::Tensor& b) {
  return at::add_out(to, a, b);
}

// By Reduction.
using Operator = at::Tensor& (*)(at::Tensor& to, const at::Tensor& a, const at::Tensor& b);
constexpr Operator kOperators[] = {add_out,
                                   add_out,
                                   at::mul_out,
                                   at::minimum_out,
                                   at::maximum_out,
                                   at::bitwise_and_out,
                                   at::bitwise_or_out,
                                   at::bitwise_xor_out};
static_assert(std::size(kOperators) == static_cast<std::size_t>(Reduction::kMerge));

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

at::Tensor DeviceReduceOp::readable(const at::Tensor& array) const {
  if (dtype_ == DType::kBool) return at::ne(array, 0);  // any byte but zero counts as true
  if (dtype_ == DType::kFloat16 || dtype_ == DType::kBFloat16) return array.to(at::kFloat);
  return needs_flip() ? at::bitwise_xor(array, sign_bit(dtype_)) : array;
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
  const auto array = [&](const void* data) {
    return device_array(data, num_elems, kScalarTypes[static_cast<std::size_t>(dtype_)], device_);
  };
  const Operator apply = kOperators[static_cast<std::size_t>(reduction_)];
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
  result.copy_(needs_flip() ? at::bitwise_xor(all, sign_bit(dtype_)) : all);
}

const cuda::Kernels& update_kernels(c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(has_driver_for(device),
                              "ringcomm: there are no kernels of optimizers for ", device);
  return cuda::Kernels::of(device.index());
}

void update_chunk(const Collective& call, const void* grad, void* param, std::size_t num_elems,
                  c10::Device device) {
  if (num_elems == 0) return;
  const cuda::Kernels& kernels = update_kernels(device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const cuda::ContextGuard guard(device.index());
  cuda::KernelCall kernel_call;
  const cuda::LaunchPlan plan = cuda::plan_own_update(call, grad, param, num_elems, kernel_call);
  kernels.launch(kernels.find(plan.kernel), plan, kernel_call, handle_of(stream));
}

}  // namespace ringcomm
