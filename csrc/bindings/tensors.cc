#include "bindings/tensors.h"

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
#include <cmath>

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

// PREMUL_SUM is of what premultiplied() gives.
constexpr std::pair<c10d::ReduceOp::RedOpType, Reduction> kReductions[] = {
    {c10d::ReduceOp::SUM, Reduction::kSum},         {c10d::ReduceOp::AVG, Reduction::kAvg},
    {c10d::ReduceOp::PRODUCT, Reduction::kProduct}, {c10d::ReduceOp::MIN, Reduction::kMin},
    {c10d::ReduceOp::MAX, Reduction::kMax},         {c10d::ReduceOp::BAND, Reduction::kBitAnd},
    {c10d::ReduceOp::BOR, Reduction::kBitOr},       {c10d::ReduceOp::BXOR, Reduction::kBitXor},
    {c10d::ReduceOp::PREMUL_SUM, Reduction::kSum}};

Reduction reduction_of(const c10d::ReduceOp& op, const char* name) {
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

// The factor as a 64-bit number.
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

const at::Tensor& only_tensor(const Tensors& tensors, const char* op) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "ringcomm: ", op, " takes one tensor per rank, got ",
                    tensors.size());
  check_tensor(tensors[0], op);
  return tensors[0];
}

c10d::ReduceOp reduce_op_from(const std::string& name) {
  for (const auto& [theirs, ours] : kReductions)
    if (name == name_of(ours) && theirs != c10d::ReduceOp::PREMUL_SUM) return theirs;
  TORCH_CHECK_VALUE(false, "ringcomm: unknown reduction '", name,
                    "'; known are sum, avg, product, min, max, band, bor and bxor");
}

void TensorCall::link() {
  call.inputs = inputs.data();
  call.outputs = outputs.data();
  call.input_elems = input_elems.empty() ? nullptr : input_elems.data();
  call.output_elems = output_elems.empty() ? nullptr : output_elems.data();
}

void TensorCall::take_even_size() {
  const std::size_t size = input_elems.front();
  const auto differs = [&](std::size_t elems) { return elems != size; };
  call.num_elems = 0;
  if (std::ranges::any_of(input_elems, differs) || std::ranges::any_of(output_elems, differs))
    return;
  call.num_elems = size;
  input_elems.clear();
  output_elems.clear();
}

Collective moving(OpKind op, const at::Tensor& shard, int root) {
  // In torch's words: "Float8_e5m2".
  return {{.num_elems = shard.nbytes(),
           .root = root,
           .op = op,
           .element_name = element_name(c10::getDtypeNames(shard.scalar_type()).first)}};
}

Collective reducing(OpKind op, const at::Tensor& buffer, const c10d::ReduceOp& reduction,
                    const char* name, int root) {
  return {{.num_elems = num_elems_of(buffer),
           .root = root,
           .op = op,
           .dtype = reduced_dtype(buffer, name),
           .reduction = reduction_of(reduction, name)}};
}

at::Tensor writable(const at::Tensor& tensor, TensorCall& item, bool is_input_too) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    "ringcomm: an output of shape ", tensor.sizes(), " and strides ",
                    tensor.strides(),
                    " has several elements at one memory location (an expanded tensor?), so it "
                    "cannot hold their results; pass a clone()");
  item.kept.push_back(tensor);
  if (is_input_too) item.profiled.push_back(tensor);
  if (tensor.is_contiguous() && !tensor.is_conj()) return tensor;
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

at::Tensor plain(const at::Tensor& tensor) { return tensor.resolve_conj().contiguous(); }

void* readable(const at::Tensor& tensor, TensorCall& item) {
  item.profiled.push_back(tensor);
  item.kept.push_back(plain(tensor));
  return item.kept.back().data_ptr();
}

void add_inputs(const Tensors& tensors, TensorCall& item) {
  for (const at::Tensor& tensor : tensors) {
    item.inputs.push_back(readable(tensor, item));
    item.input_elems.push_back(tensor.nbytes() / element_bytes(item.call.dtype));
  }
}

void add_outputs(const Tensors& tensors, TensorCall& item) {
  check_outputs_disjoint(tensors);
  for (const at::Tensor& tensor : tensors) {
    item.outputs.push_back(writable(tensor, item).data_ptr());
    item.output_elems.push_back(tensor.nbytes() / element_bytes(item.call.dtype));
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
  // In 64 bits, because torch multiplies no unsigned ones of 16 bits and more. The conversion back
  // wraps like a product in the type itself.
  return at::mul(tensor.to(at::kLong), whole_factor(factor, type)).to(type);
}

const void* input_of(const at::Tensor& buffer, const c10d::ReduceOp& op, TensorCall& item) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return buffer.data_ptr();
  return readable(premultiplied(buffer, op), item);
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
