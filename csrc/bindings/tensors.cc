#include "bindings/tensors.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>

namespace ringcomm {

DType reduced_dtype(const at::Tensor& tensor, const char* op) {
  switch (tensor.scalar_type()) {
    case at::kBool:
      return DType::kBool;
    case at::kByte:
      return DType::kUint8;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kUInt16:
      return DType::kUint16;
    case at::kUInt32:
      return DType::kUint32;
    case at::kUInt64:
      return DType::kUint64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    default:
      break;
  }
  TORCH_CHECK_TYPE(
      false, "ringcomm: ", op, " cannot reduce ", tensor.scalar_type(),
      "; it reduces bool, uint8 to uint64, int8 to int64, float16, bfloat16, float32, float64, "
      "complex64 and complex128");
}

ElementName element_name_of(const at::Tensor& tensor) {
  return element_name(c10::getDtypeNames(tensor.scalar_type()).first);
}

ElementName element_name(std::string_view text) {
  ElementName name = {};
  // The last place stays a zero.
  std::copy_n(text.begin(), std::min(text.size(), name.size() - 1), name.begin());
  return name;
}

Reduction reduction_of(const c10d::ReduceOp& op, const char* name) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return Reduction::kSum;
    case c10d::ReduceOp::AVG:
      return Reduction::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::kProduct;
    case c10d::ReduceOp::MIN:
      return Reduction::kMin;
    case c10d::ReduceOp::MAX:
      return Reduction::kMax;
    case c10d::ReduceOp::BAND:
      return Reduction::kBitAnd;
    case c10d::ReduceOp::BOR:
      return Reduction::kBitOr;
    case c10d::ReduceOp::BXOR:
      return Reduction::kBitXor;
    case c10d::ReduceOp::PREMUL_SUM:
      return Reduction::kSum;  // of what premultiplied() gives
    default:
      break;
  }
  TORCH_CHECK_VALUE(false, "ringcomm: ", name, " got an unknown reduction, number ",
                    static_cast<int>(op.op_));
}

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

void check_float_dtype(const at::Tensor& tensor, const char* name, const char* op) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                   "ringcomm: ", op, " needs ", name, " in float32, float16 or bfloat16, got ",
                   dtype);
}

const at::Tensor& only_tensor(const std::vector<at::Tensor>& tensors, const char* op) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "ringcomm: ", op, " takes one tensor per rank, got ",
                    tensors.size());
  check_tensor(tensors[0], op);
  return tensors[0];
}

void check_shares(const std::vector<at::Tensor>& tensors, int world_size,
                  const at::Tensor& reference, const char* op) {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<std::size_t>(world_size), "ringcomm: ", op,
                    " needs one tensor for each of the ", world_size, " ranks, got ",
                    tensors.size());
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, op);
    check_same_dtype(tensor, reference, op);
  }
}

const std::vector<at::Tensor>* only_list(const std::vector<std::vector<at::Tensor>>& lists,
                                         bool has_list, const char* op) {
  TORCH_CHECK_VALUE(
      lists.size() == (has_list ? 1 : 0), "ringcomm: ", op, " needs ",
      has_list ? "one list of tensors, one for each rank" : "a list of tensors at its root only",
      ", got ", lists.size(), " lists");
  return has_list ? &lists[0] : nullptr;
}

void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* op) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "ringcomm: ", op, " got tensors of ",
                   a.scalar_type(), " and ", b.scalar_type(), "; they must have one dtype");
}

void copy_back(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView unseen;
  to.copy_(from);
}

}  // namespace ringcomm
