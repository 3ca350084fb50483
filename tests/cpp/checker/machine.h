#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/arch.h"
#include "fiber.h"
#include "memory.h"

namespace ringcomm::checker {

class CheckerArch;

/// The part of a scenario's interleavings that is run; the output states it unless it is kAll.
struct Extent {
  enum class Kind { kAll, kBounded, kWalks };
  Kind kind = Kind::kAll;
  int max_preemptions = 0;  ///< kBounded: switches away from a rank that could go on
  int num_walks = 0;        ///< kWalks: random schedules
  std::uint64_t seed = 0;   ///< kWalks
};

struct Scenario {
  std::string name;
  std::string text;
  int num_ranks = 2;
  Extent extent;
  /// Whether every block of payload is a scheduling point. Without, an access runs together with
  /// the operation before it: races are still found, since happens-before does not depend on the
  /// order the accesses ran in.
  bool steps_on_payload = true;
  /// Explored once per victim: it is killed at every point where it can be.
  bool has_death = false;

  /// Lays out cursors and payload.
  std::function<void(Memory&)> setup;
  /// One rank's program. May not allocate, throw, or write outside its stack and the checker's
  /// memory.
  std::function<WaitStatus(CheckerArch&, int rank)> body;
  /// Checks the result of a rank that finished without a WaitStatus; returns what is wrong, or an
  /// empty text.
  std::function<std::string(const Memory&, int rank)> check;
};

struct Transition {
  /// kFlush comes first: the search tries the ordinary machine, with empty buffers, before the
  /// delayed one.
  enum class Kind : std::uint8_t { kFlush, kStep, kSliceEnd, kKill };
  Kind kind;
  std::uint8_t rank;
};

enum class Op : std::uint8_t {
  kLoadAcquire,
  kLoadSeqCst,
  kReadOnce,
  kStoreRelaxed,
  kStoreRelease,
  kStoreSeqCst,
  kAdd,
  kRead,
  kWrite,
  kPause,
  kPark,
  kParked,
  kWake,
  kStopped,
  kCheckpoint,
  kFlush,
  kSliceEnd,
  kKill,
  kFinish,
};

struct Event {
  Op op;
  std::uint8_t rank;
  std::uint16_t idx;  ///< of the word or cell
  std::uint64_t value;
};

/// One state of the checked program, and the steps that lead out of it.
class Machine {
 public:
  Machine();

  /// Puts `scenario` in its first state. `victim` may die; no rank if it is negative. Preemptions
  /// are counted, and are part of the state, only if they are bounded.
  void reset(const Scenario& scenario, int victim, bool counts_preemptions);
  void list_enabled(std::vector<Transition>& out, int max_preemptions) const;
  void apply(Transition transition);
  /// Checks a state without transitions for a deadlock, a wrong result, or a rank that stopped
  /// without a reason.
  void check_end();
  std::uint64_t hash() const;
  void save(std::vector<std::byte>& out) const;
  void restore(const std::byte* from);

  const std::vector<Event>& trace() const { return trace_; }
  std::string describe(const Event& event) const;

  // ---- for CheckerArch, on the fiber of `rank`
  /// A scheduling point: the operation that follows happens when the rank is scheduled next.
  void point(int rank);
  /// Adds an operation and what it returned to the trace and to the rank's history.
  ///
  /// The history represents the rank's local variables. The values that a wait has seen are
  /// forgotten when it ends, which is when the rank accesses payload, stores, or reads another
  /// cursor, and when it withdraws its announcement of sleep and starts again. So the checker
  /// relies on protocols that keep nothing of a cursor except that they may continue. A link that
  /// cached its peer's cursor would need the full history.
  void observe(Op op, int rank, int idx, std::uint64_t value);
  /// The state of the rank's program is fixed by `step` alone; see CheckerArch::checkpoint().
  void checkpoint(int rank, std::uint64_t step);
  void park(int rank, int word_idx, std::uint64_t expected);
  void wake(int rank, int word_idx);
  WaitStatus stopped(int rank, int peer);
  void report(ViolationKind kind, int rank, const std::string& what);
  bool steps_on_payload() const { return scenario_->steps_on_payload; }
  bool has_victim() const { return victim_ >= 0; }

  Memory memory;

 private:
  enum class Status : std::uint32_t { kReady, kParked, kFinished, kDead };

  struct RankState {
    std::uint64_t history;       ///< fingerprint of what it did since its last checkpoint
    std::uint64_t wait_history;  ///< and of what it observed in the wait it is in; see observe()
    std::uint64_t wait_cursor_idx;
    Status status;
    std::uint32_t parked_word_idx;
    std::uint32_t outcome;          ///< a WaitStatus, once finished
    std::uint32_t num_events_seen;  ///< deaths and aborts that its latest stopped() knew of
    std::uint32_t skips_point;      ///< resumes from park(): the next operation follows at once
    std::uint32_t is_dead;          ///< also after it finished
  };
  struct State {
    std::array<RankState, kMaxRanks> ranks;
    std::uint32_t num_events;  ///< deaths and aborts
    std::uint32_t has_abort;
    std::uint32_t running_rank;  ///< these two stay 0 while preemptions are not counted
    std::uint32_t num_preemptions;
  };
  static_assert(std::has_unique_object_representations_v<State>);

  static void fiber_main(int rank);
  void run_until_point(int rank);
  static void forget(RankState& state);
  void finish(int rank, WaitStatus outcome);
  void kill(int rank);
  void count_preemption(int rank);
  void check_outcome(int rank);

  FiberSet fibers_;
  State state_{};
  const Scenario* scenario_ = nullptr;
  int victim_ = -1;
  bool counts_preemptions_ = false;
  std::vector<Event> trace_;
};

struct Result {
  std::uint64_t num_states = 0;
  std::uint64_t num_transitions = 0;
  std::uint64_t num_ends = 0;  ///< distinct final states, or walks
  std::uint64_t max_depth = 0;
  bool hit_limit = false;  ///< the search was cut off: nothing is proven
  std::optional<Violation> violation;
  std::vector<std::string> trace;  ///< the interleaving that led to it

  void add(const Result& other);
};

/// Runs the interleavings of `scenario` within its extent, with every victim if ranks may die.
/// Stops at the first violation.
Result explore(Machine& machine, const Scenario& scenario);

}  // namespace ringcomm::checker
