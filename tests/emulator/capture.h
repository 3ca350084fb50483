#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "emulator/stream.h"

namespace ringcomm::emulator {

/// A step of a graph, and the steps that it depends on.
struct Node {
  std::function<void()> work;
  std::vector<int> after;
};

/// The work that streams submit between cuStreamBeginCapture and cuStreamEndCapture.
struct Capture {
  unsigned long long id = 0;  // never 0, nor another's
  int mode = kCaptureGlobal;
  std::thread::id thread;
  StreamHandle origin = nullptr;
  bool is_invalidated = false;
  bool has_ended = false;
  std::vector<Node> nodes;
  std::vector<std::weak_ptr<StreamTag>> streams;  // the origin, and what events have joined to it
};

/// Guards every Capture, and the capture that streams and events belong to.
std::mutex& capture_mutex();

/// Gives the work to the stream, or to the graph that it captures; there it may run many times.
Result submit(StreamTag& stream, std::function<void()> work);

/// An error, which also ends what is captured, if a capture forbids this thread what might wait for
/// the device: allocation, queries, synchronization.
Result check_unsafe_call();
/// An error, which also ends the capture, if the stream is in one.
Result check_not_capturing(StreamTag& stream);
/// An error, which also ends the capture unless `only_asks`, if a stream captures that the null
/// stream of CUDA would wait for.
Result check_null_stream(Context context, bool only_asks);
bool is_capturing(StreamTag& stream);
void invalidate_capture(StreamTag& stream);

}  // namespace ringcomm::emulator
