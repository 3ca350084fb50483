// Operators of the emulated GPUs. All work is ordered by the device's current stream, without a
// host wait: the driver runs copies and fills, and the stream runs operators that
// enqueue_operator() can predict. All other operators wait for the stream, run at once, and the
// stream copies their results.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "emulator/torch/device.h"

namespace ringcomm::emulator {
namespace {

using at::Tensor;

/// The same memory as a CPU tensor, which the stream's thread may change also where the caller is
/// in inference mode. The caller must respect the stream's order.
Tensor seen_by_host(const Tensor& tensor) {
  const c10::InferenceMode guard(false);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

using torch::jit::Stack;

bool is_predictable(const c10::OperatorHandle& op) {
  for (const c10::Argument& result : op.schema().returns()) {
    const bool is_view = result.alias_info() != nullptr && !result.alias_info()->isWrite();
    if (is_view || result.type()->kind() != c10::TypeKind::TensorType) return false;
  }
  return !op.hasTag(at::Tag::nondeterministic_seeded) &&
         !op.hasTag(at::Tag::dynamic_output_shape) && !op.hasTag(at::Tag::data_dependent_output);
}

/// Numbers of Python, which are CPU tensors that nobody changes. Operators take them as they are.
bool is_number(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

/// The arguments with `change` applied to each tensor but numbers; nothing where there is a device
/// among them.
template <class Change>
std::optional<Stack> with_tensors(c10::ArrayRef<c10::IValue> arguments, Change change) {
  const auto changed = [&](const Tensor& tensor) {
    return tensor.defined() && !is_number(tensor) ? change(tensor) : tensor;
  };
  Stack stack;
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice()) return std::nullopt;
    if (argument.isTensor()) {
      stack.emplace_back(changed(argument.toTensor()));
    } else if (argument.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : argument.toTensorVector()) tensors.push_back(changed(tensor));
      stack.emplace_back(std::move(tensors));
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : argument.toOptionalTensorVector())
        tensors.push_back(tensor.has_value() ? std::optional(changed(*tensor)) : std::nullopt);
      stack.emplace_back(std::move(tensors));
    } else {
      stack.push_back(argument);
    }
  }
  return stack;
}

Tensor shape_of(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

/// Calls the operator on meta tensors; nothing if it fails or changes an argument's shape.
std::optional<Stack> predict(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  std::vector<std::pair<Tensor, Tensor>> shapes;
  std::optional<Stack> stack = with_tensors(arguments, [&](const Tensor& tensor) {
    return shapes.emplace_back(tensor, shape_of(tensor)).second;
  });
  if (!stack.has_value()) return std::nullopt;
  try {
    op.callBoxed(&*stack);
  } catch (const std::exception&) {
    return std::nullopt;  // the caller finds out why
  }
  for (const auto& [tensor, shape] : shapes)
    if (tensor.sizes() != shape.sizes() || tensor.strides() != shape.strides()) return std::nullopt;
  return stack;
}

/// The argument that the operator writes and returns as this result; null for a new tensor.
const c10::IValue* written_argument(const c10::FunctionSchema& schema, const c10::Argument& result,
                                    c10::ArrayRef<c10::IValue> arguments) {
  if (result.alias_info() == nullptr) return nullptr;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && *alias == *result.alias_info()) return &arguments[i];
  }
  return nullptr;
}

/// The results of the call: arguments that it writes, and new tensors that the stream fills.
/// Nothing if they are unknown.
std::optional<Stack> make_results(const c10::OperatorHandle& op,
                                  c10::ArrayRef<c10::IValue> arguments, c10::Device device) {
  Stack results;
  bool are_written = true;  // tensors of the right shape; those without elements may be to grow
  for (const c10::Argument& result : op.schema().returns()) {
    const c10::IValue* argument = written_argument(op.schema(), result, arguments);
    are_written &= argument != nullptr && argument->toTensor().numel() != 0;
    results.push_back(argument != nullptr ? *argument : c10::IValue());
  }
  if (are_written) return results;  // as most are: torch allocates, and calls the form with out=
  const std::optional<Stack> shapes = predict(op, arguments);
  if (!shapes.has_value()) return std::nullopt;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].isTensor()) continue;
    const Tensor& shape = (*shapes)[i].toTensor();
    results[i] = !shape.defined() ? shape
                                  : at::empty_strided(shape.sizes(), shape.strides(),
                                                      shape.options().device(device));
  }
  return results;
}

/// The arguments for the host. A tensor of out= is an empty one, which the operator may resize on
/// its way to the shape of its result.
Stack host_arguments(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  const c10::InferenceMode guard(false);
  Stack stack = *with_tensors(arguments, seen_by_host);
  for (std::size_t i = 0; i < stack.size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    // Not what an operator writes and does not return: it has its shape.
    const bool is_out = is_written && argument.kwarg_only() && !schema.returns().empty();
    if (is_out && stack[i].isTensor()) stack[i] = at::empty({0}, stack[i].toTensor().options());
  }
  return stack;
}

/// Runs on the stream. `results` is the memory of what was returned.
void calculate(const c10::OperatorHandle& op, Stack operands, const std::vector<Tensor>& results) {
  const at::NoGradGuard no_grad;
  try {
    op.callBoxed(&operands);
  } catch (const std::exception& error) {  // the caller has gone on
    std::fprintf(stderr, "emugpu: %s: %s\n", c10::toString(op.operator_name()).c_str(),
                 error.what());
    throw;
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) continue;
    const Tensor& calculated = operands[i].toTensor();
    TORCH_CHECK(calculated.sizes() == results[i].sizes(), op.operator_name(),
                " changes the shape of its result, which emugpu does not have");
    if (calculated.const_data_ptr() != results[i].const_data_ptr()) results[i].copy_(calculated);
  }
}

/// Enqueues the operator on the current stream, where torch's CPU kernels run it, and puts its
/// results on the stack at once.
///
/// Returns false, without effect, if the results cannot be predicted (their shapes depend on data,
/// they are random or not tensors), or there is no such call; the caller then waits for the stream.
bool enqueue_operator(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  std::optional<c10::Device> device;
  bool is_one = true;
  const std::optional<Stack> operands = with_tensors(arguments, [&](const Tensor& tensor) {
    is_one &= tensor.device().type() == kEmulatedGpu && tensor.layout() == at::kStrided &&
              device.value_or(tensor.device()) == tensor.device();
    device = tensor.device();
    return tensor;
  });
  if (!is_predictable(op) || !operands.has_value() || !device.has_value() || !is_one) return false;
  std::optional<Stack> results = make_results(op, arguments, *device);
  if (!results.has_value()) return false;

  std::vector<Tensor> memory;
  for (const c10::IValue& result : *results)
    memory.push_back(result.toTensor().defined() ? seen_by_host(result.toTensor()) : Tensor());
  launch(
      current_stream(device->index()),
      [op, operands = host_arguments(schema, arguments), memory] {
        calculate(op, operands, memory);
      },
      /*is_operator=*/true);
  torch::jit::drop(*stack, schema.arguments().size());
  for (c10::IValue& result : *results) stack->push_back(std::move(result));
  return true;
}

// ---- the operators

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Stream stream_of(const Tensor& tensor) { return current_stream(tensor.get_device()); }

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout>, std::optional<at::Device> device,
                           std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

void copy_on_devices(const Tensor& from, const Tensor& to) {
  const c10::Stream from_stream = stream_of(from);
  const c10::Stream to_stream = stream_of(to);
  // As with CUDA: on the source's stream, in the order of both.
  if (to_stream != from_stream) wait_for_stream(from_stream, to_stream);
  // Whether the elements of both have the same order in memory, without gaps.
  if (from.dtype() == to.dtype() && from.sizes() == to.sizes() && from.strides() == to.strides() &&
      from.is_non_overlapping_and_dense()) {
    copy_bytes(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), from_stream);
  } else {
    launch(from_stream, [from = seen_by_host(from), to = seen_by_host(to)] {
      const at::NoGradGuard no_grad;
      to.copy_(from);
    });
  }
  if (to_stream != from_stream) wait_for_stream(to_stream, from_stream);
}

/// In the order of the stream. `host` is of the two tensors that of the CPU, whose memory stays.
void enqueue_copy(const Tensor& from, const Tensor& to, const Tensor& host, c10::Stream stream) {
  launch(stream, [from = seen_by_host(from), to = seen_by_host(to), kept = host.storage()] {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  });
}

/// As with CUDA: memory that is not pinned is read before the call returns, and written, too.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (from.is_cpu()) {
    const bool is_read_later = non_blocking && is_pinned(from.const_data_ptr());
    const c10::InferenceMode guard(false);
    const Tensor source = is_read_later ? from : from.clone();
    enqueue_copy(source, to, source, stream_of(to));
    if (!non_blocking) synchronize(stream_of(to));
  } else if (to.is_cpu()) {
    enqueue_copy(from, to, to, stream_of(from));
    if (!(non_blocking && is_pinned(to.const_data_ptr()))) synchronize(stream_of(from));
  } else {
    copy_on_devices(from, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                   bool is_transposed, c10::IntArrayRef output_padding, int64_t num_groups) {
  const auto on_host = [](const Tensor& tensor) { return tensor.to(at::kCPU); };
  const auto host_bias = bias.has_value() && bias->defined() ? std::optional(on_host(*bias)) : bias;
  return at::convolution(on_host(input), on_host(weight), host_bias, stride, padding, dilation,
                         is_transposed, output_padding, num_groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool is_transposed,
    c10::IntArrayRef output_padding, int64_t num_groups, std::array<bool, 3> output_mask) {
  const auto on_host = [](const Tensor& tensor) { return tensor.to(at::kCPU); };
  const std::vector<int64_t> bias_sizes{weight.size(is_transposed ? 1 : 0) *
                                        (is_transposed ? num_groups : 1)};
  const auto [a, b, c] = at::convolution_backward(
      on_host(grad_output), on_host(input), on_host(weight), bias_sizes, stride, padding, dilation,
      is_transposed, output_padding, num_groups, output_mask);
  const auto on_device = [&](const Tensor& tensor) {
    return tensor.defined() ? tensor.to(input.device()) : tensor;
  };
  return {on_device(a), on_device(b), on_device(c)};
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  synchronize(stream_of(tensor));
  return seen_by_host(tensor).item();
}

Tensor& zero(Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) return tensor.fill_(0);
  fill_bytes(tensor.mutable_data_ptr(), 0, tensor.nbytes(), stream_of(tensor));
  return tensor;
}

// A new block is filled in the order of its stream, so the content is copied there too.
void resize_storage(const c10::Storage& storage, std::size_t num_bytes) {
  const c10::DeviceGuard guard(storage.device());
  const c10::Stream stream = current_stream(current_device());
  c10::StorageImpl& held = *storage.unsafeGetStorageImpl();
  TORCH_CHECK(held.resizable(), "Trying to resize storage that is not resizable");
  c10::DataPtr memory = held.allocator()->allocate(num_bytes);
  copy_bytes(memory.get(), held.data(), std::min(held.nbytes(), num_bytes), stream);
  record_stream(held.data_ptr(), stream);
  held.set_data_ptr_noswap(std::move(memory));
  held.set_nbytes(num_bytes);
}

const Tensor& resize(const Tensor& tensor, c10::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  if (tensor.sizes() == size && !format.has_value()) return tensor;
  const std::size_t num_bytes = at::detail::computeStorageNbytesContiguous(
      size, tensor.element_size(), static_cast<std::size_t>(tensor.storage_offset()));
  if (c10::multiply_integers(size) != 0 && num_bytes > tensor.storage().nbytes())
    resize_storage(tensor.storage(), num_bytes);
  return at::native::resize_(tensor, size, format);
}

/// torch's own operators, and those of ringcomm that have a form for CPUs and no group.
void calculate_by_cpu_kernels(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool is_known = op.operator_name().getNamespace() == "aten" ||
                        (op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
                         !op.schema().argumentIndexWithName("group_name").has_value());
  TORCH_CHECK_NOT_IMPLEMENTED(is_known, op.operator_name(), " has no implementation for emugpu");
  if (enqueue_operator(op, stack)) return;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

/// Statistics are float32, as on a GPU: the CPU's kernel wants the type of the input.
void layer_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::size_t first = stack->size() - op.schema().arguments().size();
  const at::ScalarType type = (*stack)[first + 1].toTensor().scalar_type();
  for (const std::size_t i : {first + 3, first + 4}) (*stack)[i] = (*stack)[i].toTensor().to(type);
  calculate_by_cpu_kernels(op, stack);
}

/// The CPU has no histogram of integers.
Tensor histc(const Tensor& tensor, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  return at::histc(tensor.to(at::kCPU, at::kDouble), bins, min, max)
      .to(tensor.device(), tensor.scalar_type());
}

// ---- what ATen asks of an accelerator

struct EmulatedGpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

const bool is_registered = [] {
  c10::SetAllocator(kEmulatedGpu, &allocator());
  at::RegisterPrivateUse1HooksInterface(new EmulatedGpuHooks());  // torch keeps it for good
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_layer_norm_backward",
         torch::CppFunction::makeFromBoxedFunction<&layer_norm_backward>());
  m.impl("histc", histc);
  // torch would compose it, and make more tensors than a GPU's kernel does.
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&calculate_by_cpu_kernels>());
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("zero_", zero);
  m.impl("record_stream", [](Tensor& tensor, c10::Stream stream) {
    record_stream(tensor.storage().data_ptr(), stream);
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&calculate_by_cpu_kernels>());
}

}  // namespace ringcomm::emulator
