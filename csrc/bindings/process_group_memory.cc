#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <vector>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "bindings/shared_tensors.h"

// c10d's hook for memory that suits a backend best: FSDP2 asks it for the buffers of its
// collectives.

namespace ringcomm {

// c10d asks by the device's index alone: -1 is torch.device("cpu"), which carries none.
bool ProcessGroupRingcomm::supportsTensorAlloc(c10::DeviceIndex deviceIdx) { return deviceIdx < 0; }

at::Tensor ProcessGroupRingcomm::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0, "ringcomm: allocate_tensor got a negative size, ", size);
  if (!options.device().is_cpu())
    C10_THROW_ERROR(NotImplementedError, c10::str("ringcomm: allocate_tensor on ", options.device(),
                                                  " is not there yet; shared memory is the CPU's"));
  return empty_shared({size}, c10::typeMetaToScalarType(options.dtype()));
}

namespace {

// Its memory belongs to the stream that is current here, as that of torch's allocators does, and
// to the one that is current when the last tensor on it goes.
at::Tensor tensor_in(const DeviceCarrier::LentMemory& memory, c10::Device device,
                     at::IntArrayRef sizes, at::ScalarType dtype) {
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

at::Tensor ProcessGroupRingcomm::empty_shared_on(c10::Device device, at::IntArrayRef sizes,
                                                 at::ScalarType dtype) {
  const c10::DeviceGuard guard(device);
  const std::size_t num_bytes =
      static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  DeviceCarrier::LentMemory memory;
  with_python_errors([&] { memory = devices()->lend(device, num_bytes); });
  return tensor_in(memory, device, sizes, dtype);
}

}  // namespace ringcomm
