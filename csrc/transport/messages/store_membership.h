#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "transport/membership.h"
#include "transport/peer_table.h"
#include "transport/shm/rendezvous.h"
#include "transport/wait_limits.h"

namespace ringcomm {

/// The membership of a group whose ranks share no memory. It keeps the abort state in the group's
/// store, and watches the processes of ranks on this machine.
class StoreMembership final : public Membership {
 public:
  /// Collective, after `ranks` has found them: every rank publishes its record for this very group
  /// and reads the others'. Throws what `ranks` does, and Error of kMismatch where options differ.
  StoreMembership(KeyValueStore& store, shm::Rendezvous& ranks);
  ~StoreMembership() override = default;

  /// This rank begins collective `seq`.
  void note_call(std::uint64_t seq) {
    num_calls_.store(static_cast<std::int64_t>(seq) + 1, std::memory_order_relaxed);
  }
  /// Tells the peers that this rank has left, and after how many calls, before its connections
  /// close.
  void leave();

  /// The function that ends this rank's waits; set once, before the first wait.
  void on_abort(std::function<void()> end_waits) { end_waits_ = std::move(end_waits); }

  const RankRecord& record_of(int rank) const { return records_[static_cast<std::size_t>(rank)]; }
  const PeerProcess& process_of(int rank) const override {
    return *processes_[static_cast<std::size_t>(rank)];
  }
  const std::string& host_of(int rank) const override { return record_of(rank).host; }

  /// Others are in the store, which takes its time.
  Stop state_of(int rank) const override;
  /// Known after has_left().
  std::int64_t num_calls_of(int rank) const override;
  /// Whether the process of `rank` is known to live.
  bool is_alive(int rank) const;
  /// The result of `make`, a part of making the group. Where that throws, the other ranks hear of
  /// it: they may have made the group already, and wait for this rank.
  template <class Make>
  auto told_if_it_fails(const Make& make) -> decltype(make()) {
    try {
      return make();
    } catch (const Error& error) {
      abort({.kind = error.info().kind,
             .origin = rank_,
             .culprit = error.info().rank,
             .text = error.what()});
      throw;
    } catch (const std::exception& error) {
      abort({.kind = ErrorKind::kAborted, .origin = rank_, .culprit = rank_, .text = error.what()});
      throw;
    }
  }
  bool is_given_up(bool asks) noexcept override;
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
  std::vector<RankRecord> records_;
  PeerProcesses processes_;
  std::string prefix_;  // of this group's keys: the store may hold those of an earlier group
  std::function<void()> end_waits_;
  mutable std::mutex mutex_;
  mutable std::condition_variable has_reason_;
  std::optional<AbortReason> reason_;
  std::map<int, std::int64_t> num_calls_of_;  // of the ranks known to have left
  std::atomic<std::int64_t> num_calls_ = 0;
};

/// How the messages between `ranks`, which must live as long, are waited for while they are made.
LookForRanks look_for(shm::Rendezvous& ranks);

}  // namespace ringcomm
