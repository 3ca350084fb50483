#pragma once

#include <span>
#include <vector>

#include "cuda/driver/driver_api.h"

namespace ringcomm::cuda {

/// Images of kernels, loaded onto a device for as long as the process lives. The device's context
/// is current. Loading or finding a kernel may wait for the device, so do neither between calls.
class KernelModules {
 public:
  /// Loads the images that were built in, or the file that RINGCOMM_CUDA_IMAGE names instead of
  /// them. Throws Error where that cannot be read or an image cannot be loaded.
  explicit KernelModules(std::span<const void* const> built_in);

  /// No kernel was built in, and RINGCOMM_CUDA_IMAGE names no file.
  bool is_empty() const { return modules_.empty(); }
  /// Null where no image has a kernel of this name.
  Function find(const char* name) const;

 private:
  void load(const void* image);

  std::vector<Module> modules_;
};

}  // namespace ringcomm::cuda
