#pragma once

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
}

/// Work that a thread of its own runs one by one, in the order of submission.
struct ringcomm::cuda::StreamTag : std::enable_shared_from_this<StreamTag> {
 public:
  StreamTag(Context of, unsigned with_flags) : context(of), flags(with_flags) {}

  void enqueue(std::function<void()> work);
  /// Waits for what was submitted before.
  void synchronize();
  bool is_idle();
  /// What was submitted still runs; then the thread ends.
  void close();

  const Context context;
  const unsigned flags;

  // Guarded by capture_mutex().
  std::shared_ptr<emulator::Capture> capture;  // none while it is not capturing
  std::vector<int> tails;                      // nodes that the next one comes after

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable has_news_;
  std::deque<std::function<void()>> queue_;
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
