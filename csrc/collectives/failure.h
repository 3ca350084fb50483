#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

#include "core/arch.h"
#include "core/errors.h"
#include "host/group_state.h"
#include "host/process.h"

namespace ringcomm {

namespace recorder {
class Log;
}

/// What `body` throws, or null.
template <class Body>
std::exception_ptr error_of(const Body& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

/// The operation that was running when something failed.
struct Activity {
  std::string op;           ///< "all_reduce"
  std::int64_t seq = -1;    ///< its number in the group
  std::string description;  ///< "all_reduce #118 (sum, float32, 4096 bytes)"
  std::chrono::milliseconds timeout{0};
  std::int64_t num_calls = -1;  ///< the collectives that this rank has begun; -1 if not counted
};

/// Why a group is no more, as one rank knows it: words the errors, reports it to the other ranks,
/// keeps the first cause. May be used from any thread.
class Failure {
 public:
  /// `state` is null in a group of one.
  Failure(GroupState* state, int rank, int world_size)
      : state_(state),
        rank_(rank),
        world_size_(world_size),
        prefix_(prefix_of(rank, world_size, state != nullptr ? state->global_rank_of(rank) : -1)) {}

  /// Throws the first cause again if there is one; also throws what check_not_inherited() does.
  void rethrow_if_any() const;
  /// Whether the group was inherited by fork(). It then belongs to the parent: its threads do not
  /// exist here, and it must not be used or destroyed.
  bool is_inherited() const { return generation_ != process_generation(); }
  /// Throws Error in a process forked from the group's.
  void check_not_inherited() const;
  std::exception_ptr first_cause() const;
  /// Where the first cause is recorded, too; lives as long. Before anything may fail.
  void record_in(recorder::Log* log) { log_ = log; }
  /// Whether the group has ended, as far as this rank knows.
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }

  // Both only in a group of several.
  /// A wait for `peer` ended early; `detail` is the messenger's message.
  [[noreturn]] void raise_stopped(WaitStatus stop, int peer, const Activity& activity,
                                  const std::string& detail = {});
  /// `peer` made a different call than this rank; `difference` describes both.
  [[noreturn]] void raise_mismatch(int peer, const std::string& difference,
                                   const Activity& activity) {
    raise(ErrorKind::kMismatch, peer, difference, activity);
  }
  /// This rank ends the group, by its user's wish or for a failure of its own or, if it is given,
  /// of `culprit`. Throws nothing.
  void abort(const std::string& why, int culprit = -1);

 private:
  [[noreturn]] void raise(ErrorKind kind, int culprit, const std::string& text,
                          const Activity& activity, bool is_reported_by_peer = false);
  std::exception_ptr keep(const ErrorInfo& info, const std::string& text);
  std::string calls_missed(int peer, const Activity& activity) const;
  std::string name_of_peer(int peer) const;

  int generation_ = process_generation();
  GroupState* state_;
  int rank_;
  int world_size_;
  const std::string prefix_;
  std::atomic<bool> has_failed_ = false;
  recorder::Log* log_ = nullptr;
  mutable std::mutex mutex_;
  std::exception_ptr first_cause_;
};

}  // namespace ringcomm
