#pragma once

#include "emulator/torch/extra_driver.h"
#include "emulator/torch/streams.h"

namespace ringcomm::emulator {

/// Work that a stream was given once and that runs again with each replay, on the same memory.
/// What was allocated meanwhile is never used for anything else.
class CapturedGraph {
 public:
  CapturedGraph() = default;
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  /// From now on the current stream only notes what it is given. Not the null stream.
  void begin();
  /// Called with the same current stream. Throws where the capture was spoilt.
  void end();
  /// Gives the work to the current stream.
  void replay();

 private:
  GraphExec exec_ = nullptr;
};

}  // namespace ringcomm::emulator
