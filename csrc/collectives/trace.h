#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// A recording of this rank for `ringcomm trace`: each thread writes events to a ring buffer in a
/// mapped file, which survives if the process is killed. docs/how-to/trace.md explains the events;
/// ringcomm/trace/recordings.py reads them.
///
/// While nothing is recorded, a Span costs one relaxed load of `active`.
namespace ringcomm::trace {

enum class Kind : std::uint8_t {
  kCall = 1,    ///< a call of torch.distributed, in the thread that makes it
  kCollective,  ///< a collective, in the thread that runs it
  kPart,        ///< the part of a collective that runs inside one host
  kStep,        ///< one step of a ring, for one slice
  kWait,        ///< for a rank, or for another thread of this one
  kMessage,     ///< a send or a receive, from the call to its end
};

inline constexpr std::uint32_t kNoGroup = ~std::uint32_t{0};
inline constexpr std::uint64_t kNoSeq = ~std::uint64_t{0};

/// One event, as it is in the file. Ranks are those of the event's group; -1 is none. Names are
/// numbers from name_number().
struct Event {
  std::uint64_t begin_ns = 0;  ///< CLOCK_MONOTONIC; 0 is filled in
  std::uint64_t end_ns = 0;    ///< 0 until it ends
  std::uint64_t seq = kNoSeq;  ///< of a collective in its group, or of a message in its process
  std::uint64_t num_bytes = 0;
  std::uint32_t group = kNoGroup;  ///< kNoGroup takes group and seq of the span around it
  std::int32_t to = -1;            ///< the rank that it sends to
  std::int32_t from = -1;          ///< the rank that it receives from, or waits for
  std::int32_t root = -1;
  std::int32_t chunk = -1;  ///< of a step
  std::uint32_t slice = 0;  ///< of a step
  std::int16_t step = -1;   ///< of a step; -1 is the first send, which receives nothing
  Kind kind = Kind::kCall;
  std::uint8_t name = 0;
  std::uint8_t dtype = 0;
  std::uint8_t reduction = 0;
  std::uint8_t algorithm = 0;
  std::uint8_t unused = 0;
};
static_assert(sizeof(Event) == 64);

class Recorder;
struct Buffer;

/// Null while nothing is recorded. Set once for each process, and never destroyed.
inline std::atomic<Recorder*> active = nullptr;

inline bool is_on() { return active.load(std::memory_order_relaxed) != nullptr; }

/// Starts recording. Events go to the file `events_fd`, at most `num_events` of each thread; then
/// the oldest are overwritten. Rare records go to the file `log_fd` as lines of JSON. The files
/// stay open. A second call in one process does nothing.
void start(int events_fd, int log_fd, std::size_t num_events);

/// A group of ranks, by their numbers in the job; its number for Event::group. Call while is_on().
std::uint32_t add_group(const std::string& name, int rank, const std::vector<std::uint64_t>& ranks,
                        const std::string& transport);
/// This rank has left the group. Does nothing while off, as do the functions below.
void leave_group(std::uint32_t group);
/// A group has failed, and why.
void add_failure(const std::string& why);
/// Records that this thread still waits, so that the wait of a killed process is known to have
/// lasted until then.
void record_alive();

/// The number of a string literal. Call while is_on().
std::uint8_t name_number(const char* literal);
std::uint64_t now_ns();
/// Adds an event that is over, or one (end_ns 0) whose end follows as a second event of its seq.
void add(const Event& event);

/// Something that this thread does while the object lives.
class Span {
 public:
  /// `describe()` returns the Event; it is called while recording only.
  template <class Describe>
  explicit Span(const Describe& describe) {
    if (is_on()) [[unlikely]]
      begin(describe());
  }
  ~Span() {
    if (buffer_ != nullptr) [[unlikely]]
      end();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  /// The algorithm that ran, if it is known only at the end.
  void set_algorithm(const char* literal) {
    if (buffer_ != nullptr) [[unlikely]]
      change_algorithm(literal);
  }

 private:
  void begin(Event event);
  void end();
  void change_algorithm(const char* literal);

  Buffer* buffer_ = nullptr;  // null while off; all below is set where this is
  std::uint64_t number_;
  std::uint64_t outer_seq_;
  std::uint32_t outer_group_;
};

}  // namespace ringcomm::trace
