#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/recorder.h"

/// A trace of this process for `ringcomm trace`: the recorder's ring once more, in a file, as large
/// as asked, with more kinds of events. It survives if the process is killed.
/// docs/how-to/trace.md explains the events; ringcomm/trace reads them.
///
/// While nothing is traced, a Span costs one relaxed load of `active`.
namespace ringcomm::recorder {

class Trace;

/// Null while nothing is traced. Set once for each process, and never destroyed.
inline std::atomic<Trace*> active = nullptr;

inline bool is_tracing() { return active.load(std::memory_order_relaxed) != nullptr; }

/// Starts a trace. Events go to the file `events_fd`, which has room for `num_events` behind
/// a TraceHeader; then the oldest are overwritten. Rare records go to the file `log_fd` as
/// lines of JSON, so that there are as many as need be. That file stays open. A second call in one
/// process does nothing. Throws Error.
void start_trace(int events_fd, int log_fd, std::size_t num_events);

/// A group of ranks, by their numbers in the job; `group` is its number. Does nothing while off, as
/// do the functions below.
void trace_group(std::uint32_t group, const std::string& name, int rank,
                 const std::vector<std::uint64_t>& ranks, const std::string& transport);
void trace_leave(std::uint32_t group);
void trace_failure(const std::string& why);
/// A wait of this thread in the collective that it runs, as GroupState::record() has it: once for
/// all events with its begin.
void trace_wait(const PeerEvent& wait);

/// Adds an event; it begins now unless it has a begin. Any thread may end it.
Call trace(const Event& event);

/// The collective that a thread runs, for the events in it.
struct Within {
  std::uint32_t group = 0;
  std::uint64_t seq = kNoSeq;
};

/// Something that this thread does while the object lives.
class Span {
 public:
  /// `describe()` returns the Event; it is called during a trace only.
  template <class Describe>
  explicit Span(const Describe& describe) {
    if (is_tracing()) [[unlikely]]
      begin(describe());
  }
  ~Span() {
    if (call_.event != nullptr) [[unlikely]]
      end();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  /// The algorithm that ran, if it is known only at the end.
  void set_algorithm(Algorithm algorithm) {
    if (call_.is_there()) [[unlikely]]
      call_.event->algorithm = algorithm;
  }

 private:
  void begin(Event event);
  void end();

  Call call_;  // of nothing while off
  Within outer_;
};

}  // namespace ringcomm::recorder
