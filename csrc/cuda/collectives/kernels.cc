#include "cuda/collectives/kernels.h"

#include <memory>
#include <string>

#include "core/errors.h"
#include "cuda/driver/kernel_modules.h"
#include "cuda/driver/per_device.h"
#include "cuda/kernels/image.h"
#include "cuda/kernels/kernel_list.h"
#include "cuda/kernels/limits.h"

namespace ringcomm::cuda {

namespace {

#define RINGCOMM_KERNEL_NAME(name, Call, body) #name,
constexpr const char* kNames[] = {RINGCOMM_ALL_KERNELS(RINGCOMM_KERNEL_NAME)};
#undef RINGCOMM_KERNEL_NAME

void check_residency(const char* name, Function kernel) {
  int num_blocks = 0;
  check(driver().occupancy_max_active_blocks(&num_blocks, kernel, kBlockThreads, 0),
        "ask how many blocks of a kernel fit the GPU");
  if (num_blocks < kBlocksPerMultiprocessor)
    throw Error({.kind = ErrorKind::kSystem},
                std::string("ringcomm: a multiprocessor of this GPU runs ") +
                    std::to_string(num_blocks) + " blocks of the kernel " + name +
                    " at a time, and ringcomm needs " + std::to_string(kBlocksPerMultiprocessor));
}

}  // namespace

const Kernels& Kernels::of(DeviceOrdinal device) {
  return per_device<const Kernels>(
      device, [&] { return std::unique_ptr<const Kernels>(new Kernels(device)); });
}

// The driver loads a function at its first use and may then wait for the GPU, perhaps for a kernel
// that waits for the one to be loaded: a deadlock. So all functions are loaded here.
Kernels::Kernels(DeviceOrdinal device) {
  const ContextGuard guard(device);
  const KernelModules modules(kernel_images());
  if (modules.is_empty())
    throw Error(
        {.kind = ErrorKind::kSystem},
        "ringcomm: this build has no kernels for GPUs, because nvcc was not found when it was "
        "built; put CUDA's nvcc on PATH and install ringcomm again");
  for (const char* name : kNames) {
    functions_[name] = modules.find(name);
    if (functions_[name] == nullptr)
      throw Error({.kind = ErrorKind::kSystem},
                  std::string("ringcomm: there is no kernel ") + name);
    check_residency(name, functions_[name]);
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

}  // namespace ringcomm::cuda
