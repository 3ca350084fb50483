// Operators of the emulated GPUs. All work is in the order of the device's current stream, and the
// host goes on: copies and fills are the driver's, what enqueue_operator() can predict is
// calculated by the stream. Everything else waits for the stream, is calculated at once, and its
// results are copied by the stream.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>

#include "emulator/torch/enqueued_operator.h"
#include "emulator/torch/memory.h"
#include "emulator/torch/streams.h"

namespace ringcomm::emulator {
namespace {

using at::Tensor;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

thread_local bool is_in_fallback = false;

c10::Stream stream_of(const Tensor& tensor) { return current_stream(index_of(tensor.device())); }

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

/// Whether the elements of both stand in the same order without holes.
bool have_same_layout(const Tensor& one, const Tensor& other) {
  return one.dtype() == other.dtype() && one.sizes() == other.sizes() &&
         one.strides() == other.strides() && one.is_non_overlapping_and_dense();
}

void copy_on_devices(const Tensor& from, const Tensor& to) {
  const c10::Stream from_stream = stream_of(from);
  const c10::Stream to_stream = stream_of(to);
  // As with CUDA: on the source's stream, in the order of both.
  if (to_stream != from_stream) wait_for_stream(from_stream, to_stream);
  if (have_same_layout(from, to)) {
    copy_bytes(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), from_stream);
  } else {
    launch_host_function(from_stream, [from = seen_by_host(from), to = seen_by_host(to)] {
      const at::NoGradGuard no_grad;
      to.copy_(from);
    });
  }
  if (to_stream != from_stream) wait_for_stream(to_stream, from_stream);
}

/// `from` is a CPU tensor; it is read before the call returns. By way of memory of the device, as
/// a copy from memory of the host would make the host wait.
void upload(const Tensor& from, const Tensor& to) {
  const Tensor staged = at::empty(from.sizes(), to.options());
  seen_by_host(staged).copy_(from);  // new memory is in nobody's use
  copy_on_devices(staged, to);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (from.is_cpu()) {
    upload(from, to);
    if (!non_blocking && !is_in_fallback) synchronize(stream_of(to));
  } else if (to.is_cpu()) {
    synchronize(stream_of(from));
    to.copy_(seen_by_host(from));
  } else {
    copy_on_devices(from, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  synchronize(stream_of(tensor));
  return seen_by_host(tensor).item();
}

Tensor& fill(Tensor& tensor, const at::Scalar& value) {
  if (tensor.numel() != 0) upload(at::full({}, value, tensor.options().device(at::kCPU)), tensor);
  return tensor;
}

Tensor& zero(Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) return fill(tensor, 0);
  fill_bytes(tensor.mutable_data_ptr(), 0, tensor.nbytes(), stream_of(tensor));
  return tensor;
}

const Tensor& resize(const Tensor& tensor, c10::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  const std::size_t num_bytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                       static_cast<std::size_t>(tensor.storage_offset()));
  if (num_bytes > tensor.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), num_bytes);
  return tensor;
}

void record_tensor_stream(Tensor& tensor, c10::Stream stream) {
  record_stream(tensor.storage().data_ptr(), stream);
}

/// torch's own operators only: what ringcomm has registered for the CPU alone is not for GPUs.
void calculate_by_cpu_kernels(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(op.operator_name().getNamespace() == "aten", op.operator_name(),
                              " has no implementation for emugpu");
  if (enqueue_operator(op, stack)) return;
  const bool was_in_fallback = std::exchange(is_in_fallback, true);
  struct Leave {
    bool before;
    ~Leave() { is_in_fallback = before; }
  } const leave{was_in_fallback};
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

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
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("record_stream", record_tensor_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&calculate_by_cpu_kernels>());
}

}  // namespace ringcomm::emulator
