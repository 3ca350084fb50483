#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "emulator/device.h"

namespace ringcomm::emulator {

/// A step of a graph, and the steps that it depends on, which come before it.
struct Node {
  std::function<void()> work;
  std::vector<std::size_t> after;
};

/// The work that streams submit between cuStreamBeginCapture and cuStreamEndCapture.
struct Capture {
  unsigned long long id = 0;  // never 0, nor another's
  int mode = kCaptureGlobal;
  bool is_invalidated = false;
  bool has_ended = false;
  std::vector<Node> nodes;
  std::vector<std::weak_ptr<StreamTag>> streams;  // the origin, and what events have joined to it

  /// Ends what is captured with an error; returns that of the call that did it.
  Result spoil(Result why) {
    is_invalidated = true;
    return why;
  }
};

/// A hardware queue of a GPU. It starts the work of its streams in the order of submission. Work
/// that cannot start yet, because it is behind other work of its stream, blocks all later work; so
/// does a wait for an event until it ends.
struct HardwareQueue {
  std::atomic<std::uint64_t> num_taken = 0;
  std::atomic<std::uint64_t> num_passed = 0;

  void wait_for_turn(std::uint64_t ticket) {
    for (std::uint64_t passed; (passed = num_passed) != ticket;) num_passed.wait(passed);
  }
  void pass_on() {
    ++num_passed;
    num_passed.notify_all();
  }
};

}  // namespace ringcomm::emulator

/// Work that a thread of its own runs one by one, in the order of submission.
struct ringcomm::cuda::StreamTag : std::enable_shared_from_this<StreamTag> {
 public:
  explicit StreamTag(Context of);

  /// A wait keeps the stream's hardware queue until it is over.
  void enqueue(std::function<void()> work, bool is_wait = false);
  /// Waits for what was submitted before.
  void synchronize();
  bool is_idle();
  /// Submitted work still runs; then the thread ends.
  void close();

  const Context context;

  // Guarded by capture_mutex().
  std::shared_ptr<emulator::Capture> capture;  // none while it is not capturing
  std::vector<std::size_t> tails;              // nodes that the next one depends on

 private:
  void run();

  struct Item {
    std::function<void()> work;
    bool is_wait;
    std::uint64_t ticket;
  };
  std::mutex mutex_;
  std::condition_variable has_news_;
  const std::shared_ptr<emulator::HardwareQueue> hardware_;
  const unsigned number_;  // of the process's streams, in the order of creation
  std::deque<Item> queue_;
  std::uint64_t num_enqueued_ = 0;
  std::uint64_t num_done_ = 0;
  bool has_thread_ = false;
  bool is_closed_ = false;
};

namespace ringcomm::emulator {

/// The stream of this handle; null is that of the current context.
Result find_stream(StreamHandle handle, std::shared_ptr<StreamTag>* stream);

/// Waits for all streams of a context.
void synchronize_context(Context context);

// ---- captures

/// Guards every Capture, and the capture that streams and events belong to.
std::mutex& capture_mutex();

/// Gives the work to the stream, or to the graph that it captures; there it may run many times.
Result submit(StreamTag& stream, std::function<void()> work);

/// An error, which also ends what is captured, if a capture forbids this thread what might wait for
/// the device: allocation, queries, synchronization. So it is if the stream itself is in a capture.
Result check_unsafe_call(StreamTag* stream = nullptr);
bool is_capturing(StreamTag& stream);

}  // namespace ringcomm::emulator
