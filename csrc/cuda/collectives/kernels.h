#pragma once

#include <string_view>
#include <unordered_map>
#include <vector>

#include "cuda/driver/driver.h"
#include "cuda/kernels/call.h"

namespace ringcomm::cuda {

/// What nvcc has compiled: one image for each file of kernels, loaded onto a device for as long as
/// the process lives. The device's context is current. Loading or finding a kernel may wait for the
/// device, so do neither between calls.
class KernelModules {
 public:
  enum class Of { kGroups, kLosses };

  /// Loads the images that were built in, or the file that RINGCOMM_CUDA_IMAGE names instead of
  /// them. Throws Error where that cannot be read or an image cannot be loaded.
  explicit KernelModules(Of kernels);

  /// No kernel was built in, because there was no nvcc, and RINGCOMM_CUDA_IMAGE names no file.
  bool is_empty() const { return modules_.empty(); }
  /// Null where no image has a kernel of this name.
  Function find(const char* name) const;

 private:
  std::vector<Module> modules_;
};

/// The kernels of this process on a device: loaded with the first group that uses it, and kept.
/// Nothing changes after that, so that any thread may use them.
class Kernels {
 public:
  /// Throws Error where ringcomm was built without them, the device is too old for them, or less
  /// than kBlocksPerMultiprocessor blocks of one of them fit a multiprocessor.
  static const Kernels& of(DeviceOrdinal device);

  /// Throws Error if there is no kernel of this name.
  Function find(std::string_view name) const;
  /// `call` is the kernel's parameter; its device's context is current.
  void launch(Function kernel, unsigned num_blocks, GroupFrame& call, StreamHandle stream) const;

 private:
  explicit Kernels(DeviceOrdinal device);

  std::unordered_map<std::string_view, Function> functions_;
};

}  // namespace ringcomm::cuda
