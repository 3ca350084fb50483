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
