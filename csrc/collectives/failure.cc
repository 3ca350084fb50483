#include "collectives/failure.h"

#include "collectives/trace.h"
#include "host/rank_record.h"

namespace ringcomm {

void Failure::rethrow_if_any() const {
  check_not_inherited();
  if (has_failed()) std::rethrow_exception(first_cause());
}

void Failure::check_not_inherited() const {
  if (is_inherited())
    throw Error(
        {.kind = ErrorKind::kSystem},
        prefix_ +
            "this process was forked from the one that made the group, and cannot use it; call "
            "collectives in the parent process, or make a group in the child after the fork");
}

std::exception_ptr Failure::first_cause() const {
  const std::lock_guard lock(mutex_);
  return first_cause_;
}

void Failure::raise_stopped(WaitStatus stop, int peer, const Activity& activity,
                            const std::string& detail) {
  const std::string name = name_of_peer(peer);
  switch (stop) {
    case WaitStatus::kTimeout: {
      const std::string waited =
          "waited for " + name + " for " + std::to_string(activity.timeout.count()) + " ms";
      // The rank waited for may itself wait for one that is stopped.
      for (int rank = 0; rank < world_size_; ++rank)
        if (state_->process_of(rank).is_stopped())
          raise(ErrorKind::kTimeout, rank,
                waited + ", and the process of " + name_of_peer(rank) + " is stopped", activity);
      // Another of its threads may keep its process.
      const std::string words = peer < 0 ? "" : state_->process_of(peer).exit_reason();
      raise(ErrorKind::kTimeout, peer,
            waited + (words.empty() ? "; read that rank's output, or raise the timeout of "
                                      "init_process_group"
                                    : ", which runs on after " + words),
            activity);
    }
    case WaitStatus::kPeerDied:
    case WaitStatus::kPeerLeft: {
      if (peer < 0) raise(ErrorKind::kPeerDied, peer, name + " died", activity);
      const PeerProcess& process = state_->process_of(peer);
      // Of a rank that has failed the number of its calls is no news.
      const bool is_clean = process.exit_status == 0;
      const bool has_left = stop == WaitStatus::kPeerLeft && !process.has_exited;
      std::string text;
      if (process.exit_reason().empty() && (is_clean || has_left))
        text = (is_clean ? " has exited" : " has destroyed the group or exited") +
               calls_missed(peer, activity);
      else
        text =
            has_left && !process.is_dead
                ? " has destroyed the group in an exception: " + process.exit_reason()
                : process.how_it_ended({}, stop == WaitStatus::kPeerDied ? detail : std::string());
      raise(ErrorKind::kPeerDied, peer, name + text, activity);
    }
    case WaitStatus::kAborted: {
      AbortReason reason = state_->abort_reason();
      // A faulty peer may have written any number.
      for (int* rank : {&reason.origin, &reason.culprit})
        if (*rank >= world_size_) *rank = -1;
      // Another thread of this rank failed: it keeps its error before it aborts the group.
      if (reason.origin == rank_ && has_failed()) std::rethrow_exception(first_cause());
      raise(reason.kind, reason.culprit, name_of_peer(reason.origin) + " failed: " + reason.text,
            activity, true);
    }
    default:  // WaitStatus::kInterrupted: no wait ends with kNone
      raise(ErrorKind::kInterrupted, rank_, "interrupted by a signal while waiting for " + name,
            activity);
  }
}

void Failure::abort(const std::string& why, int culprit) {
  if (is_inherited()) return;
  if (culprit < 0) culprit = rank_;
  keep({.kind = ErrorKind::kAborted, .rank = culprit}, why);
  if (state_ != nullptr)
    state_->abort({.kind = ErrorKind::kAborted, .origin = rank_, .culprit = culprit, .text = why});
}

void Failure::raise(ErrorKind kind, int culprit, const std::string& text, const Activity& activity,
                    bool is_reported_by_peer) {
  const std::string report = activity.description + ": " + text;
  ErrorInfo info{.kind = kind, .rank = culprit, .op = activity.op, .seq = activity.seq};
  if (culprit >= 0) {
    info.pid = state_->process_of(culprit).pid;
    info.host = state_->process_of(culprit).host;
  }
  const std::exception_ptr error = keep(info, report);
  // Only the rank that saw the failure reports it, so that the others' messages carry the cause.
  // The error is kept first, because this rank's other threads stop waiting as soon as it is
  // reported.
  if (!is_reported_by_peer)
    state_->abort({.kind = kind, .origin = rank_, .culprit = culprit, .text = report});
  std::rethrow_exception(error);
}

// Makes the error; the first is the group's.
std::exception_ptr Failure::keep(const ErrorInfo& info, const std::string& text) {
  const Error error(info, prefix_ + text);
  std::exception_ptr kept = std::make_exception_ptr(error);
  const std::lock_guard lock(mutex_);
  if (first_cause_ == nullptr) {
    recorder::trace_failure(error.what());
    if (log_ != nullptr) log_->fail(error.what(), info.rank);
    first_cause_ = kept;
  }
  has_failed_.store(true, std::memory_order_release);
  return kept;
}

// Of a rank that left by itself: which calls it has not made.
std::string Failure::calls_missed(int peer, const Activity& activity) const {
  const std::int64_t made = state_->num_calls_of(peer);
  if (made < 0 || made >= activity.num_calls)
    return "; did the ranks make different numbers of calls?";
  const std::int64_t missed = activity.num_calls - made;
  return "; it made " + std::to_string(missed) + (missed == 1 ? " call" : " calls") +
         " fewer: let all ranks make the same calls";
}

std::string Failure::name_of_peer(int peer) const {
  return peer < 0 ? "any rank" : state_->name_of(peer);
}

}  // namespace ringcomm
