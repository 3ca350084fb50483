#pragma once

#include <string_view>
#include <unordered_map>

#include "cuda/driver/driver.h"
#include "cuda/kernels/call.h"

namespace ringcomm::cuda {

/// The kernels of this process on a device: loaded with the first group that uses it, and kept.
/// From any thread. of() throws Error where there are none or the device is too old for them.
class Kernels : public PerDevice<Kernels> {
 public:
  /// Throws Error if there is no kernel of this name.
  Function find(std::string_view name) const;
  /// `call` is the kernel's parameter; its device's context is current.
  void launch(Function kernel, unsigned num_blocks, GroupFrame& call, StreamHandle stream) const;

 private:
  friend PerDevice;
  explicit Kernels(DeviceOrdinal device);

  std::unordered_map<std::string_view, Function> functions_;
};

}  // namespace ringcomm::cuda
