#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/arch.h"
#include "core/board_protocol.h"
#include "core/link_protocol.h"
#include "core/survivor_protocol.h"
#include "host/group_state.h"
#include "host/process.h"
#include "host/rendezvous.h"
#include "host/shared_memory.h"
#include "host/thread_pool.h"
#include "host/wait.h"

namespace ringcomm::host {

/// The reason of the first rank that fails, written once and read by all others.
struct alignas(kLineBytes) AbortRecord {
  /// kFirstWriter + r: rank r is writing it.
  static constexpr std::uint32_t kNone = 0, kWritten = 1, kFirstWriter = 2;
  std::uint32_t state = kNone;
  std::uint32_t kind = 0;     ///< an ErrorKind
  std::int32_t origin = -1;   ///< the rank that failed
  std::int32_t culprit = -1;  ///< the rank that it blames
  /// The ranks that have left; in the line of `state`, which rarely changes.
  std::uint32_t num_left = 0;
  char text[1024] = {};
};

/// How often the ranks of a group try to agree on survivors.
inline constexpr int kMaxAttempts = 8;

/// What the survivors of a group choose (SurvivorProtocol), by attempt.
struct alignas(kLineBytes) SurvivorChoices {
  std::uint64_t chosen[kMaxAttempts] = {};
  std::uint64_t verdict[kMaxAttempts] = {};
};

/// Words that one rank writes and all others read. In pages of its own, touched first by the rank,
/// and so on its NUMA node.
struct RankControl {
  Cursor doorbell;  ///< rung by peers: something on a point-to-point link changed
  /// 1 from the destruction of its side of the group on.
  alignas(kLineBytes) std::uint32_t has_left = 0;
  std::uint64_t num_calls = 0;  ///< collectives that it has begun
  std::uint64_t num_ended = 0;  ///< those in this memory, or their parts, that have succeeded
  Cursor survivor_stage;
  std::uint64_t survivor_proposals[kMaxAttempts][RankSet::kWords] = {};
  std::uint64_t store_number = 0;  ///< random; of what it offers as the survivors' new store
};

/// The sizes of a group's boards and links. All ranks agree on them when the group is made.
struct SegmentConfig {
  /// A region of a board, 1 MiB of data at least, and the cursor in front of it.
  std::size_t board_region_bytes = (std::size_t{1} << 20) + 4096;
  std::uint32_t ring_num_slots = 2;
  std::size_t ring_slot_bytes = std::size_t{256} << 10;
  std::uint32_t send_recv_num_slots = 8;
  std::size_t send_recv_slot_bytes = std::size_t{64} << 10;
};

/// The memory of a link: its cursors and its slots.
std::size_t link_bytes(std::uint32_t num_slots, std::size_t slot_bytes);

/// The layout of the memory that a group shares, which every rank computes:
///
///   abort record, survivors' choices, has_joined of each rank | control of each rank | boards |
///   ring links r -> r + 1 | point-to-point links of each ordered pair
///
/// A zeroed segment is valid and empty: no rank initializes it, and unused pages are never touched.
class SegmentLayout {
 public:
  SegmentLayout(int world_size, const SegmentConfig& config);

  std::size_t num_bytes() const { return num_bytes_; }

  AbortRecord& abort_record(std::byte* base) const { return *reinterpret_cast<AbortRecord*>(base); }
  SurvivorChoices& survivor_choices(std::byte* base) const {
    return *reinterpret_cast<SurvivorChoices*>(base + sizeof(AbortRecord));
  }
  /// 1 once the rank has mapped the memory.
  std::uint32_t& has_joined(std::byte* base, int rank) const;
  RankControl& control(std::byte* base, int rank) const;
  BoardGeometry board(std::byte* base) const;
  /// The link from `rank` to the next one.
  LinkGeometry ring_link(std::byte* base, int rank) const;
  LinkGeometry send_recv_link(std::byte* base, int from, int to) const;

 private:
  int world_size_;
  SegmentConfig config_;
  std::size_t control_offset_bytes_;
  std::size_t boards_offset_bytes_;
  std::size_t rings_offset_bytes_;
  std::size_t send_recv_offset_bytes_;
  std::size_t num_bytes_;
};

/// The words of SurvivorProtocol in a group's memory, which must outlive this object.
struct SurvivorWords {
  const SegmentLayout* layout;
  std::byte* base;

  Cursor& stage(int rank) const { return layout->control(base, rank).survivor_stage; }
  std::uint64_t& proposal(int attempt, int rank, int idx) const {
    return layout->control(base, rank).survivor_proposals[attempt][idx];
  }
  std::uint64_t& chosen(int attempt) const {
    return layout->survivor_choices(base).chosen[attempt];
  }
  std::uint64_t& verdict(int attempt) const {
    return layout->survivor_choices(base).verdict[attempt];
  }
  std::uint64_t& store_number(int rank) const { return layout->control(base, rank).store_number; }
};

/// The memory that the ranks of one group share, and the state of their processes.
class Group final : public GroupState {
 public:
  /// Collective over `ranks`, those of one host, after find_ranks(); throws what Rendezvous does.
  /// Errors and abort reasons use these numbers, of a group that may span several hosts.
  Group(Rendezvous& rendezvous, const std::vector<int>& ranks, const SegmentConfig& config);
  /// Tells the peers that this rank has left. They keep the memory.
  ~Group() override;

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(ranks_.size()); }
  /// The rank's number in the whole group.
  int group_rank(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  std::size_t num_bytes() const { return memory_->num_bytes(); }
  BoardGeometry board() const { return layout_.board(memory_->data()); }
  LinkGeometry ring_link(int from) const { return layout_.ring_link(memory_->data(), from); }
  LinkGeometry send_recv_link(int from, int to) const {
    return layout_.send_recv_link(memory_->data(), from, to);
  }
  /// Before the first message to `to`. Throws Error if the system has no memory for messages.
  void reserve_send_recv(int to);
  Cursor& doorbell(int rank) const { return control(rank).doorbell; }

  /// Whether every rank has ended or left, and so is in no call: a function that may be called at
  /// any time, also when this object is no more.
  std::function<bool()> left_by_all() const;

  SurvivorWords survivor_words() const { return {&layout_, memory_->data()}; }

  WaitStatus state_of(int peer) const override;
  bool has_left(int rank) const override;
  std::int64_t num_calls_of(int rank) const override;
  /// A rank that ended or left before it began collective `seq`, and so never will; -1 if none is
  /// known. Reads two words unless a process has ended or a rank has left since it last looked.
  int gone_before(std::uint64_t seq);
  /// This rank begins collective `seq`, or a part of it: whether that is its first.
  bool record_call(std::uint64_t seq);
  /// It has succeeded, and reads no region of a peer any more.
  void record_end();
  /// Between two collectives: returns the pages of this rank's data to the system if there was no
  /// call since the last time, and no peer still reads them.
  void return_idle_pages();
  /// A rank that ended or left before it published as many phases as this rank, and so cannot
  /// complete the current collective (on boards: all ranks publish the same phases); -1 if none.
  int missing_rank() const;
  /// The rank at fault for a wait for `peer` that timed out: `peer`, or one that has published less
  /// than this rank and `peer`.
  int late_rank(int peer) const;

  bool is_aborted(bool asks) noexcept override;
  void abort(const AbortReason& reason) override;
  AbortReason abort_reason() const override;

 private:
  AbortRecord& abort_record() const { return layout_.abort_record(memory_->data()); }
  RankControl& control(int rank) const { return layout_.control(memory_->data(), rank); }
  std::uint64_t num_published(int rank) const;
  int writer_of(std::uint32_t abort_state) const;
  void reserve_own_memory();
  void join();
  void wait_until_joined(Rendezvous& rendezvous);

  std::vector<int> ranks_;  // in the whole group
  int rank_;
  SegmentLayout layout_;
  CoreShare core_share_;
  int generation_ = process_generation();
  std::shared_ptr<const SharedMemory> memory_;  // also of left_by_all()
  std::uint64_t num_gone_seen_ = 0;             // when no rank of the group was among them
  // Of this rank, as RankControl's. A call that failed leaves num_begun_ ahead for good.
  std::uint64_t num_begun_ = 0, num_ended_ = 0;
  std::uint64_t num_ended_seen_ = 0, num_returned_ = 0;  // by return_idle_pages()
};

/// The guard of a group's collectives in shared memory. It also ends a wait by the words of the
/// group, knows the rank at fault, and records waits for the group.
class GroupWait final : public WaitGuard {
 public:
  explicit GroupWait(const Group& group) : group_(group) {}

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
    group_.record({.rank = group_.group_rank(peer),
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
