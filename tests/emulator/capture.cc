// Captures, and the graphs that result from them.
#include <algorithm>
#include <list>
#include <set>
#include <utility>

#include "emulator/stream.h"

/// What was captured, and a graph that can be launched: a copy. Steps without an order between them
/// run at the same time.
struct ringcomm::emulator::GraphTag {
  std::vector<Node> nodes;
  std::mutex mutex = {};

  /// Returns when every step is done. One launch runs at a time.
  void run() {
    const std::lock_guard one_at_a_time(mutex);
    std::vector<std::atomic_flag> is_done(nodes.size());
    std::vector<std::jthread> threads;
    for (std::size_t step = 0; step < nodes.size(); ++step)
      threads.emplace_back([&, step] {
        for (const std::size_t before : nodes[step].after) is_done[before].wait(false);
        nodes[step].work();
        is_done[step].test_and_set();
        is_done[step].notify_all();
      });
  }
};

namespace ringcomm::emulator {
namespace {

thread_local int capture_mode = kCaptureGlobal;

/// The captures that have not ended; guarded by capture_mutex().
std::list<std::shared_ptr<Capture>>& captures() {
  static auto& all = *new std::list<std::shared_ptr<Capture>>();
  return all;
}

/// Takes all of its streams out of it.
void end(const std::shared_ptr<Capture>& capture) {
  capture->has_ended = true;
  for (const std::weak_ptr<StreamTag>& weak : capture->streams)
    if (const auto stream = weak.lock(); stream != nullptr) {
      stream->capture = nullptr;
      stream->tails.clear();
    }
  captures().remove(capture);
}

/// Whether the origin stream is ordered after all captured work.
bool is_joined(const Capture& capture, const StreamTag& origin) {
  std::set<std::size_t> reached(origin.tails.begin(), origin.tails.end());
  for (std::size_t node = capture.nodes.size(); node-- > 0;)  // each depends on earlier ones
    if (reached.contains(node))
      reached.insert(capture.nodes[node].after.begin(), capture.nodes[node].after.end());
  return reached.size() == capture.nodes.size();
}

}  // namespace

std::mutex& capture_mutex() {
  static std::mutex& mutex = *new std::mutex();
  return mutex;
}

Result submit(StreamTag& stream, std::function<void()> work) {
  const std::lock_guard lock(capture_mutex());
  if (stream.capture == nullptr) {
    stream.enqueue(std::move(work));
    return kSuccess;
  }
  Capture& capture = *stream.capture;
  if (capture.is_invalidated) return kCaptureWasInvalidated;
  capture.nodes.push_back({std::move(work), std::move(stream.tails)});
  stream.tails = {capture.nodes.size() - 1};
  return kSuccess;
}

Result check_unsafe_call(StreamTag* stream) {
  const std::lock_guard lock(capture_mutex());
  if (stream != nullptr && stream->capture != nullptr)
    return stream->capture->spoil(kCaptureUnsupported);
  Result result = kSuccess;
  for (const std::shared_ptr<Capture>& capture : captures())
    if (capture_mode != kCaptureRelaxed && capture->mode != kCaptureRelaxed)
      result = capture->spoil(kCaptureUnsupported);
  return result;
}

bool is_capturing(StreamTag& stream) {
  const std::lock_guard lock(capture_mutex());
  return stream.capture != nullptr;
}

Result api::stream_begin_capture(StreamHandle handle, int mode) {
  if (handle == nullptr) return kCaptureUnsupported;
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(handle, &stream));
  if (mode != kCaptureGlobal && mode != kCaptureRelaxed) return kNotSupported;
  const std::lock_guard lock(capture_mutex());
  if (stream->capture != nullptr) return kCaptureUnsupported;
  static unsigned long long num_captures = 0;  // guarded by capture_mutex()
  stream->capture = std::make_shared<Capture>(
      Capture{.id = ++num_captures, .mode = mode, .nodes = {}, .streams = {stream}});
  captures().push_back(stream->capture);
  return kSuccess;
}

Result api::stream_end_capture(StreamHandle handle, Graph* graph) {
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(handle, &stream));
  *graph = nullptr;
  const std::lock_guard lock(capture_mutex());
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return kInvalidValue;
  const bool joined = is_joined(*capture, *stream);
  end(capture);
  if (capture->is_invalidated) return kCaptureWasInvalidated;
  if (!joined) return kCaptureUnjoined;
  *graph = Handles<GraphTag>::all().add(std::make_shared<GraphTag>(std::move(capture->nodes)));
  return kSuccess;
}

Result api::stream_get_capture_info(StreamHandle handle, int* status, unsigned long long* id,
                                    cuda::CapturedGraph*, const cuda::CapturedNode**,
                                    std::size_t*) {
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(handle, &stream));
  const std::lock_guard lock(capture_mutex());
  *status = stream->capture == nullptr        ? kCaptureNone
            : stream->capture->is_invalidated ? kCaptureInvalidated
                                              : kCaptureActive;
  if (id != nullptr && stream->capture != nullptr) *id = stream->capture->id;
  return kSuccess;
}

Result api::exchange_capture_mode(int* mode) {
  RINGCOMM_TRY(require_initialized());
  std::swap(*mode, capture_mode);
  return kSuccess;
}

Result api::graph_instantiate(GraphExec* exec, Graph graph, unsigned long long flags) {
  RINGCOMM_TRY(require_initialized());
  const std::shared_ptr<GraphTag> found = Handles<GraphTag>::all().find(graph);
  if (found == nullptr) return kInvalidValue;
  if (flags != 0) return kNotSupported;
  *exec = Handles<GraphTag>::all().add(std::make_shared<GraphTag>(found->nodes));
  return kSuccess;
}

Result api::graph_launch(GraphExec exec, StreamHandle handle) {
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(handle, &stream));
  const std::shared_ptr<GraphTag> found = Handles<GraphTag>::all().find(exec);
  if (found == nullptr) return kInvalidValue;
  const std::lock_guard lock(capture_mutex());
  // A graph in a graph is beyond the emulator.
  if (stream->capture != nullptr) return stream->capture->spoil(kCaptureUnsupported);
  stream->enqueue([found] { found->run(); });
  return kSuccess;
}

Result api::graph_exec_destroy(GraphExec exec) { return graph_destroy(exec); }

Result api::graph_destroy(Graph graph) {
  RINGCOMM_TRY(require_initialized());
  return Handles<GraphTag>::all().remove(graph) != nullptr ? kSuccess : kInvalidValue;
}

}  // namespace ringcomm::emulator
