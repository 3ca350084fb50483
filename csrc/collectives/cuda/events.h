#pragma once

#include <array>
#include <vector>

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

/// A stream that leaves another one and comes back to it.
class SideStream {
 public:
  SideStream();
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  StreamHandle get() const { return stream_; }
  /// Blocks until it is done.
  void finish() const;
  void leave(StreamHandle main);
  void join(StreamHandle main);

 private:
  StreamHandle stream_ = nullptr;
  Event left_;
  Event joined_;
};

/// Events of all ranks of a group, two of each in turn, which streams of any of them can wait for.
class TurnEvents {
 public:
  /// Collective. Throws Unavailable, with the same reason on all ranks.
  explicit TurnEvents(RecordExchange& exchange);
  ~TurnEvents();
  TurnEvents(const TurnEvents&) = delete;
  TurnEvents& operator=(const TurnEvents&) = delete;

  void record(std::uint64_t turn, StreamHandle stream);
  /// Makes the stream wait for what all ranks recorded last for this turn. Their hosts must have
  /// recorded it before.
  void block(std::uint64_t turn, StreamHandle stream) const;

 private:
  int rank_;
  std::array<Event, 2> own_;
  std::vector<std::array<EventHandle, 2>> peers_;
  std::vector<bool> is_opened_;
};

bool is_capturing(StreamHandle stream);

}  // namespace ringcomm::cuda
