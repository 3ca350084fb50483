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

namespace {

#define RINGCOMM_KERNEL_NAME(name, Call, body) #name,
constexpr const char* kNames[] = {RINGCOMM_ALL_KERNELS(RINGCOMM_KERNEL_NAME)};
#undef RINGCOMM_KERNEL_NAME

}  // namespace

const Kernels& Kernels::of(DeviceOrdinal device) {
  // Never destroyed: threads may use them until the process has ended.
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<DeviceOrdinal, std::unique_ptr<const Kernels>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<const Kernels>& kernels = all[device];
  if (kernels == nullptr) kernels.reset(new Kernels(device));
  return *kernels;
}

Kernels::Kernels(DeviceOrdinal device) : device_(device) {
  const ContextGuard guard(device);
  if (const char* path = std::getenv("RINGCOMM_CUDA_IMAGE"); path != nullptr && *path != '\0') {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> image((std::istreambuf_iterator<char>(file)), {});
    if (image.empty())
      throw Error({.kind = ErrorKind::kSystem},
                  std::string("ringcomm: RINGCOMM_CUDA_IMAGE: cannot read ") + path);
    load_image(image.data());
  } else if (kernel_images().empty()) {
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: this build has no kernels for GPUs, as nvcc was not found where it was "
                "built; put CUDA's nvcc on PATH and install ringcomm again");
  }
  if (modules_.empty())
    for (const void* image : kernel_images()) load_image(image);
  find_all();
}

void Kernels::load_image(const void* image) {
  Module module = nullptr;
  check(driver().module_load_data(&module, image), "load the kernels onto the GPU");
  modules_.push_back(module);
}

// The driver loads a function when it is first asked for, and may wait for the GPU then: for a
// kernel that waits for the very one that is to be loaded.
void Kernels::find_all() {
  for (const char* name : kNames) functions_[name] = find_in_images(name);
}

Function Kernels::find_in_images(const char* name) const {
  Function function = nullptr;
  for (Module module : modules_)
    if (driver().module_get_function(&function, module, name) == kSuccess) return function;
  throw Error({.kind = ErrorKind::kSystem}, std::string("ringcomm: there is no kernel ") + name);
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
