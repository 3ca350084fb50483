#include "cuda/messages/reduce.h"

#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>

#include <cstdint>
#include <limits>
#include <stdexcept>

#include "reduce/softmax_merge.h"

namespace ringcomm {
namespace {

bool is_unsigned(DType dtype) {
  return dtype == DType::kUint16 || dtype == DType::kUint32 || dtype == DType::kUint64;
}

bool is_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

// The sign bit of the signed type, as a number of that type.
std::int64_t sign_bit(DType dtype) {
  switch (element_bytes(dtype)) {
    case 2:
      return std::numeric_limits<std::int16_t>::min();
    case 4:
      return std::numeric_limits<std::int32_t>::min();
    default:
      return std::numeric_limits<std::int64_t>::min();
  }
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

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kByte:
    case DType::kBool:
    case DType::kUint8:
      return at::kByte;
    case DType::kInt8:
      return at::kChar;
    case DType::kInt16:
    case DType::kUint16:
      return at::kShort;
    case DType::kInt32:
    case DType::kUint32:
      return at::kInt;
    case DType::kInt64:
    case DType::kUint64:
      return at::kLong;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat32:
    case DType::kSoftmaxStats:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
  }
  throw std::invalid_argument("unknown element type");
}

at::Tensor device_array(const void* data, std::size_t num_elems, at::ScalarType type,
                        c10::Device device) {
  return at::for_blob(const_cast<void*>(data), {static_cast<std::int64_t>(num_elems)})
      .options(at::TensorOptions(type).device(device))
      .target_device(device)
      .make_tensor();
}

void DeviceReduceOp::combine(void* to, const std::vector<const void*>& srcs, std::size_t num_elems,
                             int divisor) const {
  if (num_elems == 0) return;
  const std::size_t per_elem = dtype_ == DType::kSoftmaxStats ? kNumSoftmaxStats : 1;
  const auto array = [&](const void* data) {
    return device_array(data, num_elems * per_elem, scalar_type_of(dtype_), device_);
  };
  const at::Tensor result = array(to);
  Arrays arrays;
  for (const void* src : srcs) arrays.push_back(array(src));
  if (dtype_ == DType::kSoftmaxStats) {
    at::Tensor merged = arrays[0];
    for (std::size_t i = 1; i < arrays.size(); ++i) {
      at::Tensor both = at::empty_like(merged);
      merge_stats_arrays(both, merged, arrays[i]);
      merged = both;
    }
    result.copy_(merged);
  } else if (dtype_ == DType::kBool) {
    combine_truths(result, arrays);
  } else {
    combine_numbers(result, arrays, divisor);
  }
}

// Any byte but zero counts as true.
void DeviceReduceOp::combine_truths(const at::Tensor& to, const Arrays& srcs) const {
  at::Tensor all = at::ne(srcs[0], 0);
  for (std::size_t i = 1; i < srcs.size(); ++i) {
    const at::Tensor next = at::ne(srcs[i], 0);
    switch (reduction_) {
      case Reduction::kProduct:
      case Reduction::kMin:
      case Reduction::kBitAnd:
        all.bitwise_and_(next);
        break;
      case Reduction::kBitXor:
        all.bitwise_xor_(next);
        break;
      default:
        all.bitwise_or_(next);
    }
  }
  to.copy_(all);
}

bool DeviceReduceOp::needs_flip() const {
  return is_unsigned(dtype_) && (reduction_ == Reduction::kMin || reduction_ == Reduction::kMax);
}

at::Tensor DeviceReduceOp::flipped(const at::Tensor& array) const {
  return at::bitwise_xor(array, sign_bit(dtype_));
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
    default:
      at::add_out(to, a, b);
  }
}

at::Tensor DeviceReduceOp::divided(const at::Tensor& sum, int divisor) const {
  if (is_float(dtype_)) return at::div(sum, divisor);
  if (dtype_ == DType::kUint64) return divided_unsigned(sum, divisor);
  at::Tensor wide = sum.to(at::kLong);  // which also holds the divisor
  if (is_unsigned(dtype_)) wide.bitwise_and_(sign_bit(dtype_) * -2 - 1);
  return at::div(wide, divisor, "trunc");
}

void DeviceReduceOp::combine_numbers(const at::Tensor& to, const Arrays& srcs, int divisor) const {
  at::Tensor result = to;
  if (srcs.size() == 2 && divisor == 1 && !needs_flip()) {
    // Torch's own operators compute with 16-bit floats in fp32, too.
    apply(result, srcs[0], srcs[1]);
    return;
  }
  const auto readable = [&](const at::Tensor& src) {
    return is_short_float() ? src.to(at::kFloat) : needs_flip() ? flipped(src) : src;
  };
  at::Tensor all = readable(srcs[0]);
  for (std::size_t i = 1; i < srcs.size(); ++i) {
    at::Tensor into = all.is_same(srcs[0]) ? at::empty_like(all) : all;
    apply(into, all, readable(srcs[i]));
    all = into;
  }
  if (divisor > 1) all = divided(all, divisor);
  result.copy_(needs_flip() ? flipped(all) : all);
}

}  // namespace ringcomm
