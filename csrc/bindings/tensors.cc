#include "bindings/tensors.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/util/Exception.h>

#include <utility>

namespace ringcomm {

void check_tensor(const at::Tensor& tensor, const char* op) {
  TORCH_CHECK_VALUE(tensor.defined(), "ringcomm: ", op, " got an undefined tensor");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "ringcomm: ", op, " got a ", tensor.layout(),
                    " tensor; it needs a dense (strided) one");
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || at::isAccelerator(tensor.device().type()),
                    "ringcomm: ", op, " got a tensor on ", tensor.device(),
                    "; it supports CPUs and accelerators only");
  TORCH_CHECK(tensor.numel() == 0 || tensor.storage().nbytes() > 0, "ringcomm: ", op,
              " got a tensor whose memory was freed, such as a sharded weight between its uses");
}

void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* op) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "ringcomm: ", op, " got tensors of ",
                   a.scalar_type(), " and ", b.scalar_type(), "; they must have one dtype");
}

DType reduced_dtype(const at::Tensor& tensor, const char* op) {
  static constexpr std::pair<at::ScalarType, DType> kTypes[] = {
      {at::kFloat, DType::kFloat32}, {at::kBFloat16, DType::kBFloat16},
      {at::kHalf, DType::kFloat16},  {at::kDouble, DType::kFloat64},
      {at::kLong, DType::kInt64},    {at::kInt, DType::kInt32},
      {at::kShort, DType::kInt16},   {at::kChar, DType::kInt8},
      {at::kByte, DType::kUint8},    {at::kBool, DType::kBool},
      {at::kUInt16, DType::kUint16}, {at::kUInt32, DType::kUint32},
      {at::kUInt64, DType::kUint64}};
  for (const auto& [theirs, ours] : kTypes)
    if (tensor.scalar_type() == theirs) return ours;
  TORCH_CHECK_TYPE(
      false, "ringcomm: ", op, " cannot reduce ", tensor.scalar_type(),
      "; it reduces bool, uint8 to uint64, int8 to int64, float16, bfloat16, float32, float64, "
      "complex64 and complex128");
}

}  // namespace ringcomm
