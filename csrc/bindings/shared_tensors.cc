#include "bindings/shared_tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include "transport/shm/shared_arena.h"

namespace ringcomm {
namespace {

using shm::SharedArena;

// The arena as torch's storages know allocators, so that a resize_() stays in shared memory.
class SharedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    void* data = nullptr;
    try {
      if (num_bytes > 0) data = SharedArena::instance().allocate(num_bytes);
    } catch (const shm::OutOfMemory& error) {
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

SharedAllocator& allocator() {
  static SharedAllocator shared;
  return shared;
}

}  // namespace

at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(sizes, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   dtype, std::nullopt);
}

bool is_shared(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || tensor.numel() == 0)
    return false;
  const SharedArena* arena = SharedArena::find();
  return arena != nullptr &&
         arena->locate(tensor.const_data_ptr(), tensor.element_size()).is_somewhere();
}

}  // namespace ringcomm
