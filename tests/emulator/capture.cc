// Captures, and the graphs that result from them.
#include "emulator/capture.h"

#include <algorithm>
#include <atomic>
#include <list>
#include <set>
#include <thread>
#include <utility>

struct ringcomm::emulator::GraphTag {
  explicit GraphTag(std::vector<Node> captured) : nodes(std::move(captured)) {}
  std::vector<Node> nodes;
};

/// A graph that can be launched. Steps without an order between them run at the same time.
struct ringcomm::emulator::GraphExecTag {
  explicit GraphExecTag(std::vector<Node> captured);
  /// Returns when every step is done. One launch runs at a time.
  void run();

 private:
  std::vector<Node> nodes_;  // in an order in which each follows its dependencies
  /// Sequences of dependent steps; a launch has one thread for each.
  std::vector<std::vector<std::size_t>> chains_;
  std::mutex mutex_;
};

namespace ringcomm::emulator {

GraphExecTag::GraphExecTag(std::vector<Node> captured) : nodes_(std::move(captured)) {
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const std::vector<int>& after = nodes_[i].after;
    auto chain = std::ranges::find_if(chains_, [&](const std::vector<std::size_t>& steps) {
      return std::ranges::count(after, static_cast<int>(steps.back())) != 0;
    });
    if (chain == chains_.end()) chain = chains_.emplace(chain);
    chain->push_back(i);
  }
}

void GraphExecTag::run() {
  const std::lock_guard one_at_a_time(mutex_);
  std::vector<std::atomic_flag> is_done(nodes_.size());
  std::vector<std::jthread> threads;
  for (const std::vector<std::size_t>& chain : chains_)
    threads.emplace_back([&] {
      for (const std::size_t step : chain) {
        for (const int before : nodes_[step].after)
          is_done[static_cast<std::size_t>(before)].wait(false);
        nodes_[step].work();
        is_done[step].test_and_set();
        is_done[step].notify_all();
      }
    });
}

namespace {

thread_local int capture_mode = kCaptureGlobal;

/// The captures that have not ended; guarded by capture_mutex().
std::list<std::shared_ptr<Capture>>& captures() {
  static std::list<std::shared_ptr<Capture>>& all = *new std::list<std::shared_ptr<Capture>>();
  return all;
}

/// Whether a capture forbids the calling thread calls that might wait for the device.
bool forbids(const Capture& capture) {
  if (capture_mode == kCaptureRelaxed || capture.mode == kCaptureRelaxed) return false;
  if (capture.thread == std::this_thread::get_id()) return true;
  return capture_mode == kCaptureGlobal && capture.mode == kCaptureGlobal;
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
  std::set<int> reached(origin.tails.begin(), origin.tails.end());
  std::vector<int> open(origin.tails);
  while (!open.empty()) {
    const int node = open.back();
    open.pop_back();
    for (const int before : capture.nodes[static_cast<std::size_t>(node)].after)
      if (reached.insert(before).second) open.push_back(before);
  }
  return reached.size() == capture.nodes.size();
}

Result check_end(const Capture& capture, StreamTag& stream) {
  if (capture.origin != &stream) return kCaptureUnmatched;
  if (capture.mode != kCaptureRelaxed && capture.thread != std::this_thread::get_id())
    return kCaptureWrongThread;
  return kSuccess;
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
  stream.tails = {static_cast<int>(capture.nodes.size()) - 1};
  return kSuccess;
}

Result check_unsafe_call() {
  const std::lock_guard lock(capture_mutex());
  Result result = kSuccess;
  for (const std::shared_ptr<Capture>& capture : captures()) {
    if (!forbids(*capture)) continue;
    capture->is_invalidated = true;
    result = kCaptureUnsupported;
  }
  return result;
}

Result check_not_capturing(StreamTag& stream) {
  const std::lock_guard lock(capture_mutex());
  if (stream.capture == nullptr) return kSuccess;
  stream.capture->is_invalidated = true;
  return kCaptureUnsupported;
}

Result check_null_stream(Context context, bool only_asks) {
  const std::lock_guard lock(capture_mutex());
  Result result = kSuccess;
  for (const std::shared_ptr<Capture>& capture : captures())
    for (const std::weak_ptr<StreamTag>& weak : capture->streams) {
      const auto stream = weak.lock();
      if (stream == nullptr || stream->context != context ||
          (stream->flags & kStreamNonBlocking) != 0)
        continue;
      capture->is_invalidated |= !only_asks;
      result = kCaptureImplicit;
    }
  return result;
}

bool is_capturing(StreamTag& stream) {
  const std::lock_guard lock(capture_mutex());
  return stream.capture != nullptr;
}

void invalidate_capture(StreamTag& stream) {
  const std::lock_guard lock(capture_mutex());
  if (stream.capture != nullptr) stream.capture->is_invalidated = true;
}

Result api::stream_begin_capture(StreamHandle handle, int mode) {
  if (reinterpret_cast<std::uintptr_t>(handle) <= 1) return kCaptureUnsupported;
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream));
  if (mode < kCaptureGlobal || mode > kCaptureRelaxed) return kInvalidValue;
  const std::lock_guard lock(capture_mutex());
  if (stream->capture != nullptr) return kCaptureUnsupported;
  static unsigned long long num_captures = 0;  // guarded by capture_mutex()
  auto capture = std::make_shared<Capture>();
  capture->id = ++num_captures;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream.get();
  capture->streams.push_back(stream);
  captures().push_back(capture);
  stream->capture = std::move(capture);
  return kSuccess;
}

Result api::stream_end_capture(StreamHandle handle, Graph* graph) {
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream));
  if (graph == nullptr) return kInvalidValue;
  *graph = nullptr;
  const std::lock_guard lock(capture_mutex());
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return kInvalidValue;
  RINGCOMM_TRY(check_end(*capture, *stream));
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
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream, /*only_asks=*/true));
  if (status == nullptr) return kInvalidValue;
  const std::lock_guard lock(capture_mutex());
  *status = stream->capture == nullptr        ? kCaptureNone
            : stream->capture->is_invalidated ? kCaptureInvalidated
                                              : kCaptureActive;
  if (id != nullptr && stream->capture != nullptr) *id = stream->capture->id;
  return kSuccess;
}

Result api::exchange_capture_mode(int* mode) {
  RINGCOMM_TRY(require_initialized());
  if (mode == nullptr || *mode < kCaptureGlobal || *mode > kCaptureRelaxed) return kInvalidValue;
  std::swap(*mode, capture_mode);
  return kSuccess;
}

Result api::graph_instantiate(GraphExec* exec, Graph graph, unsigned long long flags) {
  RINGCOMM_TRY(require_initialized());
  const std::shared_ptr<GraphTag> found = Handles<GraphTag>::all().find(graph);
  if (exec == nullptr || found == nullptr) return kInvalidValue;
  if (flags != 0) return kNotSupported;
  *exec = Handles<GraphExecTag>::all().add(std::make_shared<GraphExecTag>(found->nodes));
  return kSuccess;
}

Result api::graph_launch(GraphExec exec, StreamHandle handle) {
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream));
  const std::shared_ptr<GraphExecTag> found = Handles<GraphExecTag>::all().find(exec);
  if (found == nullptr) return kInvalidValue;
  RINGCOMM_TRY(check_not_capturing(*stream));  // a graph in a graph is beyond the emulator
  return submit(*stream, [found] { found->run(); });
}

Result api::graph_exec_destroy(GraphExec exec) {
  RINGCOMM_TRY(require_initialized());
  return Handles<GraphExecTag>::all().remove(exec) != nullptr ? kSuccess : kInvalidValue;
}

Result api::graph_destroy(Graph graph) {
  RINGCOMM_TRY(require_initialized());
  return Handles<GraphTag>::all().remove(graph) != nullptr ? kSuccess : kInvalidValue;
}

}  // namespace ringcomm::emulator
