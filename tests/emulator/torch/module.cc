// The extension's functions for tests/python/device/emulated_gpu.py; the rest is registered with
// torch at import.

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <future>
#include <utility>

#include "emulator/extra_api.h"
#include "emulator/torch/memory.h"
#include "emulator/torch/p2p.h"
#include "emulator/torch/streams.h"

namespace ringcomm::emulator {
namespace {

constexpr std::chrono::seconds kMaxHold(30);

/// Stops a stream after its submitted work.
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

/// Work that a stream was given once and that runs again with each replay, on the same memory.
/// What was allocated meanwhile is never used for anything else.
class CapturedGraph {
 public:
  CapturedGraph() = default;
  ~CapturedGraph() {
    if (exec_ != nullptr) extra::graph_exec_destroy(exec_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  /// Starts a capture on the current stream, which must not be the null stream.
  void begin() {
    on_current_stream("begin to capture a stream", [](cuda::StreamHandle stream) {
      return extra::stream_begin_capture(stream, kCaptureGlobal);
    });
  }
  /// Called with the same current stream. Throws where the capture was spoilt.
  void end() {
    Graph graph = nullptr;
    on_current_stream("capture a stream", [&](cuda::StreamHandle stream) {
      return extra::stream_end_capture(stream, &graph);
    });
    const cuda::Result made = extra::graph_instantiate(&exec_, graph, 0);
    extra::graph_destroy(graph);
    cuda::check(made, "make a graph of what was captured");
  }
  /// Gives the work to the current stream.
  void replay() {
    on_current_stream("launch a graph", [this](cuda::StreamHandle stream) {
      return extra::graph_launch(exec_, stream);
    });
  }

 private:
  template <class Call>
  static void on_current_stream(const char* what, const Call& call) {
    const c10::Stream stream = current_stream(current_device());
    const cuda::ContextGuard context(stream.device_index());
    cuda::check(call(handle_of(stream)), what);
  }

  GraphExec exec_ = nullptr;
};

}  // namespace
}  // namespace ringcomm::emulator

PYBIND11_MODULE(ringcomm_emulated_gpu, m) {
  using namespace ringcomm::emulator;
  namespace py = pybind11;
  m.def("create_p2p", &create_p2p, py::arg("store"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
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
