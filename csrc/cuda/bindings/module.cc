#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/devices.h"
#include "cuda/bindings/device_group.h"
#include "cuda/bindings/loss_kernels.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

std::shared_ptr<Devices> make_device_group(c10::intrusive_ptr<c10d::Store> store,
                                           c10::intrusive_ptr<GroupOptions> options,
                                           std::weak_ptr<Communicator> communicator, int rank,
                                           int world_size) {
  return std::make_shared<DeviceGroup>(std::move(store), std::move(options),
                                       std::move(communicator), rank, world_size);
}

// As ringcomm/ops/losses/cross_entropy_cuda.py calls it.
std::optional<LossResults> cross_entropy_by_clusters_of(
    const at::Tensor& logits, const at::Tensor& target, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& num_items, int64_t num_classes, int64_t ignore_index,
    double logit_scale, double softcap, double label_smoothing, double z_loss,
    const std::string& reduction, bool wants_more) {
  return cross_entropy_by_clusters(logits, target, weight, num_items,
                                   {num_classes, ignore_index, logit_scale, softcap,
                                    label_smoothing, z_loss, reduction, wants_more});
}

}  // namespace
}  // namespace ringcomm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ringcomm;
  m.doc() = "ringcomm's calls on tensors of GPUs.";
  make_devices = &make_device_group;
  m.def("cross_entropy_by_clusters", &cross_entropy_by_clusters_of,
        py::call_guard<py::gil_scoped_release>());
}
