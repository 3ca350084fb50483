// Tensors in memory that other ranks map. c10d has a hook for memory that a backend allocates;
// FSDP2 uses it for the buffers of its collectives.

#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "collectives/recorder.h"
#include "host/shared_arena.h"

namespace ringcomm {
namespace {

using host::SharedArena;

// The arena as torch's storages know allocators, so that a resize_() stays in shared memory.
class SharedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    void* data = nullptr;
    try {
      recorder::start();  // whose looks return what is free to the system
      if (num_bytes > 0) data = SharedArena::instance().allocate(num_bytes);
    } catch (const host::OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "ringcomm: ", error.what());
    }
    return {data, data, &deallocate, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

 private:
  static void deallocate(void* data) {
    SharedArena* arena = SharedArena::find();
    if (data != nullptr && arena != nullptr) arena->deallocate(data);
  }
};

}  // namespace

at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType dtype) {
  static SharedAllocator allocator;
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   dtype, std::nullopt);
}

bool is_shared(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || tensor.numel() == 0)
    return false;
  const SharedArena* arena = SharedArena::find();
  return arena != nullptr &&
         arena->locate(tensor.const_data_ptr(), tensor.element_size()).is_somewhere();
}

// c10d passes only the device's index: -1 is torch.device("cpu"), which has none.
bool ProcessGroupRingcomm::supportsTensorAlloc(c10::DeviceIndex deviceIdx) {
  return deviceIdx < 0 || (make_devices != nullptr && at::getAccelerator().has_value());
}

// Other ranks map the memory of ordinary tensors on a device.
at::Tensor ProcessGroupRingcomm::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) return at::empty({size}, options);
  return empty_shared({size}, c10::typeMetaToScalarType(options.dtype()));
}

at::Tensor ProcessGroupRingcomm::empty_shared_on(c10::Device device, at::IntArrayRef sizes,
                                                 at::ScalarType dtype) {
  const c10::DeviceGuard guard(device);
  const std::size_t num_bytes =
      static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  SharedDeviceMemory memory;
  with_python_errors([&] { memory = devices()->lend(device, num_bytes); });
  // Its memory belongs to the current stream, like that of torch's allocators, and to the stream
  // that is current when the last tensor on it is destroyed.
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

}  // namespace ringcomm
