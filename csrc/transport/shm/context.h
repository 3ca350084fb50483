#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "collectives/call.h"
#include "collectives/fused_update.h"
#include "core/board_protocol.h"
#include "core/chunk_layout.h"
#include "host/group.h"
#include "host/host_arch.h"
#include "host/rendezvous.h"
#include "host/shared_arena.h"
#include "host/thread_pool.h"
#include "transport/shm/staging_chooser.h"
#include "transport/transport.h"

namespace ringcomm {

/// The locations of a rank's buffers in memory that its peers can map. Published in the region of
/// the first phase, in place of data.
struct BufferHandle {
  host::ArenaLocation input = {};
  host::ArenaLocation output = {};

  bool is_given() const { return input.is_somewhere(); }
};

/// The state in which collectives of one group run, one after another, on one thread at a time.
/// Each starts with a phase that publishes the call's header beside its cursor, which every peer
/// checks before it reads a byte of data.
class ShmContext {
 public:
  using Arch = host::HostArch;

  ShmContext(host::Group& group, host::GroupWait& guard, const CommunicatorOptions& options);

  int rank() const { return group_.rank(); }
  int world_size() const { return group_.world_size(); }
  std::uint64_t num_peers() const { return static_cast<std::uint64_t>(world_size() - 1); }
  const host::Group& group() const { return group_; }
  CallStep& step() { return group_.step(); }
  Arch& arch() { return arch_; }

  /// Bytes of data that one phase can carry.
  std::size_t phase_bytes() const { return board_.region_bytes(); }

  /// Starts a collective: its first phase will carry the header, which must live until its end, and
  /// the handle.
  void begin(const CallHeader& header, const BufferHandle& handle = {});
  const CallHeader& header() const { return *header_; }

  /// Waits until this rank's region of the next phase may be filled, and returns it.
  std::byte* open();
  /// All ranks may read the opened region, or know that this rank has finished the phases before.
  /// In the first phase, waits for all headers, and throws Mismatched when a peer made another
  /// call. Returns false if a peer has staged no data because its buffers are shared. A staged
  /// collective then returns without a result. Every rank sees the same handles, so all ranks
  /// continue in the same way (ShmTransport::run).
  [[nodiscard]] bool publish();
  /// The data of `peer` in the published phase, or its shared input.
  const std::byte* wait(int peer);
  /// The header of a rank, while the first phase is the last that was published.
  CallHeader header_of(int rank);
  const BufferHandle& handle_of(int rank) const { return handles_[static_cast<std::size_t>(rank)]; }
  /// Whether any rank gave a handle.
  bool has_handles() const;
  /// Whether `rank` did, or every rank (-1).
  bool has_all_handles(int rank) const;

  /// Runs over `num_elems` elements, at most `max_elems` in a phase and at least one phase, because
  /// headers are exchanged even without data: `stage(piece)`, a publication, `take(piece)`. While
  /// inputs are shared, only `take()` of all, in no phase. A piece has `num_steps`.
  template <class Stage, class Take>
  void for_each_piece(std::size_t num_elems, std::size_t max_elems, const Stage& stage,
                      const Take& take, int num_steps = 1) {
    if (is_zero_copy()) {
      take(ElemRange{0, num_elems});
      finish_copies();
      return rejoin();
    }
    const std::size_t num_pieces = std::max<std::size_t>(1, num_slices(num_elems, max_elems));
    for (std::size_t idx = 0; idx < num_pieces; ++idx) {
      const ElemRange piece = slice_of({0, num_elems}, idx, max_elems);
      step() = {1, num_steps, idx + 1, num_pieces};
      stage(piece);
      if (!publish()) return;
      take(piece);
      finish_copies();
    }
  }

  /// From now on wait() gives the peers' own inputs of `num_bytes`, whose handles all ranks have
  /// read, until rejoin(); see Board.
  void begin_zero_copy(std::size_t num_bytes) { shared_bytes_ = num_bytes; }
  bool is_zero_copy() const { return shared_bytes_ > 0; }
  /// The address here of a rank's shared buffer, `offset_bytes` behind its location.
  std::byte* find_shared(int rank, const host::ArenaLocation& location, std::size_t offset_bytes,
                         std::size_t num_bytes);
  void rejoin() { check(board_.rejoin()); }

  host::ThreadPool& thread_pool() { return thread_pool_; }
  /// Stages `num_bytes` for peers with the kind of stores that fits this machine now. Where several
  /// threads copy, it may run until finish_copies() or publish().
  void stage(void* to, const void* from, std::size_t num_bytes);
  StagingChooser& staging() { return staging_; }
  const StagingChooser& staging() const { return staging_; }
  /// Copies what a peer staged, or this rank's own shard, into a result of `result_bytes` in all;
  /// like stage(), later.
  void copy_result(void* to, const void* from, std::size_t num_bytes, std::size_t result_bytes);
  /// Carries out all copies that have not been.
  void finish_copies();

  /// Room for a pointer for each rank.
  std::vector<const void*>& sources() { return sources_; }
  /// Reduces `elems` that `sources` name, left to right, to `to`, or updates them in the call's
  /// buffer; and to `also_to` unless it is null.
  void reduce(const Collective& call, std::span<const void* const> sources, void* to, void* also_to,
              const ElemRange& elems, int divisor, const OwnerUpdate* update = nullptr);
  /// From sources(), as the call asks.
  void reduce(const Collective& call, void* to, std::size_t num_elems) {
    reduce(call, sources_, to, nullptr, {0, num_elems}, divisor_of(call, world_size()));
  }

  /// For what an algorithm stages or copies by itself.
  void count_copied(std::size_t num_bytes) { copied_bytes_ += num_bytes; }
  /// The bytes counted since the last call.
  std::uint64_t take_copied_bytes() { return std::exchange(copied_bytes_, 0); }

  /// Throws WaitFailed, with the rank that was waited for last, unless `stop` is kNone.
  void check(WaitStatus stop) const {
    if (stop != WaitStatus::kNone) throw WaitFailed{stop, guard_.awaited_peer()};
  }

 private:
  // What a rank publishes beside the cursor of the first phase: the header, and before it what may
  // differ between ranks. With the cursor it fits a line of 64 bytes unless the call updates
  // weights.
  struct HeaderLine {
    struct Flags {
      bool has_handle = false;
      StagingChooser::Answers next = 0;  // of rank 0
    } flags;
    CallHeader header;

    std::size_t num_bytes() const { return offsetof(HeaderLine, header) + header.num_wire_bytes(); }
  };
  static_assert(sizeof(HeaderLine) <= sizeof(Cursor::payload));
  static_assert(sizeof(Cursor::value) + offsetof(HeaderLine, header) +
                    offsetof(CallHeader, update) <=
                64);

  // A copy that waits for others, so that all threads get a part of their sum.
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t num_bytes;
    cpu::StoreKind kind;
  };

  void copy(void* to, const void* from, std::size_t num_bytes, cpu::StoreKind kind);
  HeaderLine header_line_of(int peer);

  // Of the first phase.
  enum class First : std::uint8_t { kClosed, kOpen, kOver };

  host::Group& group_;
  host::GroupWait& guard_;
  Arch arch_;
  Board<Arch> board_;
  StagingChooser staging_;
  host::ThreadPool thread_pool_;
  std::vector<Copy> copies_;
  std::uint64_t copied_bytes_ = 0;
  const CallHeader* header_ = nullptr;
  First first_ = First::kOver;
  std::size_t shared_bytes_ = 0;  // of each rank's input; 0 where data is staged
  std::vector<const void*> sources_;
  std::vector<BufferHandle> handles_;                        // of the current call, by rank
  std::vector<std::shared_ptr<host::PeerMemory>> memories_;  // by rank; null until needed
};

/// The collectives over shared memory. Each runs after ShmContext::begin() with the call's header,
/// and returns the bytes that peers consumed from this rank. Throws WaitFailed or Mismatched.
using ShmCollective = std::uint64_t(ShmContext& context, const Collective& call);

/// all_reduce.cc: results are equal to the last bit on all ranks, because every chunk is either
/// reduced by one rank or by all in the order of the ranks.
ShmCollective all_reduce_one_shot, all_reduce_zero_copy, reduce;
/// all_reduce, or with an update reduce_scatter_update_all_gather; run_ring is in ring.cc.
ShmCollective run_two_shot, run_ring;

/// Where one_shot ends in a group that has not measured it.
std::size_t one_shot_max_bytes(int world_size);

/// board_collectives.cc: one phase per piece; each byte is staged once, regardless of the number of
/// readers. While the context shares inputs, they run on these.
ShmCollective barrier, broadcast, all_gather, reduce_scatter;

/// From this size of a rank's shard, a collective runs on the ranks' own buffers if all of them can
/// be read.
std::size_t min_zero_copy_bytes(OpKind op, int world_size);

/// There too: a rank has a shard for each other one, or for some, and the shards may differ
/// in size.
ShmCollective alltoallv;
/// Throws Mismatched with the sizes that differ, for a call in which the shards of some ranks are
/// uneven and those of others are not. The first phase must have been published.
void explain_mismatch(ShmContext& context, const Collective& call);

/// Collectives of ranks that share memory: on boards, on the links of a ring, or on buffers that
/// all ranks can access directly (SharedArena).
class ShmTransport final : public Transport {
 public:
  /// Collective over the ranks on the host of `rank`, which have been found. Throws Error.
  ShmTransport(host::Rendezvous& rendezvous, const PeerTable& peer_table, int rank,
               const CommunicatorOptions& options);

  GroupState& group_state() override { return group_; }
  std::unique_ptr<SendRecv> make_send_recv(Failure& failure,
                                           Stats& stats) override;  // send_recv.cc
  bool shares_memory() const override { return true; }
  void plan(Collective& call) const override;
  Traffic run(const Collective& call, const WaitLimits& limits) override;
  void return_idle_pages() override { group_.return_idle_pages(); }
  std::size_t mapped_bytes() const override { return group_.num_bytes(); }

 private:
  BufferHandle handle_of(const Collective& call) const;
  bool run_zero_copy(ShmCollective& collective, const Collective& call, const BufferHandle& mine,
                     Traffic& traffic);

  CommunicatorOptions options_;
  host::Group group_;
  host::GroupWait guard_;
  ShmContext context_;
};

}  // namespace ringcomm
