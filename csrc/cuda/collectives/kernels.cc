#include "cuda/collectives/kernels.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <span>
#include <string>

#include "core/errors.h"
#include "cuda/kernels/kernel_list.h"

#ifdef RINGCOMM_CUDA_IMAGES
// The build defines the folder with nvcc's output for each file.
#define RINGCOMM_EMBED(name)                                                          \
  __asm__(".pushsection .rodata\n.balign 16\nringcomm_image_" #name                   \
          ":\n.incbin \"" RINGCOMM_CUDA_IMAGES "/" #name ".fatbin\"\n.popsection\n"); \
  extern "C" const char ringcomm_image_##name[];

RINGCOMM_EMBED(collective_kernels)
RINGCOMM_EMBED(update_kernels)
RINGCOMM_EMBED(loss_kernels)
#endif

namespace ringcomm::cuda {
namespace {

std::span<const void* const> built_in([[maybe_unused]] KernelsOf kernels) {
#ifdef RINGCOMM_CUDA_IMAGES
  static const void* const images[] = {ringcomm_image_collective_kernels,
                                       ringcomm_image_update_kernels, ringcomm_image_loss_kernels};
  const std::span all(images);
  return kernels == KernelsOf::kGroups ? all.first(2) : all.last(1);
#else
  return {};
#endif
}

Module load(const void* image) {
  Module module = nullptr;
  check(driver().module_load_data(&module, image), "load kernels onto the GPU");
  return module;
}

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

std::vector<Module> load_kernels(KernelsOf kernels) {
  std::vector<Module> modules;
  const char* path = std::getenv("RINGCOMM_CUDA_IMAGE");
  if (path == nullptr || *path == '\0') {
    for (const void* image : built_in(kernels)) modules.push_back(load(image));
    return modules;
  }
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> image((std::istreambuf_iterator<char>(file)), {});
  if (image.empty())
    throw Error({.kind = ErrorKind::kSystem},
                std::string("ringcomm: RINGCOMM_CUDA_IMAGE: cannot read ") + path);
  modules.push_back(load(image.data()));
  return modules;
}

Function find_kernel(const std::vector<Module>& modules, const char* name) {
  Function function = nullptr;
  for (Module module : modules)
    if (driver().module_get_function(&function, module, name) == kSuccess) return function;
  return nullptr;
}

// The driver loads a function at its first use and may then wait for the GPU, perhaps for a kernel
// that waits for the one to be loaded: a deadlock. So all functions are loaded here.
Kernels::Kernels(DeviceOrdinal device) {
  const ContextGuard guard(device);
  const RelaxedCapture relaxed;
  const std::vector<Module> modules = load_kernels(KernelsOf::kGroups);
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
