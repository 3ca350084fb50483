#include "bindings/premul_sum.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/item.h>
#include <ATen/ops/mul.h>
#include <c10/core/Scalar.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>

namespace ringcomm {
namespace {

at::Scalar factor_of(const c10d::ReduceOp& op) {
  // The name that torch 2.11 knows, and later ones still do.
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "ringcomm: ReduceOp.PREMUL_SUM has no factor");
  if (supplement->tensor_factor.defined()) return supplement->tensor_factor.item();
  return supplement->double_factor;
}

// The signed type of the same width: the products of wrapping integers have the same bits, and
// torch multiplies no others of 16 bits and more.
at::ScalarType signed_type(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return at::kChar;
    case at::kUInt16:
      return at::kShort;
    case at::kUInt32:
      return at::kInt;
    case at::kUInt64:
      return at::kLong;
    default:
      return type;
  }
}

// The factor as a 64-bit number, truncated to the type's width like its products.
at::Scalar whole_factor(const at::Scalar& factor, at::ScalarType type) {
  // Doubles from 2^63 on are no int64.
  const bool is_whole =
      !factor.isFloatingPoint() ||
      (std::trunc(factor.toDouble()) == factor.toDouble() && std::abs(factor.toDouble()) < 0x1p63);
  TORCH_CHECK_TYPE(is_whole, "ringcomm: ReduceOp.PREMUL_SUM of ", type,
                   " needs a whole number as its factor, got ", factor.toDouble());
  const auto value =
      factor.isFloatingPoint() ? static_cast<int64_t>(factor.toDouble()) : factor.to<int64_t>();
  switch (c10::elementSize(type)) {
    case 1:
      return static_cast<int8_t>(value);
    case 2:
      return static_cast<int16_t>(value);
    case 4:
      return static_cast<int32_t>(value);
    default:
      return value;
  }
}

}  // namespace

at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
  const at::Scalar factor = factor_of(op);
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_TYPE(!factor.isComplex(),
                   "ringcomm: ReduceOp.PREMUL_SUM needs a real factor, got a complex one");
  TORCH_CHECK_TYPE(type != at::kBool, "ringcomm: ReduceOp.PREMUL_SUM is not defined for Bool");
  const at::AutoDispatchBelowADInplaceOrView unseen;  // by autograd, as all of a collective
  if (!c10::isIntegralType(type, false)) return at::mul(tensor, factor);
  const at::ScalarType as_signed = signed_type(type);
  return at::mul(tensor.view(as_signed), whole_factor(factor, as_signed)).view(type);
}

}  // namespace ringcomm
