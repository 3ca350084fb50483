#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <vector>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "bindings/shared_tensors.h"

// c10d's hook for memory that a backend allocates; FSDP2 uses it for the buffers of its
// collectives.

namespace ringcomm {

namespace {

// Its memory belongs to the current stream, like that of torch's allocators, and to the stream that
// is current when the last tensor on it is destroyed.
at::Tensor tensor_in(const SharedDeviceMemory& memory, c10::Device device, at::IntArrayRef sizes,
                     at::ScalarType dtype) {
  const c10::impl::VirtualGuardImpl impl(device.type());
  const auto release = [impl, device, made_on = impl.getStream(device),
                        give_back = memory.give_back](void*) {
    std::vector<c10::Stream> streams{made_on};
    if (const c10::Stream current = impl.getStream(device); current != made_on)
      streams.push_back(current);
    give_back(streams);
  };
  return at::from_blob(memory.data, sizes, release, at::TensorOptions(dtype).device(device),
                       device);
}

}  // namespace

// c10d passes only the device's index: -1 is torch.device("cpu"), which has none. A device has no
// carrier before the group's first call on it.
bool ProcessGroupRingcomm::supportsTensorAlloc(c10::DeviceIndex deviceIdx) {
  return deviceIdx < 0 || (make_devices != nullptr && devices()->can_lend(deviceIdx));
}

at::Tensor ProcessGroupRingcomm::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0, "ringcomm: allocate_tensor got a negative size, ", size);
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  c10::Device device = options.device();
  if (device.is_cpu()) return empty_shared({size}, dtype);
  if (!device.has_index()) {  // of which supportsTensorAlloc() cannot tell
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
    if (!devices()->can_lend(device.index())) return at::empty({size}, options);
  }
  if (!devices()->can_lend(device.index()))
    C10_THROW_ERROR(NotImplementedError,
                    c10::str("ringcomm: allocate_tensor on ", device,
                             " needs ranks that map each other's memory of that device, "
                             "and an earlier call of the group on it; use torch.empty instead: "
                             "calls on it are staged"));
  const c10::DeviceGuard guard(device);
  const std::size_t num_bytes = static_cast<std::size_t>(size) * c10::elementSize(dtype);
  const c10::impl::VirtualGuardImpl impl(device.type());
  SharedDeviceMemory memory;
  with_python_errors([&] { memory = devices()->borrow(impl.getStream(device), num_bytes); });
  // If the group has no more memory, calls on the tensor are staged.
  if (memory.data == nullptr) return at::empty({size}, options);
  return tensor_in(memory, device, {size}, dtype);
}

at::Tensor ProcessGroupRingcomm::empty_shared_on(c10::Device device, at::IntArrayRef sizes,
                                                 at::ScalarType dtype) {
  const c10::DeviceGuard guard(device);
  const std::size_t num_bytes =
      static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  SharedDeviceMemory memory;
  with_python_errors([&] { memory = devices()->lend(device, num_bytes); });
  return tensor_in(memory, device, sizes, dtype);
}

}  // namespace ringcomm
