#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/key_value_store.h"
#include "transport/membership.h"
#include "transport/shm/rank_record.h"

namespace ringcomm {

/// Who the ranks of a group are, and why it has ended, by way of the store that they share: for
/// groups whose ranks share no memory.
class StoreMembership final : public Membership {
 public:
  /// Collective: every rank publishes its record and reads the others'. Throws Error: kTimeout
  /// naming a rank that does not appear, kMismatch where options differ.
  StoreMembership(KeyValueStore& store, int rank, int world_size, const std::string& options,
                  std::chrono::milliseconds timeout);
  ~StoreMembership() override = default;

  /// Tells the peers that this rank has left, before its connections close.
  void leave();

  /// What ends this rank's waits; set once, before anything is waited for.
  void on_abort(std::function<void()> end_waits) { end_waits_ = std::move(end_waits); }

  const shm::RankRecord& record_of(int rank) const {
    return records_[static_cast<std::size_t>(rank)];
  }
  pid_t pid_of(int rank) const override { return record_of(rank).pid; }
  const std::string& host_of(int rank) const override { return record_of(rank).host; }

  /// Others are in the store, which takes its time.
  Stop state_of(int rank) const override;
  void abort(const AbortReason& reason) override;
  /// The first reason that this rank knows of; waits a moment for one that is on its way.
  AbortReason abort_reason() const override;

  /// Looks in the store. Whether there is a reason; throws what the store does.
  bool look();
  /// The store cannot be reached any more: ends the group on this rank.
  void lose_store(const std::string& why);
  /// Whether `rank` has destroyed its side of the group.
  bool has_left(int rank);

 private:
  void keep(const AbortReason& reason);

  int rank_;
  std::unique_ptr<KeyValueStore> store_;
  std::vector<shm::RankRecord> records_;
  std::string prefix_;  // of this group's keys: the store may hold those of an earlier group
  std::function<void()> end_waits_;
  mutable std::mutex mutex_;
  mutable std::condition_variable has_reason_;
  std::optional<AbortReason> reason_;
};

}  // namespace ringcomm
