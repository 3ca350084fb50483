#include "cuda/collectives/kernels.h"

#include <string>
#include <vector>

#include "core/errors.h"
#include "cuda/kernels/kernel_list.h"

RINGCOMM_EMBED(collective_kernels)
RINGCOMM_EMBED(update_kernels)

namespace ringcomm::cuda {
namespace {

#define RINGCOMM_KERNEL_NAME(name, Call, body) #name,
constexpr const char* kNames[] = {RINGCOMM_ALL_KERNELS(RINGCOMM_KERNEL_NAME)};
#undef RINGCOMM_KERNEL_NAME

void check_residency(const char* name, Function kernel) {
  int num_blocks = 0;
  check(driver().occupancy_max_active_blocks(&num_blocks, kernel, kPlaceThreads, 0),
        "ask how many blocks of a kernel fit the GPU");
  if (num_blocks < kPlacesPerMultiprocessor)
    throw Error({.kind = ErrorKind::kSystem},
                std::string("ringcomm: a multiprocessor of this GPU runs ") +
                    std::to_string(num_blocks) + " blocks of the kernel " + name +
                    " at a time, and ringcomm needs " + std::to_string(kPlacesPerMultiprocessor));
}

}  // namespace

// The driver loads a function at its first use and may then wait for the GPU, perhaps for a kernel
// that waits for the one to be loaded: a deadlock. So all functions are loaded here.
Kernels::Kernels(DeviceOrdinal device) {
  const ContextGuard guard(device);
  const RelaxedCapture relaxed;
  const std::vector<Module> modules =
      load_kernels({RINGCOMM_IMAGE(collective_kernels), RINGCOMM_IMAGE(update_kernels)});
  if (modules.empty())
    throw Error(
        {.kind = ErrorKind::kSystem},
        "ringcomm: this build has no kernels for GPUs; put CUDA's nvcc on PATH and build them: "
        "RINGCOMM_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps .");
  for (const char* name : kNames) {
    if (const Function kernel = find_kernel(modules, name)) functions_[name] = kernel;
    check_residency(name, find(name));
  }
}

Function Kernels::find(std::string_view name) const {
  if (const auto found = functions_.find(name); found != functions_.end()) return found->second;
  throw Error({.kind = ErrorKind::kSystem}, "ringcomm: there is no kernel " + std::string(name));
}

void Kernels::launch(Function kernel, const LaunchPlan& plan, GroupFrame& call,
                     StreamHandle stream) const {
  void* parameters[] = {&call};
  check(driver().launch_kernel(kernel, plan.num_blocks / plan.blocks_per_place, 1, 1, kBlockThreads,
                               plan.blocks_per_place, 1, 0, stream, parameters, nullptr),
        "launch a kernel");
}

}  // namespace ringcomm::cuda
