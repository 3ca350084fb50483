#include "emulator/graph.h"

#include <atomic>
#include <condition_variable>

#include "emulator/thread_pool.h"

namespace ringcomm::emulator {

struct GraphExecTag::Launch {
  explicit Launch(const std::vector<Node>& nodes)
      : num_missing(nodes.size()), num_left(nodes.size()) {
    for (std::size_t i = 0; i < nodes.size(); ++i) num_missing[i] = nodes[i].after.size();
  }
  std::vector<std::atomic<std::size_t>> num_missing;  // steps that each still waits for
  std::mutex mutex;
  std::condition_variable is_done;
  std::size_t num_left;
};

GraphExecTag::GraphExecTag(std::vector<Node> captured)
    : nodes_(std::move(captured)), before_(nodes_.size()) {
  for (std::size_t i = 0; i < nodes_.size(); ++i)
    for (const int before : nodes_[i].after)
      before_[static_cast<std::size_t>(before)].push_back(static_cast<int>(i));
}

void GraphExecTag::run() {
  const std::lock_guard one_at_a_time(mutex_);
  const auto launch = std::make_shared<Launch>(nodes_);
  std::vector<int> first;
  for (std::size_t i = 0; i < nodes_.size(); ++i)
    if (nodes_[i].after.empty()) first.push_back(static_cast<int>(i));
  for (std::size_t i = 1; i < first.size(); ++i)
    ThreadPool::of_process().start([this, launch, node = first[i]] { run_from(node, launch); });
  if (!first.empty()) run_from(first[0], launch);
  std::unique_lock lock(launch->mutex);
  launch->is_done.wait(lock, [&] { return launch->num_left == 0; });
}

void GraphExecTag::run_from(int node, const std::shared_ptr<Launch>& launch) {
  while (node >= 0) {
    nodes_[static_cast<std::size_t>(node)].work();
    int next = -1;  // this thread goes on with one, the others get threads of their own
    for (const int after : before_[static_cast<std::size_t>(node)]) {
      if (--launch->num_missing[static_cast<std::size_t>(after)] != 0) continue;
      if (next < 0)
        next = after;
      else
        ThreadPool::of_process().start([this, launch, after] { run_from(after, launch); });
    }
    const std::lock_guard lock(launch->mutex);
    if (--launch->num_left == 0) launch->is_done.notify_all();
    node = next;
  }
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
