#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/arch.h"
#include "host/peer_process.h"
#include "host/rank_record.h"

namespace ringcomm {

/// Which of several waits of a collective a rank is in: the step, and the slice of the data that
/// takes these steps. All from 1 on; 0 where it is not known.
struct alignas(8) CallStep {
  std::uint16_t step = 0, num_steps = 0, slice = 0, num_slices = 0;

  constexpr CallStep() = default;
  constexpr CallStep(int step_now, int steps, std::size_t slice_now, std::size_t slices)
      : step(static_cast<std::uint16_t>(step_now)), num_steps(static_cast<std::uint16_t>(steps)) {
    if (slices > UINT16_MAX) return;  // more than 16 GiB for each rank
    slice = static_cast<std::uint16_t>(slice_now);
    num_slices = static_cast<std::uint16_t>(slices);
  }
};

/// What this rank does with `rank` in a collective: it waits, or has exchanged messages.
struct PeerEvent {
  int rank;
  std::uint64_t begin_ticks = 0;  ///< of a wait
  std::uint64_t end_ticks = 0;    ///< 0: it waits, for long already
  bool is_arrival = false;        ///< the wait is for the rank to begin the collective
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

/// The ranks of a group and its shared abort state.
class GroupState {
 public:
  virtual ~GroupState() = default;

  const PeerProcesses& processes() const { return processes_; }
  const PeerProcess& process_of(int rank) const {
    return *processes_[static_cast<std::size_t>(rank)];
  }
  /// The number in the default group; -1 if there is none. A process may be in groups with several.
  int global_rank_of(int rank) const { return global_ranks_[static_cast<std::size_t>(rank)]; }
  std::string name_of(int rank) const {
    return name_of_process(rank, global_rank_of(rank), process_of(rank));
  }
  /// Whether the process of `rank` is known to have ended; also of a group that has been aborted.
  bool has_died(int rank) const { return process_of(rank).is_dead; }
  /// The same on all ranks of the group, and of no other group.
  const std::string& key() const { return key_; }
  /// Whether this rank may wait for `rank`, from what it knows: kNone, kPeerDied, kPeerLeft or, for
  /// the whole group, kAborted.
  virtual WaitStatus state_of(int rank) const = 0;
  /// Whether `rank` is known to have destroyed its side of the group.
  virtual bool has_left(int rank) const = 0;
  /// The number of collectives that `rank` has begun; -1 if that is not known.
  virtual std::int64_t num_calls_of(int rank) const = 0;
  /// Called in the thread of a collective; set once.
  void on_peer_event(std::function<void(const PeerEvent&, CallStep)> record) {
    record_ = std::move(record);
  }
  void record(const PeerEvent& event) const {
    if (record_) record_(event, step_);
  }
  /// Of the events to come; in the thread of a collective.
  CallStep& step() { return step_; }

  /// Whether a rank has begun to abort the group: as this rank knows or, with `asks`, can read.
  virtual bool is_aborted(bool asks) noexcept = 0;
  /// Ends all ranks' waits, with this reason unless another rank has aborted the group before.
  virtual void abort(const AbortReason& reason) = 0;
  /// The reason of the first rank that aborted; only after a wait ended with WaitStatus::kAborted.
  virtual AbortReason abort_reason() const = 0;

 protected:
  PeerProcesses processes_;  // set when the group is made, as the next; none null
  std::vector<int> global_ranks_;
  std::string key_;

 private:
  std::function<void(const PeerEvent&, CallStep)> record_;
  CallStep step_;
};

}  // namespace ringcomm
