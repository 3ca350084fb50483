#include "collectives/cuda/kernels.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/errors.h"
#include "device/cuda/image.h"
#include "device/cuda/kernel_list.h"
#include "device/cuda/limits.h"

namespace ringcomm::cuda {

struct Kernels::Modules {
  std::mutex mutex;
  std::vector<Module> modules;
  std::map<std::string, Function> functions;
};

Kernels& Kernels::of(DeviceOrdinal device) {
  // Never destroyed: threads may use them until the process has ended.
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<DeviceOrdinal, std::unique_ptr<Kernels>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Kernels>& kernels = all[device];
  if (kernels == nullptr) kernels.reset(new Kernels(device));
  return *kernels;
}

namespace {

#define RINGCOMM_KERNEL_NAME(name, Call, body) #name,
constexpr const char* kNames[] = {RINGCOMM_ALL_KERNELS(RINGCOMM_KERNEL_NAME)};
#undef RINGCOMM_KERNEL_NAME

}  // namespace

Kernels::Kernels(DeviceOrdinal device) : device_(device), modules_(new Modules) {
  const ContextGuard guard(device);
  const auto load = [this](const void* image) {
    Module module = nullptr;
    check(driver().module_load_data(&module, image), "load the kernels onto the GPU");
    modules_->modules.push_back(module);
  };
  if (const char* path = std::getenv("RINGCOMM_CUDA_IMAGE"); path != nullptr && *path != '\0') {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> image((std::istreambuf_iterator<char>(file)), {});
    if (image.empty())
      throw Error({.kind = ErrorKind::kSystem},
                  std::string("ringcomm: RINGCOMM_CUDA_IMAGE: cannot read ") + path);
    load(image.data());
  } else if (kernel_images().empty()) {
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: this build has no kernels for GPUs, as nvcc was not found where it was "
                "built; put CUDA's nvcc on PATH and install ringcomm again");
  }
  if (modules_->modules.empty())
    for (const void* image : kernel_images()) load(image);
  load_all();
}

// The driver loads a function when it is first asked for, and may wait for the GPU then: for a
// kernel that waits for the very one that is to be loaded.
void Kernels::load_all() {
  for (const char* name : kNames) find(name);
}

Function Kernels::find(const std::string& name) {
  const std::lock_guard lock(modules_->mutex);
  Function& function = modules_->functions[name];
  if (function != nullptr) return function;
  const ContextGuard guard(device_);
  for (Module module : modules_->modules)
    if (driver().module_get_function(&function, module, name.c_str()) == kSuccess) return function;
  function = nullptr;
  throw Error({.kind = ErrorKind::kSystem}, "ringcomm: there is no kernel " + name);
}

void Kernels::launch(const LaunchPlan& plan, GroupFrame& call, StreamHandle stream) {
  void* parameters[] = {&call};
  check(driver().launch_kernel(find(plan.kernel), plan.num_blocks, 1, 1, kBlockThreads, 1, 1, 0,
                               stream, parameters, nullptr),
        "launch a kernel");
}

int Kernels::blocks_per_multiprocessor(const std::string& name) {
  int num_blocks = 0;
  const Function function = find(name);
  const ContextGuard guard(device_);
  check(driver().occupancy_max_active_blocks(&num_blocks, function, kBlockThreads, 0),
        "ask how many blocks of a kernel fit the GPU");
  return num_blocks;
}

}  // namespace ringcomm::cuda
