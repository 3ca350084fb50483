#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/arch.h"
#include "core/chunk_layout.h"
#include "core/link_protocol.h"
#include "core/packet_protocol.h"

namespace ringcomm::cuda {

inline constexpr int kMaxRanks = 32;

/// Threads of a block of any kernel: what has a barrier and a channel to the same block of other
/// ranks.
inline constexpr int kBlockThreads = 256;
/// Blocks that a launch puts at a place, as one block of CUDA: one works while another waits.
inline constexpr int kBlocksPerPlace = 2;
inline constexpr int kPlaceThreads = kBlockThreads * kBlocksPerPlace;

/// Places of any kernel of a group on a multiprocessor: a thread has 64 registers. Checked where
/// kernels are loaded.
inline constexpr int kPlacesPerMultiprocessor = 2;

/// Words of a call's header, as kernels compare them: CallHeader without the call's number.
inline constexpr int kHeaderWords = 32;

/// The words by which a rank's kernels and its host communicate, in host memory that both map. The
/// host writes `abort`; kernels that see it stop waiting. The first block that fails fills in the
/// record, `stop` last; the watchdog reads it.
struct Control {
  std::uint32_t abort = 0;
  std::uint32_t stop = 0;  ///< a core WaitStatus, or kMismatch; 0: nothing has happened
  std::int32_t peer = -1;  ///< the rank waited for, or that called something else
  std::uint64_t launch = 0;
  /// A wait that does not end at once stores here the rank that it waits for, and the time of its
  /// last poll for `abort` by a clock of its own.
  std::int32_t awaited_peer = -1;
  std::uint32_t asked_at = 0;
  std::uint32_t theirs[kHeaderWords] = {};  ///< with kMismatch: the peer's header

  RINGCOMM_HD void record_wait(int peer_waited_for, std::uint32_t now) {
#ifdef __CUDA_ARCH__
    *static_cast<volatile std::int32_t*>(&awaited_peer) = peer_waited_for;
    *static_cast<volatile std::uint32_t*>(&asked_at) = now;
#else
    __atomic_store_n(&awaited_peer, peer_waited_for, __ATOMIC_RELAXED);
    __atomic_store_n(&asked_at, now, __ATOMIC_RELAXED);
#endif
  }
};

/// The words of a rank's kernels in front of its staging.
struct RankWords {
  std::uint32_t is_reported;  ///< by the first block that failed
  std::uint32_t asked_at;     ///< when a block last read Control::abort
  std::uint32_t is_aborted;   ///< what it read
};

/// In Control::stop: a peer made another call.
inline constexpr std::uint32_t kMismatch = 100;
/// Ranks theirs[0] and theirs[1] disagree on the first's bytes for the second: two words of each.
inline constexpr std::uint32_t kSizesDiffer = 101;
/// A receive got a different message: its bytes as two words, its tag.
inline constexpr std::uint32_t kP2pDiffers = 102;
/// Two kernels of this rank used the same part of its staging at a time.
inline constexpr std::uint32_t kOverlap = 103;

/// Whether peers can use the buffers of a rank's call where they are.
enum class Lends : std::uint64_t {
  kNothing,  ///< it has nothing for any peer, and gets no result of a peer: it does as the others
  kNo,
  kYes
};

/// The header of the data of a call's first phase.
struct alignas(kLineBytes) PhaseHeader {
  std::uint32_t header[kHeaderWords];  ///< compared with every peer's before its data is read
  /// Whether peers may access this rank's buffers, and their places (Lent): an input for each rank.
  Lends lends;
  std::uint64_t lent_inputs[kMaxRanks];
  std::uint64_t lent_output;
  /// Bytes of the shards for and from each rank, where they may differ from rank to rank.
  std::uint64_t input_bytes[kMaxRanks];
  std::uint64_t output_bytes[kMaxRanks];
};

/// The layout of the staging of every rank: cursors, packets, regions, message slots. A block works
/// in its own part of each, so that its cursors protect everything that it accesses.
struct StagingLayout {
  std::uint32_t world_size = 1;
  std::uint32_t num_blocks = kBlocksPerPlace;  ///< of any call, at most: those of all places
  std::uint32_t num_packet_blocks = 1;         ///< of a call by packets, at most
  std::uint32_t packets_per_block = 0;         ///< for each peer, in each of two places
  std::uint32_t region_bytes = 0;              ///< of a block, in each of two phases
  std::uint32_t num_p2p_channels = 1;          ///< of a send or receive, at most
  std::uint32_t p2p_slot_bytes = 0;

  RINGCOMM_HD constexpr std::uint32_t num_places() const { return num_blocks / kBlocksPerPlace; }

  static constexpr std::uint32_t kP2pSlots = 2;
  /// The slots of a ring's link share the two regions of a block.
  static constexpr std::uint32_t kRingSlots = 2;
  RINGCOMM_HD constexpr std::uint32_t ring_slot_bytes() const {
    return 2 * region_bytes / kRingSlots / kLineBytes * kLineBytes;
  }

  /// After the line of RankWords.
  RINGCOMM_HD constexpr std::size_t published_offset(std::uint32_t block,
                                                     std::uint32_t writer) const {
    return kLineBytes + std::size_t{block * world_size + writer} * sizeof(Cursor);
  }
  RINGCOMM_HD constexpr std::size_t ring_offset(std::uint32_t block) const {
    return published_offset(num_blocks, 0) + std::size_t{block} * sizeof(LinkCursors);
  }
  /// Numbers of calls by packets, one per block.
  RINGCOMM_HD constexpr std::size_t packet_calls_offset(std::uint32_t block) const {
    return ring_offset(num_blocks) + std::size_t{block} * kLineBytes;
  }
  /// Words of Claim: for each block of collectives, then for each channel of messages to a rank and
  /// from one.
  RINGCOMM_HD constexpr std::size_t busy_offset(std::uint32_t idx) const {
    return packet_calls_offset(num_packet_blocks) + std::size_t{idx} * sizeof(std::uint32_t);
  }
  RINGCOMM_HD constexpr std::size_t busy_p2p_offset(std::uint32_t peer, bool is_send,
                                                    std::uint32_t channel) const {
    return busy_offset(num_blocks + (2 * peer + (is_send ? 1u : 0u)) * num_p2p_channels + channel);
  }
  /// A link from `sender`: its tail, then slots. The head next to the tail is that of the link to
  /// `sender`, for which this rank waits.
  RINGCOMM_HD constexpr std::size_t p2p_offset(std::uint32_t sender, std::uint32_t channel) const {
    return num_slices(busy_p2p_offset(world_size, false, 0), kLineBytes) * kLineBytes +
           std::size_t{sender * num_p2p_channels + channel} *
               (sizeof(LinkCursors) + kP2pSlots * std::size_t{p2p_slot_bytes});
  }
  /// The packets from `sender` to this rank in calls with odd, or even, numbers.
  RINGCOMM_HD constexpr std::size_t packets_offset(std::uint32_t block, std::uint32_t turn,
                                                   std::uint32_t sender) const {
    return p2p_offset(world_size, 0) +
           std::size_t{((block * 2 + turn) * world_size + sender) * packets_per_block} *
               sizeof(Packet);
  }
  /// In front of both regions of a block, which so are one piece of memory for a ring's slots.
  RINGCOMM_HD constexpr std::size_t phase_header_offset(std::uint32_t block,
                                                        std::uint64_t phase) const {
    return packets_offset(num_packet_blocks, 0, 0) +
           std::size_t{block} * (2 * (sizeof(PhaseHeader) + std::size_t{region_bytes})) +
           (phase & 1) * sizeof(PhaseHeader);
  }
  RINGCOMM_HD constexpr std::size_t region_offset(std::uint32_t block, std::uint64_t phase) const {
    return phase_header_offset(block, 0) + 2 * sizeof(PhaseHeader) +
           (phase & 1) * std::size_t{region_bytes};
  }
  RINGCOMM_HD constexpr std::size_t num_bytes() const { return phase_header_offset(num_blocks, 0); }
};

/// The addresses of the ranks' staging memories in one rank's mapping.
struct Staging {
  StagingLayout layout;
  std::byte* of[kMaxRanks] = {};

  RINGCOMM_HD std::uint32_t& word_at(int rank, std::size_t offset) const {
    return *reinterpret_cast<std::uint32_t*>(of[rank] + offset);
  }
  RINGCOMM_HD RankWords& words(int rank) const { return *reinterpret_cast<RankWords*>(of[rank]); }
  RINGCOMM_HD std::uint32_t& busy(int rank, unsigned block) const {
    return word_at(rank, layout.busy_offset(block));
  }
  /// The writer's `published` cursor, in the memory of the reader, which waits for it there.
  RINGCOMM_HD Cursor& published(int reader, int writer, unsigned block) const {
    return *reinterpret_cast<Cursor*>(
        of[reader] + layout.published_offset(block, static_cast<std::uint32_t>(writer)));
  }
  RINGCOMM_HD PhaseHeader& phase_header(int rank, unsigned block, std::uint64_t phase) const {
    return *reinterpret_cast<PhaseHeader*>(of[rank] + layout.phase_header_offset(block, phase));
  }
  /// The link of a ring that ends at `to`: slots and tail are in the memory of `to`, which waits
  /// for the tail; the head is in the sender's.
  RINGCOMM_HD LinkGeometry ring_link(int from, int to, unsigned block) const {
    return {&reinterpret_cast<LinkCursors*>(of[to] + layout.ring_offset(block))->tail,
            &reinterpret_cast<LinkCursors*>(of[from] + layout.ring_offset(block))->head,
            of[to] + layout.region_offset(block, 0), StagingLayout::kRingSlots,
            layout.ring_slot_bytes()};
  }
  RINGCOMM_HD LinkGeometry p2p_link(int from, int to, unsigned channel) const {
    auto* there = of[to] + layout.p2p_offset(static_cast<std::uint32_t>(from), channel);
    auto* here = of[from] + layout.p2p_offset(static_cast<std::uint32_t>(to), channel);
    return {&reinterpret_cast<LinkCursors*>(there)->tail,
            &reinterpret_cast<LinkCursors*>(here)->head, there + sizeof(LinkCursors),
            StagingLayout::kP2pSlots, layout.p2p_slot_bytes};
  }
};

/// The boards of block b of all ranks; a geometry of core's Board.
struct BlockBoards {
  const Staging& staging;
  unsigned block;
  int world_size;
  std::size_t region_bytes;

  RINGCOMM_HD BlockBoards(const Staging& all, unsigned block_idx)
      : staging(all),
        block(block_idx),
        world_size(static_cast<int>(all.layout.world_size)),
        region_bytes(all.layout.region_bytes) {}

  static constexpr bool kHasCopies = true;
  RINGCOMM_HD Cursor& cursor(int reader, int writer, std::uint64_t /*phase*/) const {
    return staging.published(reader, writer, block);
  }
  RINGCOMM_HD std::byte* region(int rank, std::uint64_t phase) const {
    return staging.of[rank] + staging.layout.region_offset(block, phase);
  }
};

}  // namespace ringcomm::cuda
