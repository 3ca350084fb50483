// Tensors in memory that other ranks map. c10d has a hook for memory that a backend allocates;
// FSDP2 uses it for the buffers of its collectives.

#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <exception>

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

std::pair<at::Tensor, bool> ProcessGroupRingcomm::empty_shared_on(c10::Device device,
                                                                  at::IntArrayRef sizes,
                                                                  at::ScalarType dtype) {
  const c10::DeviceGuard guard(device);
  at::Tensor tensor;
  std::exception_ptr failed;
  try {
    tensor = at::empty(sizes, at::TensorOptions(dtype).device(device));
  } catch (const std::exception&) {
    failed = std::current_exception();  // the other ranks wait for this one
  }
  bool is_mapped = false;
  with_python_errors([&] {
    is_mapped = failed != nullptr
                    ? devices()->map(device, nullptr, 1)
                    : devices()->map(device, tensor.const_data_ptr(), tensor.nbytes());
  });
  if (failed != nullptr) std::rethrow_exception(failed);
  return {tensor, is_mapped};
}

}  // namespace ringcomm
