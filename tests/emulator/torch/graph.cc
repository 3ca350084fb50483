#include "emulator/torch/graph.h"

#include <c10/util/Exception.h>

namespace ringcomm::emulator {
namespace {

using cuda::check;
using cuda::ContextGuard;

}  // namespace

CapturedGraph::~CapturedGraph() {
  if (exec_ != nullptr) extra_driver().graph_exec_destroy(exec_);
}

void CapturedGraph::begin() {
  const c10::Stream stream = current_stream(current_device());
  const ContextGuard context(stream.device_index());
  check(extra_driver().stream_begin_capture(handle_of(stream), kCaptureGlobal),
        "begin to capture a stream");
}

void CapturedGraph::end() {
  const c10::Stream stream = current_stream(current_device());
  const ContextGuard context(stream.device_index());
  Graph graph = nullptr;
  check(extra_driver().stream_end_capture(handle_of(stream), &graph), "capture a stream");
  const cuda::Result made = extra_driver().graph_instantiate(&exec_, graph, 0);
  extra_driver().graph_destroy(graph);
  check(made, "make a graph of what was captured");
}

void CapturedGraph::replay() {
  TORCH_CHECK(exec_ != nullptr, "replay() of a graph that has captured nothing");
  const c10::Stream stream = current_stream(current_device());
  const ContextGuard context(stream.device_index());
  check(extra_driver().graph_launch(exec_, handle_of(stream)), "launch a graph");
}

}  // namespace ringcomm::emulator
