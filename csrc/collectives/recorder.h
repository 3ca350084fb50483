#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collectives/call.h"
#include "collectives/record_format.h"
#include "host/group_state.h"
#include "host/peer_process.h"

/// The flight recorder: the last calls of this process, always on. They are in a memfd of the
/// process that its peers map, so it outlives the process, and which a process of the same user
/// can read from outside. The bootstrap's thread also reads it (LongWaits).
namespace ringcomm::recorder {

/// Makes this process's recorder, before its first group; later calls do nothing. Where the system
/// has no memory for it, nothing is recorded.
void start();
/// Its descriptor; -1 if there is none.
int descriptor();

/// Of a collective, or a message, of the group of that number.
Event event_of(const Collective& call, std::uint32_t group);
/// A number for a group that has no Log, unlike those of groups that have one.
std::uint32_t unlisted_group();

/// An event that has begun, in any ring. Of nothing if it is not recorded.
struct Call {
  Event* event = nullptr;
  std::uint64_t number = 0;

  /// False where a later event has taken its place.
  bool is_there() const {
    return event != nullptr && __atomic_load_n(&event->number, __ATOMIC_RELAXED) == number;
  }
  void end() const {
    if (is_there()) __atomic_store_n(&event->end_ticks, ticks(), __ATOMIC_RELAXED);
  }
  void set_peer(int peer) const {
    if (is_there()) __atomic_store_n(&event->peer, rank16(peer), __ATOMIC_RELAXED);
  }
  void record_wait(int peer, CallStep step = {}) const {
    if (!is_there()) return;
    __atomic_store_n(&event->waits_for, rank16(peer), __ATOMIC_RELAXED);
    __atomic_store(&event->step, &step, __ATOMIC_RELAXED);
  }
};

/// Writes an event to a ring of `capacity`, whose last one has the number `num_events`, in the
/// place of the oldest for which nobody waits. It begins now unless it has a begin.
Call put(Event* ring, std::size_t capacity, std::uint64_t& num_events, Event event);

/// What is called for a group every ten seconds, unless it is empty.
struct Look {
  std::mutex mutex;  ///< held while it runs
  std::function<void()> run = {};
};

/// A group of this process, as the recorder knows it.
struct RecordedGroup {
  std::uint64_t number = 0;  ///< of the process's groups, from 1 on
  std::uint64_t id = 0;      ///< equal on all of its ranks
  int rank = 0;
  PeerProcesses processes = {};
  bool log_waits = false;                              ///< long waits are written to stderr
  bool has_said_idle = false, has_asked_idle = false;  ///< of LongWaits
  std::shared_ptr<Look> look = std::make_shared<Look>();
};

/// Writes to stderr which calls wait for long, and for whom: a collective by one rank of a machine.
/// A rank that waits for a process that sleeps outside of calls is idle, as a server is between two
/// requests: a group says that once.
class LongWaits {
 public:
  struct Wait {
    std::uint64_t begin_ticks = 0;  ///< of a message: when it was first seen to be waited for
    std::size_t num_said = 0;
    /// Of the process that it waits for, when the wait was seen or said; none if that is not here.
    std::optional<std::uint64_t> cpu_ms = {};
    std::uint64_t cpu_seen_ns = 0;
  };

  /// Looks at the calls that `memory` records, of some groups. Every few seconds.
  void look(const Memory& memory, const std::set<RecordedGroup*>& groups);

 private:
  std::map<std::uint64_t, Wait> waits_;  // by the numbers of the calls
};

/// The shell's command that writes the doctor's verdict on this process's job to stderr: it runs
/// for a wait of 60 s. Its signals are blocked. Once for each process.
void set_doctor(const std::string& command);
/// Runs a command of the shell to its end, as a child of a child. The one in between shares this
/// memory, and ends without SIGCHLD: a program that reaps its children in a handler hears of
/// neither. In a thread in which all signals are blocked.
void run_shell(const std::string& command);

/// This rank's side of a group in the recorder. Its calls may begin and end in any thread.
class Log {
 public:
  /// Null if there is no recorder, or no place for another group.
  static std::unique_ptr<Log> make(const std::string& name, int rank,
                                   const std::vector<std::uint64_t>& global_ranks,
                                   const std::string& transport, const GroupState& state,
                                   bool log_waits);
  /// The rank has left the group.
  ~Log();

  /// A thread calls `look` every ten seconds from now on; nothing if it is empty. Waits for one
  /// that runs.
  void on_look(std::function<void()> look);
  std::uint32_t number() const { return static_cast<std::uint32_t>(group_.number); }
  /// Takes the place of the oldest call for which nobody waits.
  Call begin(const Event& event);
  void fail(const std::string& why, int culprit);

  /// Of the collective that runs; in its thread.
  void record(const PeerEvent& event, CallStep step);
  /// From any thread. `waited_ns` may be 0.
  void count_wait(int peer, std::uint64_t waited_ns);
  void count_bytes(int peer, std::uint64_t sent, std::uint64_t received);
  /// What this rank has counted of each rank.
  std::vector<PeerCounts> counts() const;

 private:
  friend class Run;
  Log(class Recorder& recorder, RecordedGroup group);
  void end_running();
  GroupEntry& entry() const;

  Recorder& recorder_;
  RecordedGroup group_;
  std::vector<PeerCounts> own_counts_;  // of a group with more ranks than its entry
  PeerCounts* counts_;                  // these, or the entry's
  int last_late_ = kNobody;             // in the collective that runs
  Call running_;
};

/// A collective that runs while this lives. `log` may be null.
class Run {
 public:
  Run(Log* log, const Event& event) : log_(log) {
    if (log != nullptr) log->running_ = log->begin(event);
  }
  ~Run() {
    if (log_ != nullptr) log_->end_running();
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

 private:
  Log* log_;
};

}  // namespace ringcomm::recorder
