#pragma once

#include "host/group.h"
#include "host/wait.h"

namespace ringcomm::host {

/// The guard of a group's collectives in shared memory. It also ends a wait by the words of the
/// group, knows the rank at fault, and records waits for the group's GroupState.
class GroupWait final : public WaitGuard {
 public:
  explicit GroupWait(const Group& group) : group_(group) { records_waits_ = true; }

  /// Starts an operation; `limits` must outlive it. Its time starts at the first wait that does not
  /// end immediately: most operations read no clock.
  void begin(const WaitLimits& limits) {
    limits_ = &limits;
    has_waited_ = false;
  }
  /// Whether the next waits are for ranks to begin the collective.
  void set_arriving(bool is_arriving) { is_arriving_ = is_arriving; }

  WaitStatus check(int peer) override {
    awaited_peer_ = peer;
    if (const WaitStatus state = group_.state_of(peer); state != WaitStatus::kNone) return state;
    if (const int missing = group_.missing_rank(); missing >= 0) {
      awaited_peer_ = missing;
      return group_.state_of(missing);
    }
    if (!std::exchange(has_waited_, true)) start(*limits_);
    const WaitStatus status = WaitGuard::check(peer);
    if (status == WaitStatus::kTimeout) awaited_peer_ = group_.late_rank(peer);
    return status;
  }
  /// The rank that the operation waited for last: the rank at fault, if it was ended.
  int awaited_peer() const { return awaited_peer_; }

  void record(int peer, std::uint64_t begin_ticks, std::uint64_t end_ticks) override {
    group_.record({.rank = group_.whole_rank(peer),
                   .begin_ticks = begin_ticks,
                   .end_ticks = end_ticks,
                   .is_arrival = is_arriving_});
  }

 private:
  const Group& group_;
  const WaitLimits* limits_ = nullptr;
  bool has_waited_ = false;
  bool is_arriving_ = false;
  int awaited_peer_ = -1;
};

}  // namespace ringcomm::host
