#include "ops/update_arguments.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#include "bindings/tensors.h"
#include "kernels/stochastic_rounding.h"

namespace ringcomm {
namespace {

bool is_at_least_0(double value) { return std::isfinite(value) && value >= 0; }

void check_dense(const at::Tensor& tensor, const char* name, const char* op) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.device().is_cpu(), "ringcomm: ", op,
                    " needs ", name, " dense and on the CPU, like the weight, got a ",
                    tensor.layout(), " tensor on ", tensor.device());
}

WeightFormat format_of(const at::Tensor& weight, bool has_low, std::int64_t rounding_seed,
                       const char* op) {
  check_float(weight, "weight", op);
  const auto dtype = weight.scalar_type();
  TORCH_CHECK_VALUE(rounding_seed >= -1, "ringcomm: ", op,
                    ": rounding_seed must be 0 or more, or -1 for none, got ", rounding_seed);
  TORCH_CHECK_VALUE(rounding_seed < 0 || dtype == at::kBFloat16, "ringcomm: ", op,
                    " rounds stochastically to bfloat16 only, got a rounding_seed for a weight of ",
                    dtype);
  TORCH_CHECK_VALUE(!has_low || dtype == at::kBFloat16, "ringcomm: ", op,
                    " takes low for bfloat16 weights only, got it for ", dtype);
  TORCH_CHECK_VALUE(!has_low || rounding_seed < 0, "ringcomm: ", op,
                    " got both low and a rounding_seed; with low nothing is rounded off");
  if (has_low) return WeightFormat::kSplit;
  if (rounding_seed >= 0) return WeightFormat::kStochastic;
  switch (float_dtype_of(weight)) {
    case DType::kFloat32:
      return WeightFormat::kFloat32;
    case DType::kFloat16:
      return WeightFormat::kFloat16;
    default:
      return WeightFormat::kBFloat16;
  }
}

bool has_strides_of(const at::Tensor& tensor, const at::Tensor& other) {
  for (std::int64_t dim = 0; dim < other.dim(); ++dim)
    if (other.size(dim) > 1 && tensor.stride(dim) != other.stride(dim)) return false;
  return true;
}

// An upper bound of the end of a tensor's memory.
const char* end_of(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return static_cast<const char*>(tensor.const_data_ptr()) + (last + 1) * tensor.element_size();
}

}  // namespace

WeightStep weight_step_of(const UpdateOptions& options, const char* op) {
  const double clip = options.clip_value.value_or(std::numeric_limits<double>::infinity());
  TORCH_CHECK_VALUE(is_at_least_0(options.lr), "ringcomm: ", op,
                    ": lr must be finite and 0 or more, got ", options.lr);
  TORCH_CHECK_VALUE(is_at_least_0(options.weight_decay), "ringcomm: ", op,
                    ": weight_decay must be finite and 0 or more, got ", options.weight_decay);
  TORCH_CHECK_VALUE(std::isfinite(options.scale), "ringcomm: ", op, ": scale must be finite, got ",
                    options.scale);
  TORCH_CHECK_VALUE(clip > 0, "ringcomm: ", op, ": clip_value must be positive or None, got ",
                    clip);
  return {.scale = static_cast<float>(options.scale),
          .clip_value = static_cast<float>(clip),
          .lr_minus = static_cast<float>(-options.lr),
          .decay = static_cast<float>(1 - options.lr * options.weight_decay),
          .key = rounding_key(static_cast<std::uint64_t>(options.rounding_seed))};
}

void check_float(const at::Tensor& tensor, const char* name, const char* op) {
  check_dense(tensor, name, op);
  check_float_dtype(tensor, name, op);
}

void check_fp32(const at::Tensor& tensor, const char* name, const char* op) {
  check_dense(tensor, name, op);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, "ringcomm: ", op, " needs ", name,
                   " in float32, got ", tensor.scalar_type());
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

void check_grad(const at::Tensor& grad, const at::Tensor& weight, const char* op) {
  check_float(grad, "grad", op);
  check_shape(grad, weight.sizes(), "grad", op);
}

void check_first_elem(std::int64_t first_elem, const char* op) {
  TORCH_CHECK_VALUE(first_elem >= 0, "ringcomm: ", op, ": first_elem must be 0 or more, got ",
                    first_elem);
}

at::Tensor in_order_of(const at::Tensor& grad, const at::Tensor& weight) {
  if (has_strides_of(grad, weight)) return grad;
  return at::empty_strided(weight.sizes(), weight.strides(), grad.options()).copy_(grad.detach());
}

WeightArray::WeightArray(const at::Tensor& weight, const std::optional<at::Tensor>& low,
                         std::int64_t rounding_seed, bool is_matrix, const char* op)
    : weight_(weight),
      low_(low),
      format_(format_of(weight, low.has_value(), rounding_seed, op)),
      op_(op) {
  TORCH_CHECK_VALUE(is_matrix ? weight.dim() == 2 && weight.is_contiguous()
                              : weight.is_non_overlapping_and_dense(),
                    "ringcomm: ", op, " needs a ",
                    is_matrix ? "contiguous weight of two dimensions"
                              : "weight whose elements are contiguous in memory",
                    ", got shape ", weight.sizes(), " with strides ", weight.strides());
  if (!low.has_value()) return;
  check_dense(*low, "low", op);
  TORCH_CHECK_TYPE(low->scalar_type() == at::kShort, "ringcomm: ", op, " needs low in int16, got ",
                   low->scalar_type());
  check_shape(*low, weight.sizes(), "low", op);
  TORCH_CHECK_VALUE(has_strides_of(*low, weight), "ringcomm: ", op,
                    " needs low with the weight's strides, ", weight.strides(), ", got ",
                    low->strides());
}

const WeightOps& WeightArray::ops(DType grad_dtype) const {
  return *cpu::find_weight_ops(format_, grad_dtype);
}

WeightRun WeightArray::run(std::int64_t begin, std::int64_t num_elems) const {
  WeightRun run;
  run.weight = static_cast<char*>(weight_.data_ptr()) + begin * weight_.element_size();
  if (low_.has_value()) run.low = low_->data_ptr<std::int16_t>() + begin;
  run.first_elem = static_cast<std::uint64_t>(begin);
  run.num_elems = static_cast<std::size_t>(num_elems);
  return run;
}

void WeightArray::check_writable(std::initializer_list<at::Tensor> read) const {
  check_no_grad(weight_, op_, "");
  if (low_.has_value()) check_apart(weight_, *low_, op_);
  for (const at::Tensor& tensor : read) {
    check_apart(weight_, tensor, op_);
    if (low_.has_value()) check_apart(*low_, tensor, op_);
  }
}

void WeightArray::mark_written() const {
  ringcomm::mark_written(weight_);
  if (low_.has_value()) ringcomm::mark_written(*low_);
}

}  // namespace ringcomm
