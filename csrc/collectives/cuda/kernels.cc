#include "collectives/cuda/kernels.h"

#include <memory>
#include <string>

#include "core/errors.h"
#include "device/cuda/image.h"
#include "device/cuda/kernel_list.h"
#include "device/cuda/limits.h"
#include "transport/cuda/kernel_modules.h"
#include "transport/cuda/per_device.h"

namespace ringcomm::cuda {

namespace {

#define RINGCOMM_KERNEL_NAME(name, Call, body) #name,
constexpr const char* kNames[] = {RINGCOMM_ALL_KERNELS(RINGCOMM_KERNEL_NAME)};
#undef RINGCOMM_KERNEL_NAME

}  // namespace

const Kernels& Kernels::of(DeviceOrdinal device) {
  return per_device<const Kernels>(
      device, [&] { return std::unique_ptr<const Kernels>(new Kernels(device)); });
}

// The driver loads a function when it is first asked for, and may wait for the GPU then: for a
// kernel that waits for the very one that is to be loaded. So all are asked for here.
Kernels::Kernels(DeviceOrdinal device) : device_(device) {
  const ContextGuard guard(device);
  const KernelModules modules(kernel_images());
  if (modules.is_empty())
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: this build has no kernels for GPUs, as nvcc was not found where it was "
                "built; put CUDA's nvcc on PATH and install ringcomm again");
  for (const char* name : kNames) {
    functions_[name] = modules.find(name);
    if (functions_[name] == nullptr)
      throw Error({.kind = ErrorKind::kSystem},
                  std::string("ringcomm: there is no kernel ") + name);
  }
}

Function Kernels::find(std::string_view name) const {
  if (const auto found = functions_.find(name); found != functions_.end()) return found->second;
  throw Error({.kind = ErrorKind::kSystem}, "ringcomm: there is no kernel " + std::string(name));
}

void Kernels::launch(Function kernel, unsigned num_blocks, GroupFrame& call,
                     StreamHandle stream) const {
  void* parameters[] = {&call};
  check(driver().launch_kernel(kernel, num_blocks, 1, 1, kBlockThreads, 1, 1, 0, stream, parameters,
                               nullptr),
        "launch a kernel");
}

int Kernels::blocks_per_multiprocessor(std::string_view name) const {
  int num_blocks = 0;
  const ContextGuard guard(device_);
  check(driver().occupancy_max_active_blocks(&num_blocks, find(name), kBlockThreads, 0),
        "ask how many blocks of a kernel fit the GPU");
  return num_blocks;
}

}  // namespace ringcomm::cuda
