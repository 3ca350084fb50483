#pragma once

#include <string>
#include <vector>

#include "core/survivor_protocol.h"
#include "host/group.h"
#include "host/host_arch.h"
#include "host/wait.h"

namespace ringcomm::host {

/// One rank's part in the agreement of a failed group's ranks on the ranks that go on: agree(),
/// take_store(), confirm(), and again while confirm() returns false. Uses nothing but the group's
/// memory and its processes. One at a time for each rank of a group. All throw Error.
class Survivors final : public WaitGuard {
 public:
  /// Each wait of the agreement ends after the limits' timeout. `group` must outlive this object.
  Survivors(Group& group, const WaitLimits& limits);
  /// An attempt that this rank leaves before its verdict fails for all.
  ~Survivors() override;
  Survivors(const Survivors&) = delete;
  Survivors& operator=(const Survivors&) = delete;

  /// Waits for all ranks that live, and returns the ranks of the new group, ascending, in this
  /// group's numbering. Throws kAborted if the other ranks go on without this one.
  std::vector<int> agree();
  /// The number of the attempt, equal on all of its ranks, from 0 on.
  int attempt() const { return attempt_; }
  /// Whether the attempt has its verdict: there is no more use in making the group.
  bool is_over() const {
    return arch_.load_acquire(group_.survivor_words().verdict(attempt_)) != 0;
  }
  /// The descriptor, the caller's, of a file without a name that all ranks of the attempt share.
  int take_store();
  /// Whether all ranks have made the new group, as all of them are told.
  bool confirm(bool has_made);

  WaitStatus check(int peer) override;

 private:
  using Protocol = SurvivorProtocol<HostArch, SurvivorWords>;

  void begin_wait(std::uint64_t& ends_at);
  void withdraw_store();

  Group& group_;
  WaitLimits limits_;
  HostArch arch_;
  Protocol protocol_;
  int attempt_ = -1;
  RankSet set_;
  std::string store_key_;               // of the offer, on the rank that made it
  std::uint64_t* ends_wait_ = nullptr;  // the choice that makes the current wait unnecessary
};

}  // namespace ringcomm::host
