#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "cuda/driver/driver.h"

namespace ringcomm::cuda {

/// A point in a stream. All functions throw Error, and all but is_over() and synchronize() need the
/// device's context to be current. Thread-safe once it is recorded.
///
/// Of the legacy default stream, which lives as long as the process and is never captured, the
/// event is recorded by its first use, and is then after later work as well: most calls are on that
/// stream, and nobody asks when they end.
class Event {
 public:
  explicit Event(DeviceOrdinal device) : device_(device) {
    check(driver().event_create(&event_, kEventDisableTiming), "make an event");
  }
  ~Event() { driver().event_destroy(event_); }

  void record(StreamHandle stream) {
    is_due_ = stream == nullptr;
    if (!is_due_) check(driver().event_record(event_, stream), "record an event");
  }
  void block(StreamHandle stream) const {
    check(driver().stream_wait_event(stream, recorded(true), 0), "make a stream wait for an event");
  }
  void synchronize() const { check(driver().event_synchronize(recorded()), "wait for the GPU"); }
  /// Whether the stream has passed it. In a relaxed capture mode, if there may be a capture. To
  /// record waits while the stream's queue is full; without, all of the stream must be over.
  bool is_over(bool may_record = true) const {
    const auto ask = [this] {
      const ContextGuard guard(device_);
      return driver().stream_query(nullptr);
    };
    const Result result = is_due_ && !may_record ? ask() : driver().event_query(recorded());
    if (result != kErrorNotReady) check(result, "ask whether an event is over");
    return result == kSuccess;
  }

 private:
  EventHandle recorded(bool has_context = false) const {
    if (!is_due_) return event_;
    std::optional<ContextGuard> guard;
    if (!has_context) guard.emplace(device_);
    const std::lock_guard lock(mutex_);
    if (is_due_) check(driver().event_record(event_, nullptr), "record an event");
    is_due_ = false;
    return event_;
  }

  DeviceOrdinal device_;
  EventHandle event_ = nullptr;
  mutable std::mutex mutex_;
  mutable std::atomic<bool> is_due_ = false;
};

/// The events of a device that are used again. From any thread; kept as long as the process.
class EventPool : public PerDevice<EventPool> {
 public:
  /// An event after the work that the stream holds now. It is reused after its last owner
  /// has released it; a stream that waits for it keeps waiting for the earlier recording.
  std::shared_ptr<Event> record(StreamHandle stream);

 private:
  friend PerDevice;
  explicit EventPool(DeviceOrdinal device) : device_(device) {}
  DeviceOrdinal device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> free_;  // guarded by mutex_
};

/// In StreamContext::capture: one that has failed has no number any more.
inline constexpr std::uint64_t kFailedCapture = ~std::uint64_t{0};

/// A stream, and the number of the capture that it is part of during one call; 0 if none.
struct StreamContext {
  StreamHandle handle = nullptr;
  std::uint64_t capture = 0;

  static StreamContext of(StreamHandle stream);
};

/// The last kernels of each group of this process on a device, which orders its calls as they are
/// enqueued, also on different streams; captured work only within its capture, because the user
/// decides when the graph runs. The driver waits for all kernels when memory is unmapped. Replays
/// of graphs are not known. From any thread; kept as long as the process.
class RunningKernels : public PerDevice<RunningKernels> {
 public:
  /// Held while a kernel is launched: nothing is unmapped meanwhile by if_over().
  std::shared_lock<std::shared_mutex> launching() { return std::shared_lock(launching_); }

  // Of a group's collectives, or of its messages with `peer`.
  static constexpr int kCollective = -1;
  /// Makes the stream wait for the last of them, if that is on another stream.
  void wait(const void* group, int peer, const StreamContext& stream);
  /// Call it after work was enqueued and `end` recorded after it.
  void remember(const void* group, int peer, std::shared_ptr<const Event> end,
                const StreamContext& stream);
  /// The host waits for all of a group but what is captured.
  void end(const void* group);

  // The following are called in a relaxed capture mode.
  /// Whether no messages are under way: one may wait for a peer that is in a collective.
  bool are_messages_over();
  /// Whether all is over but the collectives of one group.
  bool is_over_but_of(const void* group);
  /// Calls `body` if all is over; nothing is launched meanwhile. Returns whether it did. For
  /// threads that must not wait for the device.
  bool if_over(const std::function<void()>& body);

 private:
  friend PerDevice;
  explicit RunningKernels(DeviceOrdinal) {}
  bool are_over(const std::function<bool(const void* group, int peer)>& which,
                bool may_record = true);

  struct Last {
    std::shared_ptr<const Event> end;  ///< null: it is over
    StreamHandle stream = nullptr;
  };
  struct Order {
    Last run;
    /// By capture; the newest ones only. An event that was recorded in one is of use there alone.
    std::map<std::uint64_t, Last> captured;
  };
  std::shared_mutex launching_;                          // taken before the other
  std::mutex mutex_;                                     // guards what follows
  std::map<std::pair<const void*, int>, Order> orders_;  // by group and peer
};

/// Enqueues on a stream of its own, and blocks; `what` is for an error.
void run_and_wait(const std::function<void(StreamHandle)>& enqueue, const char* what);
/// Copies, or clears where `from` is null.
void copy_and_wait(void* to, const void* from, std::size_t num_bytes, const char* what);

}  // namespace ringcomm::cuda
