#pragma once

#include <string_view>
#include <unordered_map>

#include "cuda/driver/driver.h"
#include "cuda/kernels/call.h"

namespace ringcomm::cuda {

/// The kernels of this process on a device: loaded with the first group that uses it, and kept.
/// Nothing changes after that, so that any thread may use them.
class Kernels {
 public:
  /// Throws Error where ringcomm was built without them, the device is too old for them, or less
  /// than kBlocksPerMultiprocessor blocks of one of them fit a multiprocessor.
  /// RINGCOMM_CUDA_IMAGE names a file to load instead of what was built in.
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
