#pragma once

#include <string>

#include "collectives/cuda/launch_plan.h"
#include "transport/cuda/driver.h"

namespace ringcomm::cuda {

/// The kernels of this process on a device: loaded with the first group that uses it, and kept.
class Kernels {
 public:
  /// Throws Error where ringcomm was built without them, or the device is too old for them.
  /// RINGCOMM_CUDA_IMAGE names a file to load instead of what was built in.
  static Kernels& of(DeviceOrdinal device);

  /// Throws Error where there is none of this name. From any thread.
  Function find(const std::string& name);
  /// `call` is the kernel's parameter.
  void launch(const LaunchPlan& plan, GroupFrame& call, StreamHandle stream);
  /// Blocks of a kernel that fit a multiprocessor at once.
  int blocks_per_multiprocessor(const std::string& name);

 private:
  explicit Kernels(DeviceOrdinal device);
  void load_all();
  DeviceOrdinal device_;
  struct Modules;
  Modules* modules_;
};

}  // namespace ringcomm::cuda
