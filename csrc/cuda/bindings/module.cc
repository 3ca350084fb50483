#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "bindings/devices.h"
#include "cuda/bindings/device_group.h"

namespace ringcomm {
void bind_loss_kernels(pybind11::module_& m);  // loss_kernels.cc
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ringcomm;
  m.doc() = "ringcomm's calls on tensors of GPUs.";
  make_devices = [](auto... arguments) -> std::shared_ptr<Devices> {
    return std::make_shared<DeviceGroup>(std::move(arguments)...);
  };
  bind_loss_kernels(m);
}
