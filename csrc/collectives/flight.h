#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/call_header.h"
#include "collectives/collective.h"
#include "collectives/op_kind.h"
#include "host/call_step.h"
#include "host/membership.h"
#include "host/peer_event.h"

/// The flight recorder: the last calls of this process, always on. They are in a memfd of the
/// process that its peers map, so it outlives the process, and which a process of the same user
/// can read from outside (ringcomm/trace/flight.py, which has the layout too). The bootstrap's
/// thread also reads it: it says which calls wait for long, and for whom.
namespace ringcomm::flight {

inline constexpr std::size_t kNumEvents = 1024;  // the last ones
inline constexpr std::size_t kNumGroups =
    128;  // a group takes the place of one that ended; none records nothing
inline constexpr std::size_t kNumMembers = 64;  // the first ranks of a group
inline constexpr std::int32_t kNobody = -1, kAnyRank = -2;

/// A collective, from the start of its run, or a message, from the call: a line of its own. Written
/// by one thread at a time; a reader sees by `number`, before and after, whether it is the same.
/// A call on a device begins when it is enqueued; it ends when the host sees that, or never.
struct Event {
  std::uint64_t number = 0;  ///< of the process's calls, from 1 on; 0 while it is replaced
  std::uint64_t begin_ticks = 0;
  std::uint64_t end_ticks = 0;  ///< 0 until it ends
  std::uint64_t seq = 0;        ///< of a collective in its group; of a message its tag
  std::uint64_t num_bytes = 0;
  std::uint16_t group = 0;           ///< its place among the groups
  std::uint16_t on_device = 0;       ///< whether it was enqueued
  std::int32_t peer = -1;            ///< the root, or the other rank of a message
  std::int32_t waits_for = kNobody;  ///< the rank that a long wait is for
  OpKind op = OpKind::kBarrier;
  DType dtype = DType::kByte;
  Reduction reduction = Reduction::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  CallStep step = {};  ///< that the long wait is in

  /// Of a live event, too.
  bool is_waiting() const {
    return __atomic_load_n(&number, __ATOMIC_RELAXED) != 0 &&
           __atomic_load_n(&waits_for, __ATOMIC_RELAXED) != kNobody &&
           __atomic_load_n(&end_ticks, __ATOMIC_RELAXED) == 0;
  }
};
static_assert(sizeof(Event) == 64);

Event event_of(const Collective& call, const CallHeader& header);

/// What a rank has counted of one of its peers since the group was made.
struct PeerCounts {
  std::uint64_t num_waits = 0;  ///< for it that were long (kLongWait_us)
  std::uint64_t waited_ns = 0;  ///< in these
  /// Collectives in which it was the last for which the rank waited long (1 ms for a message)
  /// until all had begun.
  std::uint64_t num_late = 0;
  std::uint64_t sent_bytes = 0, received_bytes = 0;  ///< in messages, without the library's own
  std::uint64_t unused[3] = {};
};
static_assert(sizeof(PeerCounts) == 64);
inline constexpr std::uint64_t kLongWait_us = 100;

/// A group as one of its ranks knows it.
struct GroupEntry {
  struct Member {
    std::int32_t pid;          ///< as this process sees it; -1 if it does not, as on another host
    std::int32_t global_rank;  ///< in the job
  };
  enum State : std::uint32_t { kUnused, kAlive, kFailed, kLeft };

  std::uint32_t state;
  std::int32_t rank, world_size;
  std::int32_t culprit;        ///< of the failure; -1 if it has none, or nobody is known
  std::uint64_t id;            ///< equal on all ranks of a group
  std::uint64_t failed_ticks;  ///< a call that ends later has failed
  std::uint64_t number;        ///< of the process's groups
  char name[48];
  char transport[96];
  char failure[256];
  Member members[kNumMembers];
};

struct Header {
  static constexpr char kMagic[9] = "RINGFLY2";
  char magic[8];
  std::uint64_t num_bytes;
  std::int32_t pid, unused;
  std::uint64_t anchor_ticks, anchor_ns;  ///< the same moment by both clocks
  char version[32];                       ///< of ringcomm
  std::uint64_t num_calls;
};

/// Layout of the memfd: a page with the header, groups, events, what each group's rank has counted.
struct Memory {
  explicit Memory(std::byte* data) : data_(data) {}
  Header& header() const { return *reinterpret_cast<Header*>(data_); }
  GroupEntry* groups() const { return reinterpret_cast<GroupEntry*>(data_ + kGroupsOffset); }
  Event* events() const { return reinterpret_cast<Event*>(data_ + kEventsOffset); }
  PeerCounts* counts(std::uint32_t place) const {
    return reinterpret_cast<PeerCounts*>(data_ + kCountsOffset) + place * kNumMembers;
  }

  static constexpr std::size_t kGroupsOffset = 4096;
  static constexpr std::size_t kEventsOffset = kGroupsOffset + kNumGroups * sizeof(GroupEntry);
  static constexpr std::size_t kCountsOffset = kEventsOffset + kNumEvents * sizeof(Event);
  static constexpr std::size_t kNumBytes =
      kCountsOffset + kNumGroups * kNumMembers * sizeof(PeerCounts);
  static_assert(kEventsOffset % 64 == 0);

 private:
  std::byte* data_;
};

/// Makes this process's recorder, before its first group; later calls do nothing. Where the system
/// has no memory for it, nothing is recorded.
void start();
/// Its descriptor; -1 if there is none.
int descriptor();
/// Whether the cycle counter has one rate on all cores, also while they sleep.
extern const bool has_cycle_counter;
/// Now, by CLOCK_MONOTONIC and by the clock of events.
std::uint64_t monotonic_ns();
inline std::uint64_t ticks() {
#if defined(__x86_64__)
  if (has_cycle_counter) [[likely]]
    return __builtin_ia32_rdtsc();
#endif
  return monotonic_ns();
}
/// kLongWait_us in ticks, once there is a group.
inline std::atomic<std::int64_t> long_wait_ticks = std::numeric_limits<std::int64_t>::max();
/// `waited` ticks if that is long, else 0; negative where the counters of two sockets differ.
constexpr std::uint64_t if_long(std::int64_t waited, std::int64_t least) {
  return waited >= least ? static_cast<std::uint64_t>(waited) : 0;
}
/// The ticks since a wait began if it was long, else 0.
inline std::uint64_t long_wait_since(std::uint64_t begin) {
  return if_long(static_cast<std::int64_t>(ticks() - begin),
                 long_wait_ticks.load(std::memory_order_relaxed));
}

/// A consistent copy of an event, unless it is just being replaced.
std::optional<Event> read(const Event& from);

/// Turns ticks of this machine into durations.
class Clock {
 public:
  explicit Clock(const Header& header) : now_(ticks()) {
    const std::uint64_t passed_ns = monotonic_ns() - header.anchor_ns;
    const std::uint64_t passed = now_ - header.anchor_ticks;
    ns_per_tick_ = passed > 0 ? static_cast<double>(passed_ns) / static_cast<double>(passed) : 1;
  }
  std::uint64_t seconds_since(std::uint64_t then) const {
    return then >= now_ ? 0 : ns_of(now_ - then) / 1'000'000'000;
  }
  std::uint64_t ns_of(std::uint64_t ticks) const {
    return static_cast<std::uint64_t>(static_cast<double>(ticks) * ns_per_tick_);
  }
  std::uint64_t ticks_of(std::uint64_t ns) const {
    return static_cast<std::uint64_t>(static_cast<double>(ns) / ns_per_tick_);
  }

 private:
  std::uint64_t now_;
  double ns_per_tick_;
};

/// A call that has begun. Of nothing if there is no recorder.
struct Call {
  Event* event = nullptr;
  std::uint64_t number = 0;

  /// False where a later call has taken its place.
  bool is_there() const {
    return event != nullptr && __atomic_load_n(&event->number, __ATOMIC_RELAXED) == number;
  }
  void record_wait(std::int32_t peer, CallStep step = {}) const {
    if (!is_there()) return;
    __atomic_store_n(&event->waits_for, peer, __ATOMIC_RELAXED);
    __atomic_store(&event->step, &step, __ATOMIC_RELAXED);
  }
};

/// This rank's side of a group in the recorder. Its calls may begin and end in any thread.
class Log {
 public:
  /// Null if there is no recorder, or no place for another group. `log_waits`: long waits are
  /// written to stderr.
  static std::unique_ptr<Log> make(const std::string& name, int rank,
                                   const std::vector<std::uint64_t>& global_ranks,
                                   const std::string& transport, const Membership& members,
                                   bool log_waits);
  /// The rank has left the group.
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  /// Takes the place of the oldest call for which nobody waits.
  Call begin(const Event& described);
  static void end(const Call& call);
  void fail(const std::string& why, int culprit);

  /// Of the collective that runs; in its thread.
  void record(const PeerEvent& event, CallStep step);
  /// From any thread. `ticks` may be 0.
  void count_wait(int peer, std::uint64_t ticks);
  void count_bytes(int peer, std::uint64_t sent, std::uint64_t received);
  /// The collectives that have ended.
  std::uint64_t num_calls() const { return num_calls_.load(std::memory_order_relaxed); }
  /// What `rank` has counted of each rank; empty where this process cannot read it.
  std::vector<PeerCounts> counts_of(int rank) const;
  /// Whether all ranks before this one have died in the group: one rank reports for all.
  bool is_first_alive() const;

 private:
  friend class Recorder;
  friend class LongWaits;
  friend class Run;
  void end_running();
  Log(class Recorder& recorder, std::uint32_t place);
  std::optional<std::pair<Memory, std::uint32_t>> find(int rank) const;

  Recorder& recorder_;
  std::uint32_t place_;
  std::uint64_t id_ = 0;
  int rank_ = 0;
  std::vector<PeerCounts> own_counts_;  // of a group with more ranks than its entry
  PeerCounts* counts_ = nullptr;        // these, or the entry's
  int last_late_ = kNobody;             // in the collective that runs
  std::atomic<std::uint64_t> num_calls_ = 0;
  PeerProcesses processes_;
  bool log_waits_ = false;
  bool has_said_idle_ = false, has_asked_idle_ = false;  // LongWaits'
  Call running_;
};

/// A collective that runs while this lives. `log` may be null.
class Run {
 public:
  Run(Log* log, const Event& described) : log_(log) {
    if (log != nullptr) log->running_ = log->begin(described);
  }
  ~Run() {
    if (log_ != nullptr) log_->end_running();
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

 private:
  Log* log_;
};

/// Writes to stderr which calls wait for long, and for whom: a collective by one rank of a machine.
/// A rank that waits for a process that sleeps outside of calls is idle, as a server is between two
/// requests: a group says that once.
class LongWaits {
 public:
  /// Looks at the calls that `memory` records, of the groups `logs`. Every few seconds.
  void look(const Memory& memory, const std::set<Log*>& logs);

 private:
  struct Wait {
    std::uint64_t begin_ticks = 0;  ///< of a message: when it was first seen to be waited for
    std::size_t num_said = 0;
    /// Of the process that it waits for, when the wait was seen or said; none if that is not here.
    std::optional<std::uint64_t> cpu_ms = {};
    std::uint64_t cpu_seen_ns = 0;
  };

  static bool is_idle(const Log& log, const Event& event, Wait& wait);
  static bool is_said_by_another(const Log& log, const Event& event);
  static std::string text_of(const Log& log, const Event& event, const Wait& wait,
                             const Clock& clock, bool is_idle);

  std::map<std::uint64_t, Wait> waits_;  // by the numbers of the calls
};

/// The shell's command that writes the doctor's verdict on this process's job to stderr: it runs
/// for a wait of 60 s. Its signals are blocked. Once for each process.
void set_doctor(const std::string& command);

}  // namespace ringcomm::flight
