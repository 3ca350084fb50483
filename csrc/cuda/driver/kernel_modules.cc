#include "cuda/driver/kernel_modules.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "core/errors.h"
#include "cuda/driver/driver.h"

namespace ringcomm::cuda {

KernelModules::KernelModules(std::span<const void* const> built_in) {
  const char* path = std::getenv("RINGCOMM_CUDA_IMAGE");
  if (path == nullptr || *path == '\0') {
    for (const void* image : built_in) load(image);
    return;
  }
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> image((std::istreambuf_iterator<char>(file)), {});
  if (image.empty())
    throw Error({.kind = ErrorKind::kSystem},
                std::string("ringcomm: RINGCOMM_CUDA_IMAGE: cannot read ") + path);
  load(image.data());
}

void KernelModules::load(const void* image) {
  Module module = nullptr;
  check(driver().module_load_data(&module, image), "load kernels onto the GPU");
  modules_.push_back(module);
}

Function KernelModules::find(const char* name) const {
  Function function = nullptr;
  for (Module module : modules_)
    if (driver().module_get_function(&function, module, name) == kSuccess) return function;
  return nullptr;
}

}  // namespace ringcomm::cuda
