#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
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

 private:
  EventHandle event_ = nullptr;
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

/// Work that runs in the order in which it is enqueued, whatever streams it is enqueued on. What is
/// captured has an order among what is captured with it alone: when a graph runs, its user says.
class StreamOrder {
 public:
  /// Makes the stream wait for what was noted last, if that is on another one.
  void wait(StreamHandle stream, std::uint64_t capture);
  /// Work has been enqueued.
  void note(StreamHandle stream, std::uint64_t capture);
  /// The host waits for all of it but what is captured.
  void synchronize();

 private:
  /// An event that was recorded in a capture is of use there alone.
  struct Last {
    Event event;
    StreamHandle stream = nullptr;
    bool is_recorded = false;
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
