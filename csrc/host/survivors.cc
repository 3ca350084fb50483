#include "host/survivors.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <utility>

#include "core/annotations.h"
#include "core/errors.h"
#include "host/bootstrap.h"
#include "host/fd.h"
#include "host/process.h"
#include "host/rank_record.h"

namespace ringcomm::host {

Survivors::Survivors(Group& group, const WaitLimits& limits)
    : group_(group),
      limits_(limits),
      arch_(*this, group.rank()),
      protocol_(arch_, group.survivor_words(), group.rank(), group.world_size()) {
  if (group.world_size() > RankSet::kMaxRanks)
    throw Error({.kind = ErrorKind::kSystem}, "ringcomm: shrink supports at most " +
                                                  std::to_string(RankSet::kMaxRanks) + " ranks");
}

Survivors::~Survivors() {
  withdraw_store();
  if (attempt_ >= 0) arch_.set_first(group_.survivor_words().verdict(attempt_), Protocol::kFailed);
}

void Survivors::withdraw_store() {
  if (!store_key_.empty()) Bootstrap::instance().withdraw(std::exchange(store_key_, {}));
}

std::vector<int> Survivors::agree() {
  const SurvivorWords words = group_.survivor_words();
  // An earlier call may have been interrupted in an attempt.
  const std::uint64_t stage = arch_.load_acquire(words.stage(group_.rank()).value);
  const std::uint64_t next = (stage + Protocol::kNumStages - 1) / Protocol::kNumStages;
  if (next >= kMaxAttempts)
    throw Error({.kind = ErrorKind::kAborted, .rank = group_.rank()},
                "ringcomm: shrink failed " + std::to_string(kMaxAttempts) +
                    " times, because further ranks ended or did not answer; restart the job");
  attempt_ = static_cast<int>(next);
  // Only ranks that all earlier attempts have chosen.
  RankSet asked;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    bool is_asked = true;
    for (int earlier = 0; earlier < attempt_; ++earlier)
      if (RankSet set; protocol_.find_chosen(earlier, set)) is_asked &= set.has(rank);
    if (is_asked) asked.add(rank);
  }
  if (attempt_ > 0 && asked.has(group_.rank())) {
    // It has no verdict if this rank was interrupted in it. Without this rank it must fail before
    // the rank enters the next.
    arch_.set_first(words.verdict(attempt_ - 1), Protocol::kFailed);
    if (arch_.read_once(words.verdict(attempt_ - 1)) == Protocol::kAllMade) {
      attempt_ = -1;
      throw Error({.kind = ErrorKind::kAborted, .rank = group_.rank()},
                  "ringcomm: shrink was interrupted on rank " + std::to_string(group_.rank()) +
                      " when all ranks had made the new group, and the others use it; end this "
                      "process, and shrink again on the others");
    }
  }
  begin_wait(words.chosen(attempt_));
  RINGCOMM_STEP("before a survivor joins");
  if (asked.has(group_.rank()) && protocol_.join(attempt_, asked) == WaitStatus::kInterrupted)
    throw Error({.kind = ErrorKind::kInterrupted, .rank = group_.rank()},
                "ringcomm: shrink was interrupted by a signal");
  RINGCOMM_STEP("after the survivors are chosen");
  if (!asked.has(group_.rank())) --attempt_;  // the last that was chosen without it
  set_ = {};
  protocol_.find_chosen(attempt_, set_);
  std::vector<int> ranks;
  for (int rank = 0; rank < group_.world_size(); ++rank)
    if (set_.has(rank)) ranks.push_back(rank);
  if (set_.has(group_.rank())) return ranks;
  attempt_ = -1;  // the others' attempt goes on
  throw Error({.kind = ErrorKind::kAborted, .rank = group_.rank()},
              "ringcomm: rank " + std::to_string(group_.rank()) +
                  " did not call shrink in time, and the other ranks go on without it (ranks " +
                  ranges_of({ranks.begin(), ranks.end()}) +
                  "); end this process, or raise the timeout of shrink");
}

int Survivors::take_store() {
  const SurvivorWords words = group_.survivor_words();
  int first = 0;
  while (!set_.has(first)) ++first;
  std::uint64_t& number = words.store_number(first);
  const auto key_of = [](std::uint64_t idx) { return "survivors/" + std::to_string(idx); };
  if (first == group_.rank()) {
    // Not sealed: torch's FileStore appends to it.
    UniqueFd fd(::memfd_create("ringcomm-store", MFD_CLOEXEC));
    UniqueFd offered(fd ? ::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0) : -1);
    if (!fd || !offered) throw_errno("memfd_create");
    number = random_number();
    store_key_ = key_of(number);
    Bootstrap::instance().offer(store_key_, std::move(offered));
    protocol_.enter(attempt_, Protocol::kHasStore);
    return fd.release();
  }
  begin_wait(words.verdict(attempt_));
  UniqueFd fd;
  if (protocol_.wait_for(attempt_, Protocol::kHasStore, first) == WaitStatus::kNone)
    fd = Bootstrap::instance().fetch(group_.process_of(first).bootstrap_address, key_of(number),
                                     limits_.timeout, [&] {
                                       if (check(first) != WaitStatus::kNone)
                                         throw Error({.kind = ErrorKind::kPeerDied, .rank = first},
                                                     "ringcomm: shrink: the first rank ended");
                                     });
  // After a verdict, the number may be that of the next attempt.
  if (!fd || is_over())
    throw Error({.kind = ErrorKind::kPeerDied, .rank = first},
                "ringcomm: shrink: rank " + std::to_string(first) + " did not make the new store");
  return fd.release();
}

bool Survivors::confirm(bool has_made) {
  begin_wait(group_.survivor_words().verdict(attempt_));
  RINGCOMM_STEP("before a survivor confirms");
  const bool is_over = protocol_.confirm(attempt_, set_, has_made);
  RINGCOMM_STEP("after a survivor has confirmed");
  withdraw_store();
  return is_over;
}

void Survivors::begin_wait(std::uint64_t& ends_at) {
  ends_wait_ = &ends_at;
  start(limits_);
}

WaitStatus Survivors::check(int peer) {
  if (arch_.load_acquire(*ends_wait_) != 0) return WaitStatus::kAborted;
  if (group_.has_left(peer)) return WaitStatus::kPeerLeft;
  if (group_.has_died(peer)) return WaitStatus::kPeerDied;
  return WaitGuard::check(peer);
}

}  // namespace ringcomm::host
