#include "bindings/tensors.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/item.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <optional>
#include <utility>

namespace ringcomm {
namespace {

// Outputs that share memory cannot all hold their results. Tensors with gaps between elements are
// not checked, because they may interleave without overlap (columns of a matrix).
void check_outputs_disjoint(const Tensors& tensors) {
  std::vector<std::pair<const char*, const char*>> ranges;
  for (const at::Tensor& tensor : tensors) {
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    if (tensor.nbytes() > 0 && tensor.is_non_overlapping_and_dense())
      ranges.emplace_back(begin, begin + tensor.nbytes());
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i)
    TORCH_CHECK_VALUE(ranges[i - 1].second <= ranges[i].first,
                      "ringcomm: two outputs share memory, so it cannot hold both results");
}

Reduction reduction_of(const c10d::ReduceOp& op, const char* name) {
  using Op = c10d::ReduceOp;
  // PREMUL_SUM is of what premultiplied() gives.
  static constexpr std::pair<Op::RedOpType, Reduction> kReductions[] = {
      {Op::SUM, Reduction::kSum},         {Op::AVG, Reduction::kAvg},
      {Op::PRODUCT, Reduction::kProduct}, {Op::MIN, Reduction::kMin},
      {Op::MAX, Reduction::kMax},         {Op::BAND, Reduction::kBitAnd},
      {Op::BOR, Reduction::kBitOr},       {Op::BXOR, Reduction::kBitXor},
      {Op::PREMUL_SUM, Reduction::kSum}};
  for (const auto& [theirs, ours] : kReductions)
    if (op.op_ == theirs) return ours;
  TORCH_CHECK_VALUE(false, "ringcomm: ", name, " got an unknown reduction, number ",
                    static_cast<int>(op.op_));
}

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
  static constexpr std::array kByLog2OfBytes = {at::kChar, at::kShort, at::kInt, at::kLong};
  return kByLog2OfBytes[static_cast<std::size_t>(std::countr_zero(c10::elementSize(type)))];
}

// The factor as a 64-bit number, which torch truncates to the type's width like its products.
int64_t whole_factor(const at::Scalar& factor, at::ScalarType type) {
  if (!factor.isFloatingPoint()) return factor.to<int64_t>();
  const double value = factor.toDouble();
  // Doubles from 2^63 on are no int64.
  TORCH_CHECK_TYPE(std::trunc(value) == value && std::abs(value) < 0x1p63,
                   "ringcomm: ReduceOp.PREMUL_SUM of ", type,
                   " needs a whole number as its factor, got ", value);
  return static_cast<int64_t>(value);
}

}  // namespace

// ---- Checks

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

void check_float_dtype(const at::Tensor& tensor, const char* name, const char* op) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                   "ringcomm: ", op, " needs ", name, " in float32, float16 or bfloat16, got ",
                   dtype);
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

const at::Tensor& only_tensor(const Tensors& tensors, const char* op) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "ringcomm: ", op, " takes one tensor per rank, got ",
                    tensors.size());
  check_tensor(tensors[0], op);
  return tensors[0];
}

// ---- TensorCall

void TensorCall::link() {
  call.inputs = inputs.data();
  call.outputs = outputs.data();
  call.input_elems = input_elems.empty() ? nullptr : input_elems.data();
  call.output_elems = output_elems.empty() ? nullptr : output_elems.data();
  call.update = update.get();
}

void TensorCall::take_even_size() {
  const std::size_t size = input_elems.front();
  const auto is_alike = [&](std::size_t elems) { return elems == size; };
  const bool is_even =
      std::ranges::all_of(input_elems, is_alike) && std::ranges::all_of(output_elems, is_alike);
  call.num_elems = is_even ? size : 0;
  if (!is_even) return;
  input_elems.clear();
  output_elems.clear();
}

Collective moving(OpKind op, const at::Tensor& share, int root) {
  // In torch's words: "Float8_e5m2".
  return {.op = op,
          .element_name = element_name(c10::getDtypeNames(share.scalar_type()).first),
          .root = root,
          .num_elems = share.nbytes()};
}

Collective reducing(OpKind op, const at::Tensor& buffer, const c10d::ReduceOp& reduction,
                    const char* name, int root) {
  return {.op = op,
          .dtype = reduced_dtype(buffer, name),
          .reduction = reduction_of(reduction, name),
          .root = root,
          .num_elems = num_elems_of(buffer)};
}

at::Tensor writable(const at::Tensor& tensor, TensorCall& item, bool is_input_too) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    "ringcomm: an output of shape ", tensor.sizes(), " and strides ",
                    tensor.strides(),
                    " has several elements at one memory location (an expanded tensor?), so it "
                    "cannot hold their results; pass a clone()");
  item.kept.push_back(tensor);
  if (is_input_too) item.profiled.push_back(tensor);
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) return tensor;
  const at::Tensor buffer =
      is_input_too ? plain(tensor) : at::empty_like(tensor, at::MemoryFormat::Contiguous);
  item.kept.push_back(buffer);
  item.finish = [previous = std::move(item.finish), tensor, buffer] {
    if (previous) previous();
    copy_back(tensor, buffer);
  };
  return buffer;
}

void copy_back(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView unseen;
  to.copy_(from);
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

void* readable(const at::Tensor& tensor, TensorCall& item) {
  item.profiled.push_back(tensor);
  item.kept.push_back(plain(tensor));
  return item.kept.back().data_ptr();
}

void add_inputs(const Tensors& tensors, std::size_t element_bytes, TensorCall& item) {
  for (const at::Tensor& tensor : tensors) {
    item.inputs.push_back(readable(tensor, item));
    item.input_elems.push_back(tensor.nbytes() / element_bytes);
  }
}

void add_outputs(const Tensors& tensors, std::size_t element_bytes, TensorCall& item) {
  check_outputs_disjoint(tensors);
  for (const at::Tensor& tensor : tensors) {
    item.outputs.push_back(writable(tensor, item).data_ptr());
    item.output_elems.push_back(tensor.nbytes() / element_bytes);
  }
}

at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!tensor.is_complex()) return tensor;
  TORCH_CHECK_VALUE(c10d::isComplexViewAsRealAllowed(op),
                    "ringcomm: complex tensors can be summed, averaged and premultiplied only");
  return at::view_as_real(tensor);
}

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

c10::Device device_of(const std::vector<TensorCall>& calls, const Tensors& results,
                      const char* title) {
  std::optional<c10::Device> device;
  const auto add = [&](const Tensors& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (!device) device = tensor.device();
      TORCH_CHECK_VALUE(tensor.device() == *device, title, " got tensors on ", *device, " and on ",
                        tensor.device(), "; all tensors of a call must be on one device");
    }
  };
  for (const TensorCall& item : calls) {
    add(item.kept);
    add(item.profiled);
  }
  add(results);
  return device.value_or(c10::Device(c10::kCPU));
}

ElementName element_name(std::string_view text) {
  ElementName name = {};
  text.copy(name.data(), name.size() - 1);  // the last place stays a zero
  return name;
}

}  // namespace ringcomm
