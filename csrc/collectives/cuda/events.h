#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "collectives/cuda/leaving.h"
#include "collectives/cuda/record_exchange.h"
#include "core/errors.h"
#include "transport/cuda/driver.h"

namespace ringcomm::cuda {

/// A point in a stream. All functions throw Error, and want the device's context to be current.
class Event {
 public:
  explicit Event(unsigned flags = kEventDisableTiming);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  EventHandle get() const { return event_; }
  void record(StreamHandle stream);
  void block(StreamHandle stream) const;
  /// Whether the stream has passed it. In a relaxed capture mode where a capture may be under way.
  bool is_over() const;

 private:
  EventHandle event_ = nullptr;
};

/// The events of a device that are used again. Recording one costs one call of the driver. From any
/// thread; kept as long as the process.
class EventPool {
 public:
  static EventPool& of(DeviceOrdinal device);
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  /// An event behind what the stream holds now. It is recorded again when its last owner has let
  /// it go: streams that were told to wait for it wait for what was recorded then.
  std::shared_ptr<Event> record(StreamHandle stream);

 private:
  EventPool() = default;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> free_;  // guarded by mutex_
};

/// A stream of its own.
class SideStream {
 public:
  SideStream();
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  StreamHandle get() const { return stream_; }
  /// Blocks until it is done.
  void finish() const;

 private:
  StreamHandle stream_ = nullptr;
};

/// Which capture a stream is in, of those that are under way; 0: none.
std::uint64_t capture_of(StreamHandle stream);

/// A stream, and the capture that it is in while one call is enqueued: asked once for each call.
struct StreamPlace {
  StreamHandle stream = nullptr;
  std::uint64_t capture = 0;

  static StreamPlace of(StreamHandle stream) { return {stream, capture_of(stream)}; }
};

/// Work that runs in the order in which it is enqueued, whatever streams it is enqueued on. What is
/// captured has an order among what is captured with it alone: when a graph runs, its user says.
class StreamOrder {
 public:
  /// Makes the stream wait for what was noted last, if that is on another one.
  void wait(const StreamPlace& place) const;
  /// Work has been enqueued, and `end` recorded behind it.
  void note(std::shared_ptr<const Event> end, const StreamPlace& place);
  /// The host waits for all of it but what is captured.
  void synchronize() const;

 private:
  /// An event that was recorded in a capture is of use there alone.
  struct Last {
    std::shared_ptr<const Event> end;
    StreamHandle stream = nullptr;
  };
  Last run_;
  std::map<std::uint64_t, Last> captured_;  // by capture, of the newest few
};

/// Events of all ranks of a group, two of each in turn, which streams of any of them can wait for.
class TurnEvents {
 public:
  /// Collective. `leaving` is the group's. Throws Unavailable, with the same reason on all ranks.
  TurnEvents(RecordExchange& exchange, Leaving& leaving);
  TurnEvents(const TurnEvents&) = delete;
  TurnEvents& operator=(const TurnEvents&) = delete;

  void record(std::uint64_t turn, StreamHandle stream);
  /// Makes the stream wait for what all ranks recorded last for this turn. Their hosts must have
  /// recorded it before.
  void block(std::uint64_t turn, StreamHandle stream) const;
  /// Whether what a rank recorded for its last two turns is over.
  bool are_over(int peer) const;

 private:
  int rank_;
  std::array<std::shared_ptr<Event>, 2> own_;
  std::vector<std::array<EventHandle, 2>> peers_;
  struct Close {
    void operator()(EventHandle event) const { driver().event_destroy(event); }
  };
  std::vector<std::unique_ptr<std::remove_pointer_t<EventHandle>, Close>> opened_;
};

}  // namespace ringcomm::cuda
