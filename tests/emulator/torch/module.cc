// The extension's functions for tests/python/device/emulated_gpu.py; the rest is registered with
// torch at import.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <future>

#include "emulator/torch/p2p.h"

namespace ringcomm::emulator {
namespace {

constexpr std::chrono::seconds kMaxHold(30);

/// Stops a stream after its submitted work.
struct Hold {
  std::optional<std::promise<void>> released{std::in_place};

  explicit Hold(c10::Stream stream) {
    launch(stream, [released = released->get_future().share()] { released.wait_for(kMaxHold); });
  }
  /// The first time; a promise that goes is ready as well.
  void release() { released.reset(); }
};

}  // namespace
}  // namespace ringcomm::emulator

PYBIND11_MODULE(ringcomm_emulated_gpu, m) {
  using namespace ringcomm::emulator;
  namespace py = pybind11;
  m.def(
      "create_p2p",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<EmulatedP2p>(store, rank, size, timeout);
      },
      py::call_guard<py::gil_scoped_release>());
  py::class_<Hold>(m, "Hold")
      .def(py::init<c10::Stream>(), py::arg("stream"))
      .def("release", &Hold::release);
  m.def("current_stream_handle", [] {
    return reinterpret_cast<std::uintptr_t>(handle_of(current_stream(current_device())));
  });
  m.def(
      "with_own_storage",
      [](const at::Tensor& tensor) {
        return at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
            .deleter([tensor](void*) {})
            .options(tensor.options())
            .target_device(tensor.device())
            .make_tensor();
      },
      "A contiguous tensor's memory as a storage of its size, as torch.from_dlpack() makes one.");
  m.def("device_count", [] { return static_cast<int>(num_devices()); });
}
