#include "kernels/torch_checks.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>

namespace ringcomm {

namespace {

// An upper bound of the end of a tensor's memory.
const char* end_of(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return static_cast<const char*>(tensor.const_data_ptr()) + (last + 1) * tensor.element_size();
}

struct RefuseGrad final : c10::OperatorKernel {
  explicit RefuseGrad(const std::string& instead) : hint("use " + instead + "torch.no_grad()") {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const {
    const auto& parameters = op.schema().arguments();
    const auto given = torch::jit::last(*stack, parameters.size());
    const bool has_group = op.schema().argumentIndexWithName("group_name").has_value();
    for (std::size_t i = 0; at::GradMode::is_enabled() && i < parameters.size(); ++i) {
      const c10::AliasInfo* const alias = parameters[i].alias_info();
      const bool is_asked = has_group || (alias != nullptr && alias->isWrite());
      TORCH_CHECK_VALUE(!(is_asked && given[i].isTensor() && given[i].toTensor().requires_grad()),
                        "ringcomm: ", op.schema().name().substr(sizeof("ringcomm::") - 1),
                        " has no gradient, and its ", parameters[i].name(), " requires grad; ",
                        hint);
    }
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }

  std::string hint;
};

}  // namespace

void check_tensor(const at::Tensor& tensor, const char* op) {
  TORCH_CHECK_VALUE(tensor.defined(), "ringcomm: ", op, " got an undefined tensor");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "ringcomm: ", op, " got a ", tensor.layout(),
                    " tensor; it needs a dense (strided) one");
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || at::isAccelerator(tensor.device().type()),
                    "ringcomm: ", op, " got a tensor on ", tensor.device(),
                    "; it supports CPUs and accelerators only");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor.is_neg(), "ringcomm: ", op,
      " got a view with a negative bit, such as z.conj().imag; pass its resolve_neg()");
  TORCH_CHECK(tensor.numel() == 0 || tensor.storage().nbytes() > 0, "ringcomm: ", op,
              " got a tensor whose memory was freed, such as a sharded weight between its uses");
}

void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* op) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "ringcomm: ", op, " got tensors of ",
                   a.scalar_type(), " and ", b.scalar_type(), "; they must have one dtype");
}

void check_float_dtype(const at::Tensor& tensor, const char* name, const char* op) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                   "ringcomm: ", op, " needs ", name, " in float32, float16 or bfloat16, got ",
                   dtype);
}

DType reduced_dtype(const at::Tensor& tensor, const char* op) {
  using enum DType;
  static constexpr std::pair<at::ScalarType, DType> kTypes[] = {
      {at::kFloat, kFloat32},  {at::kBFloat16, kBFloat16}, {at::kHalf, kFloat16},
      {at::kDouble, kFloat64}, {at::kLong, kInt64},        {at::kInt, kInt32},
      {at::kShort, kInt16},    {at::kChar, kInt8},         {at::kByte, kUint8},
      {at::kBool, kBool},      {at::kUInt16, kUint16},     {at::kUInt32, kUint32},
      {at::kUInt64, kUint64}};
  for (const auto& [theirs, ours] : kTypes)
    if (tensor.scalar_type() == theirs) return ours;
  TORCH_CHECK_TYPE(
      false, "ringcomm: ", op, " cannot reduce ", tensor.scalar_type(),
      "; it reduces bool, uint8 to uint64, int8 to int64, float16, bfloat16, float32, float64, "
      "complex64 and complex128");
}

torch::CppFunction refuse_grad(const std::string& instead) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<RefuseGrad>(instead));
}

void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void check_dense(const at::Tensor& tensor, const char* name, const char* op, at::Device device) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.device() == device, "ringcomm: ", op,
                    " needs ", name, " dense and on ", device, ", like the weight, got a ",
                    tensor.layout(), " tensor on ", tensor.device());
}

void check_float(const at::Tensor& tensor, const char* name, const char* op, at::Device device) {
  check_dense(tensor, name, op, device);
  check_float_dtype(tensor, name, op);
}

void check_dtype(const at::Tensor& tensor, at::ScalarType dtype, const char* name, const char* op,
                 at::Device device) {
  check_dense(tensor, name, op, device);
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, "ringcomm: ", op, " needs ", name, " of dtype ",
                   dtype, ", got ", tensor.scalar_type());
}

DType float_dtype_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat  ? DType::kFloat32
         : tensor.scalar_type() == at::kHalf ? DType::kFloat16
                                             : DType::kBFloat16;
}

void check_shape(const at::Tensor& tensor, at::IntArrayRef sizes, const char* name,
                 const char* op) {
  TORCH_CHECK_VALUE(tensor.sizes() == sizes, "ringcomm: ", op, " needs ", name, " of shape ", sizes,
                    ", got ", tensor.sizes());
}

void check_apart(const at::Tensor& written, const at::Tensor& other, const char* op) {
  if (written.numel() == 0 || other.numel() == 0) return;
  const auto* begin = static_cast<const char*>(written.const_data_ptr());
  const auto* other_begin = static_cast<const char*>(other.const_data_ptr());
  TORCH_CHECK_VALUE(
      end_of(written) <= other_begin || end_of(other) <= begin, "ringcomm: ", op,
      " got tensors that share memory; a tensor that is written must not overlap another");
}

}  // namespace ringcomm
