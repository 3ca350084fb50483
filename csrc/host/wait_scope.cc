#include "host/wait_scope.h"

namespace ringcomm::host {

Stop WaitScope::stopped(int peer) {
  awaited_peer_ = peer;
  if (const Stop stop = group_.state_of(peer); stop != Stop::kNone) return stop;
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
    return Stop::kNone;
  }
  if (now >= deadline_) {
    awaited_peer_ = group_.late_rank(peer);
    return Stop::kTimeout;
  }
  if (!limits_->is_interrupted || now < next_look_) return Stop::kNone;
  next_look_ = now + kLookInterval;
  return limits_->is_interrupted() ? Stop::kInterrupted : Stop::kNone;
}

}  // namespace ringcomm::host
