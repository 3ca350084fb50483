#pragma once

#include "core/arch.h"
#include "host/group.h"
#include "host/host_arch.h"
#include "host/wait_limits.h"

namespace ringcomm::host {

/// The limits of the current operation, for the waits of its protocols.
class WaitScope final : public StopSource {
 public:
  using Clock = RunningClock;

  explicit WaitScope(const Group& group) : group_(group) {}

  /// Starts an operation; `limits` must outlive it. Its time starts at the first wait that does not
  /// end immediately: most operations read no clock.
  void begin(const WaitLimits& limits) {
    limits_ = &limits;
    has_waited_ = false;
  }

  WaitStatus stopped(int peer) override {
    awaited_peer_ = peer;
    if (const WaitStatus stop = group_.state_of(peer); stop != WaitStatus::kNone) return stop;
    if (const int missing = group_.missing_rank(); missing >= 0) {
      awaited_peer_ = missing;
      return group_.state_of(missing);
    }
    group_.record({group_.whole_rank(peer)});
    const Clock::time_point now = Clock::now();
    if (!has_waited_) {
      has_waited_ = true;
      deadline_ = deadline_after(limits_->timeout);
      next_look_ = now + kLookInterval;
      return WaitStatus::kNone;
    }
    if (now >= deadline_) {
      awaited_peer_ = group_.late_rank(peer);
      return WaitStatus::kTimeout;
    }
    if (!limits_->is_interrupted || now < next_look_) return WaitStatus::kNone;
    next_look_ = now + kLookInterval;
    return limits_->is_interrupted() ? WaitStatus::kInterrupted : WaitStatus::kNone;
  }

  /// The rank that the operation waited for last: the missing rank, if it was stopped.
  int awaited_peer() const { return awaited_peer_; }

 private:
  const Group& group_;
  const WaitLimits* limits_ = nullptr;
  bool has_waited_ = false;
  Clock::time_point deadline_;
  Clock::time_point next_look_;
  int awaited_peer_ = -1;
};

}  // namespace ringcomm::host
