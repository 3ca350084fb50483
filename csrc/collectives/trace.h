#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/recorder.h"

/// A trace of this rank for `ringcomm trace`: each thread also writes events to a ring of its own
/// in a mapped file, which survives if the process is killed. docs/how-to/trace.md explains the
/// events; ringcomm/trace reads them.
///
/// While nothing is traced, a Span costs one relaxed load of `active`.
namespace ringcomm::recorder {

class Trace;
struct ThreadRing;

/// Null while nothing is traced. Set once for each process, and never destroyed.
inline std::atomic<Trace*> active = nullptr;

inline bool is_tracing() { return active.load(std::memory_order_relaxed) != nullptr; }

/// Starts a trace. Events go to the file `events_fd`, at most `num_events` of each thread; then
/// the oldest are overwritten. Rare records go to the file `log_fd` as lines of JSON. The files
/// stay open. A second call in one process does nothing.
void start_trace(int events_fd, int log_fd, std::size_t num_events);

/// A group of ranks, by their numbers in the job; `group` is its number. Does nothing while off, as
/// do the functions below.
void trace_group(std::uint32_t group, const std::string& name, int rank,
                 const std::vector<std::uint64_t>& ranks, const std::string& transport);
void trace_leave(std::uint32_t group);
void trace_failure(const std::string& why);
/// A wait of this thread in the collective that it runs, as Membership::record() has it: once for
/// all events with its begin. While it lasts, they tell that the thread is alive, so that the wait
/// of a killed process is known to have lasted until then.
void trace_wait(const PeerEvent& wait);

/// Adds an event to this thread's ring; it begins now unless it has a begin. Any thread may end it.
Call trace(Event event);

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
    if (ring_ != nullptr) [[unlikely]]
      end();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  /// The algorithm that ran, if it is known only at the end.
  void set_algorithm(Algorithm algorithm) {
    if (ring_ != nullptr && call_.is_there()) [[unlikely]]
      call_.event->algorithm = algorithm;
  }

 private:
  void begin(Event event);
  void end();

  ThreadRing* ring_ = nullptr;  // null while off; all below is set where this is
  Call call_;
  std::uint64_t outer_seq_;
  std::uint32_t outer_group_;
};

}  // namespace ringcomm::recorder
