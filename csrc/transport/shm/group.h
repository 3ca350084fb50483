#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/arch.h"
#include "core/errors.h"
#include "transport/key_value_store.h"
#include "transport/membership.h"
#include "transport/process_generation.h"
#include "transport/shm/bootstrap.h"
#include "transport/shm/host_arch.h"
#include "transport/shm/rendezvous.h"
#include "transport/shm/segment.h"
#include "transport/shm/shared_memory.h"
#include "transport/wait_limits.h"

namespace ringcomm::shm {

/// The memory that the ranks of one group share, and the state of their processes.
///
/// The group costs one mapping, of which only touched pages count. The memory is freed when the
/// last rank unmaps it or dies.
class Group final : public Membership {
 public:
  /// Collective; throws what Rendezvous does.
  Group(KeyValueStore& store, const GroupIdentity& identity, const SegmentConfig& config,
        std::chrono::milliseconds timeout);
  /// The same for the ranks of one host after find_ranks(). `ranks` are their numbers in the whole
  /// group, which may span several hosts; errors and abort reasons use these numbers.
  Group(Rendezvous& rendezvous, const GroupIdentity& identity, const SegmentConfig& config,
        const std::vector<int>& ranks);
  /// Tells the peers that this rank has left. They keep the memory.
  ~Group() override;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  /// The rank's number in the whole group, which may span several hosts.
  int whole_rank(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  std::size_t num_bytes() const { return memory_.num_bytes(); }

  BoardGeometry board() const { return layout_.board(memory_.data()); }
  LinkGeometry ring_link(int from) const { return layout_.ring_link(memory_.data(), from); }
  LinkGeometry p2p_link(int from, int to) const {
    return layout_.p2p_link(memory_.data(), from, to);
  }
  /// Before the first message to `to`. Throws Error if the system has no memory for messages.
  void reserve_p2p(int to);
  Cursor& doorbell(int rank) const { return layout_.control(memory_.data(), rank).doorbell; }

  /// Whether this object was inherited by fork(): it belongs to the parent and must not be used.
  bool is_inherited() const { return generation_ != process_generation(); }

  pid_t pid_of(int rank) const override;
  bool is_pid_hidden(int rank) const override { return shm::is_pid_hidden(processes_, rank); }
  const std::string& host_of(int) const override { return host_; }

  /// Where the bootstrap of `peer`'s process listens.
  const std::string& bootstrap_address_of(int peer) const {
    return processes_[static_cast<std::size_t>(peer)]->bootstrap_address;
  }

  Stop state_of(int peer) const override;
  bool has_died(int rank) const override { return shm::has_died(processes_, rank); }
  bool has_exited(int rank) const override { return shm::has_exited(processes_, rank); }
  std::int64_t num_calls_of(int rank) const override;
  /// This rank begins collective `seq`.
  void note_call(std::uint64_t seq);
  bool is_stopped(int rank) const override { return shm::is_stopped(processes_, rank); }
  std::string last_words_of(int rank) const override {
    return shm::last_words_of(processes_, rank);
  }
  /// A rank that ended or left before it published as many phases as this rank, so that it cannot
  /// complete the current collective; -1 if there is none. For collectives on boards only, because
  /// all ranks publish the same phases.
  int missing_rank() const;
  /// The rank at fault for a wait for `peer` that timed out: `peer`, or one that has published less
  /// than this rank and `peer`, because `peer` may wait for it.
  int late_rank(int peer) const;

  bool is_given_up(bool asks) noexcept override;
  void abort(const AbortReason& reason) override;
  AbortReason abort_reason() const override;

 private:
  bool has_joined(int rank) const;
  int unjoined_rank() const;
  std::uint64_t num_published(int rank) const;
  int writer_of(std::uint32_t abort_state) const;
  void reserve_own_memory();
  void wait_until_joined(Rendezvous& rendezvous);
  void tell_and_wait_for_the_living(const Error& error);

  int rank_;
  int world_size_;
  std::vector<int> ranks_;  // in the whole group
  SegmentLayout layout_;
  std::string host_;
  int generation_ = process_generation();
  SharedMemory memory_;
  PeerProcesses processes_;  // by rank; null for this one
};

/// The limits of the current operation, for the waits of its protocols.
class WaitScope final : public StopSource {
 public:
  using Clock = std::chrono::steady_clock;

  explicit WaitScope(const Group& group) : group_(group) {}

  /// Starts an operation; `limits` must outlive it. Its time starts at the first wait that does not
  /// end immediately, so most operations never read a clock.
  void begin(const WaitLimits& limits) {
    limits_ = &limits;
    has_waited_ = false;
  }

  Stop stopped(int peer) override;

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

}  // namespace ringcomm::shm
