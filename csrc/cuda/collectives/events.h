#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "core/errors.h"
#include "cuda/collectives/leaving.h"
#include "cuda/collectives/record_exchange.h"
#include "cuda/driver/driver.h"

namespace ringcomm::cuda {

/// A point in a stream. All functions throw Error and need the device's context to be current.
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

  /// Records an event after the work that the stream holds now. The event is reused after its last
  /// owner has released it; a stream that already waits for it keeps waiting for the earlier
  /// recording.
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

/// The number of the capture that a stream is part of; 0 if none.
std::uint64_t capture_of(StreamHandle stream);

/// A stream, and the capture that it is part of during one call; queried once per call.
struct StreamPlace {
  StreamHandle stream = nullptr;
  std::uint64_t capture = 0;

  static StreamPlace of(StreamHandle stream) { return {stream, capture_of(stream)}; }
};

/// Orders work as it is enqueued, also on different streams. Captured work is ordered only within
/// its capture, because the user decides when the graph runs.
class StreamOrder {
 public:
  /// Makes the stream wait for the last recorded work, if that is on another stream.
  void wait(const StreamPlace& place) const;
  /// Call it after work was enqueued and `end` recorded after it.
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
  std::map<std::uint64_t, Last> captured_;  // by capture; the newest ones only
};

/// Two alternating events of each rank of a group, which the streams of any rank can wait for.
class TurnEvents {
 public:
  /// Collective. `leaving` is the group's. Throws Unavailable, with the same reason on all ranks.
  TurnEvents(RecordExchange& exchange, Leaving& leaving);
  TurnEvents(const TurnEvents&) = delete;
  TurnEvents& operator=(const TurnEvents&) = delete;

  void record(std::uint64_t turn, StreamHandle stream);
  /// Makes the stream wait for the events that all ranks recorded for this turn. Their hosts must
  /// have recorded them before.
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
