#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "emulator/device.h"
#include "emulator/handles.h"

namespace ringcomm::emulator {

struct Capture;

/// A hardware queue of a GPU. It starts the work of its streams in the order of submission. Work
/// that cannot start yet, because it is behind other work of its stream, blocks all later work; so
/// does a wait for an event until it ends.
struct HardwareQueue {
  std::atomic<std::uint64_t> num_taken = 0;
  std::atomic<std::uint64_t> num_passed = 0;

  std::uint64_t take_ticket() { return num_taken++; }
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
  StreamTag(Context of, unsigned with_flags);

  /// A wait keeps the stream's hardware queue until it is over.
  void enqueue(std::function<void()> work, bool is_wait = false);
  /// Waits for what was submitted before.
  void synchronize();
  bool is_idle();
  /// Submitted work still runs; then the thread ends.
  void close();

  const Context context;
  const unsigned flags;

  // Guarded by capture_mutex().
  std::shared_ptr<emulator::Capture> capture;  // none while it is not capturing
  std::vector<int> tails;                      // nodes that the next one depends on

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable has_news_;
  struct Item {
    std::function<void()> work;
    bool is_wait;
    std::uint64_t ticket;
  };
  emulator::HardwareQueue* const hardware_;  // null: one of its own
  std::deque<Item> queue_;
  std::uint64_t num_enqueued_ = 0;
  std::uint64_t num_done_ = 0;
  bool has_thread_ = false;
  bool is_closed_ = false;
};

namespace ringcomm::emulator {

/// The stream of this handle; 0 and 1 are the null stream of the current context. Names what is
/// wrong with the handle, the context, or a null stream that a capture forbids, and then ends that
/// capture unless `only_asks`.
Result find_stream(StreamHandle handle, std::shared_ptr<StreamTag>* stream, bool only_asks = false);

/// Waits for all streams of a context.
void synchronize_context(Context context);

}  // namespace ringcomm::emulator
