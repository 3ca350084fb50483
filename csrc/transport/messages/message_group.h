#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "host/group_state.h"
#include "host/rendezvous.h"
#include "host/threads.h"
#include "host/timed_store.h"
#include "host/wait.h"
#include "transport/transport.h"

namespace ringcomm {

/// The membership of a group that exchanges messages, and the watchdog of their waits.
///
/// The abort state is in the group's store. Deadlines and deaths are judged without it, because it
/// may not answer: a rank that needs its answer waits for a second. The watchdog ends the waits
/// that nothing else would end: at an operation's deadline, when another rank aborts the group, and
/// when the peer's process has ended without closing the connection (exec() may pass it on). It
/// sleeps without operations.
class MessageGroup final : public GroupState {
 public:
  using Clock = RunningClock;

  /// Collective, after `ranks` has found them: returns when all have come to this very group.
  /// Throws what `ranks` does.
  MessageGroup(KeyValueStore& store, host::Rendezvous& ranks);

  /// Called with the reason when the group ends; set once, before anything may end it.
  void on_abort(std::function<void()> callback) { on_abort_ = std::move(callback); }
  /// The messages that end with the group; set once, before the first of them. `messenger` must
  /// live until leave().
  void watch(Messenger& messenger) { messenger_ = &messenger; }

  /// This rank begins collective `seq`.
  void record_call(std::uint64_t seq) {
    num_calls_.store(static_cast<std::int64_t>(seq) + 1, std::memory_order_relaxed);
  }
  /// Tells the peers that this rank has left, and after how many calls, before its connections
  /// close. After the last operation.
  void leave();

  /// Others are in the store.
  WaitStatus state_of(int rank) const override;
  bool has_left(int rank) const override { return num_calls_of(rank) >= 0; }
  /// Known once a wait for the rank has ended because it has left.
  std::int64_t num_calls_of(int rank) const override;
  bool is_aborted(bool asks) noexcept override;
  void abort(const AbortReason& reason) override;
  /// The first reason that this rank knows of; waits a moment for one that is on its way.
  AbortReason abort_reason() const override;

  /// An operation that waits for messages; the watchdog watches it while this object lives.
  class Operation {
   public:
    /// Throws std::system_error where the watchdog's thread cannot start.
    Operation(MessageGroup& group, Clock::time_point deadline);
    void set_deadline(Clock::time_point deadline);
    ~Operation();
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    /// It begins to wait for a message from or to `peer`; kAnySource for one from any rank.
    void await(int peer);
    /// Why its wait for a message of `peer` ended so; after kDone, why its group has, if a rank
    /// reports that soon.
    WaitStatus stop_of(MessageEnd end, int peer);

   private:
    friend class MessageGroup;
    MessageGroup& group_;
    // Guarded by the group's mutex.
    Clock::time_point deadline_;
    int peer_ = kNobody;
    int num_checks_gone_ = 0;              // of the watchdog, in which the peer was gone
    WaitStatus stop_ = WaitStatus::kNone;  // why the watchdog ended it
  };

 private:
  static constexpr int kNobody = -2;

  void keep(const AbortReason& reason);
  bool ask_left(int rank);
  bool check_store(bool waits);
  bool is_gone(int peer) const;
  bool must_end(Operation& operation) const;
  void watch_operations();

  int rank_;
  TimedStore store_;
  std::string address_;  // of this rank's process
  std::string prefix_;   // of this group's keys: the store may hold those of an earlier group
  std::function<void()> on_abort_;
  Messenger* messenger_ = nullptr;
  std::atomic<std::int64_t> num_calls_ = 0;

  mutable std::mutex mutex_;  // guards the next ones
  mutable std::condition_variable has_reason_;
  std::optional<AbortReason> reason_;
  std::map<int, std::int64_t> num_calls_of_;  // of the ranks known to have left
  std::set<Operation*> operations_;

  int num_asked_ = 0;  // the watchdog's, as the next one: ranks that may have left
  Clock::time_point store_fails_since_ = Clock::time_point::max();
  std::optional<WatchThread> watch_;  // last: it uses all of the above
};

}  // namespace ringcomm
