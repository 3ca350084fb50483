// The module ringcomm._cuda: groups on GPUs, and the losses of kernels/losses.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>

#include "bindings/process_group.h"
#include "cuda/bindings/device_group.h"
#include "cuda/collectives/peer_allocations.h"
#include "kernels/losses/cuda_cross_entropy.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ringcomm;
  m.doc() = "ringcomm's calls on tensors of GPUs.";
  make_devices = [](auto... arguments) -> std::shared_ptr<Devices> {
    return std::make_shared<DeviceGroup>(std::move(arguments)...);
  };
  m.def(
      "release",
      [](double timeout_s) {
        return cuda::PeerAllocations::release(
            std::chrono::milliseconds(static_cast<std::int64_t>(1000 * timeout_s)));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("cross_entropy_by_clusters", &cross_entropy_by_clusters,
        pybind11::call_guard<pybind11::gil_scoped_release>());
}
