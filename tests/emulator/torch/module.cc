// What tests/python/device/emulated_gpu.py takes from the extension; the rest torch knows when it
// is loaded.

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <future>
#include <utility>

#include "emulator/torch/graph.h"
#include "emulator/torch/memory.h"
#include "emulator/torch/p2p.h"
#include "emulator/torch/streams.h"

namespace ringcomm::emulator {
namespace {

constexpr std::chrono::seconds kMaxHold(30);

/// Stops a stream behind what it was given so far.
class Hold {
 public:
  explicit Hold(c10::Stream stream) {
    launch_host_function(
        stream, [released = released_.get_future().share()] { released.wait_for(kMaxHold); });
  }
  ~Hold() { release(); }
  void release() {
    if (!std::exchange(is_released_, true)) released_.set_value();
  }

 private:
  std::promise<void> released_;
  bool is_released_ = false;
};

}  // namespace
}  // namespace ringcomm::emulator

PYBIND11_MODULE(ringcomm_emulated_gpu, m) {
  using namespace ringcomm::emulator;
  namespace py = pybind11;
  m.def(
      "create_p2p",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<EmulatedP2p>(store, rank, size, timeout);
      },
      "This rank's end of a group of the backend emup2p.", py::arg("store"), py::arg("rank"),
      py::arg("size"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
  py::class_<Hold>(m, "Hold")
      .def(py::init<c10::Stream>(), py::arg("stream"))
      .def("release", &Hold::release);
  py::class_<CapturedGraph>(m, "CapturedGraph")
      .def(py::init<>())
      .def("begin", &CapturedGraph::begin)
      .def("end", &CapturedGraph::end)
      .def("replay", &CapturedGraph::replay);
  m.def("device_count", [] { return static_cast<int>(num_devices()); });
  m.def(
      "memory_allocated",
      [](int device) { return allocated_bytes(static_cast<c10::DeviceIndex>(device)); },
      "Bytes of the tensors that live on a device.", py::arg("device"));
}
