#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "emulator/capture.h"

struct ringcomm::emulator::GraphTag {
  explicit GraphTag(std::vector<Node> captured) : nodes(std::move(captured)) {}
  std::vector<Node> nodes;
};

/// A graph that can be launched. Steps that do not come after each other run at the same time.
struct ringcomm::emulator::GraphExecTag {
  explicit GraphExecTag(std::vector<Node> captured);
  /// Returns when every step is done. One launch runs at a time.
  void run();

 private:
  struct Launch;
  void run_from(int node, const std::shared_ptr<Launch>& launch);

  std::vector<Node> nodes_;
  std::vector<std::vector<int>> before_;  // the steps that come after each one
  std::mutex mutex_;
};
