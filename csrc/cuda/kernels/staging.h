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

/// Threads of a block of any kernel.
inline constexpr int kBlockThreads = 256;

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
  std::uint64_t copied = 0;                 ///< between host and device; for one copy at a time

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

/// In Control::stop: a peer made another call.
inline constexpr std::uint32_t kMismatch = 100;
/// A rank has another shard for this one than this one expects: its bytes, and the expected ones,
/// two words each.
inline constexpr std::uint32_t kShardDiffers = 101;
/// A receive got a different message: the same, and its tag.
inline constexpr std::uint32_t kP2pDiffers = 102;
/// Two kernels of this rank used the same part of its staging at a time.
inline constexpr std::uint32_t kOverlap = 103;

/// The words of a rank's kernels in front of its staging.
struct RankWords {
  std::uint32_t is_reported;  ///< by the first block that failed
  std::uint32_t asked_at;     ///< when a block last read Control::abort
  std::uint32_t is_aborted;   ///< what it read
  std::uint32_t is_in_call;   ///< between the two rendezvous of a call: claim()
};

/// A place in memory that all ranks of a group have mapped: an allocation's row in the table of
/// local addresses and an offset, or an offset in its owner's scratch memory. 0 is none.
using Place = std::uint64_t;
inline constexpr int kPlaceOffsetBits = 40;
inline constexpr Place kScratchRow = (Place{1} << (64 - kPlaceOffsetBits)) - 1;
RINGCOMM_HD constexpr Place place_in(std::uint64_t row, std::uint64_t offset) {
  return (row + 1) << kPlaceOffsetBits | offset;
}
RINGCOMM_HD constexpr Place place_in_scratch(std::uint64_t offset) {
  return kScratchRow << kPlaceOffsetBits | offset;
}

/// What a rank publishes at the first rendezvous of a call.
struct alignas(kLineBytes) CallNotice {
  std::uint32_t header[kHeaderWords];  ///< compared with every peer's
  std::uint64_t is_staged;             ///< whether some of its places are in its scratch memory
  Place inputs[kMaxRanks];             ///< what each rank reads
  Place outputs[kMaxRanks];            ///< where each rank writes
};

/// The result of a rank's last rendezvous, for the kernels between it and the next. Local addresses
/// of what each peer has for this rank, and of where it wants this rank's results.
struct alignas(kLineBytes) CallTable {
  std::uint32_t is_open;   ///< all ranks have made this call
  std::uint32_t is_whole;  ///< no rank stages: its first piece is all of it
  const std::byte* inputs[kMaxRanks];
  std::byte* outputs[kMaxRanks];
};

/// Links carry messages of the program, or shards of collectives whose sizes only two ranks know.
enum class LinkUse : std::uint8_t { kMessages, kShards };

/// In front of a slot of a link: of the message that its first slot begins.
struct alignas(16) Letter {
  std::uint64_t num_bytes;  ///< of the whole message
  std::int64_t tag;
  Place place;  ///< of its data; 0: it is in this slot and the next ones
  std::uint64_t unused;
};

/// What a rank keeps of its two links with a peer, behind their cursors.
struct alignas(kLineBytes) LinkWords {
  /// Messages of a channel, in one launch, that may be read where they are.
  static constexpr std::uint32_t kMostLong = 8;
  const std::byte* sources[kMostLong];  ///< of those that are received; null: by slots
  Cursor read;                          ///< of those that were announced: the peer has read so many
  std::uint64_t num_announced;          ///< to the peer
  std::uint64_t num_found, num_read;    ///< of those that the peer has announced
  // Of what is received, or sent.
  std::uint32_t is_used[2];  ///< a word of claim()
  std::uint32_t is_open[2];  ///< the launch's first kernel has not failed
};

/// The layout of the staging of every rank: the rendezvous, packets, links, scratch memory.
struct StagingLayout {
  std::uint32_t world_size = 1;
  std::uint32_t num_blocks = 1;         ///< of kernels that wait: packets and rings, at most
  std::uint32_t packets_per_block = 0;  ///< for each peer, in each of two places
  std::uint32_t ring_slot_bytes = 0;
  std::uint32_t link_slot_bytes = 0;
  std::uint64_t scratch_bytes = 0;

  static constexpr std::uint32_t kRingSlots = 2;
  static constexpr std::uint32_t kLinkSlots = 4;

  // After the line of RankWords.
  static constexpr std::size_t kTableOffset = kLineBytes;
  static constexpr std::size_t kNoticeOffset = kTableOffset + sizeof(CallTable);
  static constexpr std::size_t kPublishedOffset = kNoticeOffset + sizeof(CallNotice);

  RINGCOMM_HD constexpr std::size_t packet_calls_offset(std::uint32_t block) const {
    return kPublishedOffset + std::size_t{world_size} * sizeof(Cursor) +
           std::size_t{block} * kLineBytes;
  }
  RINGCOMM_HD constexpr std::size_t ring_offset(std::uint32_t block) const {
    return packet_calls_offset(num_blocks) +
           std::size_t{block} * (sizeof(LinkCursors) + kRingSlots * std::size_t{ring_slot_bytes});
  }
  /// A link from `sender`: its tail, then slots. The head next to the tail is that of the link to
  /// `sender`, for which this rank waits.
  RINGCOMM_HD constexpr std::size_t link_offset(LinkUse use, std::uint32_t sender) const {
    return ring_offset(num_blocks) +
           (static_cast<std::size_t>(use) * world_size + sender) * link_bytes();
  }
  RINGCOMM_HD constexpr std::size_t link_bytes() const {
    return sizeof(LinkCursors) + sizeof(LinkWords) + kLinkSlots * std::size_t{link_slot_bytes};
  }
  /// The packets from `sender` to this rank in calls with odd, or even, numbers.
  RINGCOMM_HD constexpr std::size_t packets_offset(std::uint32_t block, std::uint32_t turn,
                                                   std::uint32_t sender) const {
    return link_offset(LinkUse::kShards, world_size) +
           std::size_t{((block * 2 + turn) * world_size + sender)} * packets_per_block *
               sizeof(Packet);
  }
  RINGCOMM_HD constexpr std::size_t scratch_offset() const {
    return num_slices(packets_offset(num_blocks, 0, 0), kScratchAlign) * kScratchAlign;
  }
  RINGCOMM_HD constexpr std::size_t num_bytes() const { return scratch_offset() + scratch_bytes; }
  static constexpr std::size_t kScratchAlign = 256;
};

/// The addresses of the ranks' staging memories in one rank's mapping.
struct Staging {
  StagingLayout layout;
  std::byte* of[kMaxRanks] = {};

  template <class Word>
  RINGCOMM_HD Word& at(int rank, std::size_t offset) const {
    return *reinterpret_cast<Word*>(of[rank] + offset);
  }
  RINGCOMM_HD RankWords& words(int rank) const { return at<RankWords>(rank, 0); }
  RINGCOMM_HD CallTable& table(int rank) const {
    return at<CallTable>(rank, StagingLayout::kTableOffset);
  }
  /// Of the call that is open, or of the last one.
  RINGCOMM_HD CallNotice& notice(int rank) const {
    return at<CallNotice>(rank, StagingLayout::kNoticeOffset);
  }
  /// The writer's cursor, in the memory of the reader, which waits for it there.
  RINGCOMM_HD Cursor& published(int reader, int writer) const {
    return at<Cursor>(reader, StagingLayout::kPublishedOffset +
                                  static_cast<std::size_t>(writer) * sizeof(Cursor));
  }
  /// The phase of a rank one of whose calls has failed: no peer reaches it (finish_call()).
  static constexpr std::uint64_t kFailed = ~std::uint64_t{0};
  RINGCOMM_HD bool has_failed(int rank) const { return published(rank, rank).value == kFailed; }

  RINGCOMM_HD std::byte* scratch(int rank) const { return of[rank] + layout.scratch_offset(); }
  /// The link of a ring that ends at `to`: slots and tail are in the memory of `to`, which waits
  /// for the tail; the head is in the sender's.
  RINGCOMM_HD LinkGeometry ring_link(int from, int to, unsigned block) const {
    return link_of(from, to, layout.ring_offset(block), layout.ring_offset(block),
                   sizeof(LinkCursors), StagingLayout::kRingSlots, layout.ring_slot_bytes);
  }
  RINGCOMM_HD LinkGeometry link(LinkUse use, int from, int to) const {
    return link_of(from, to, layout.link_offset(use, static_cast<std::uint32_t>(to)),
                   layout.link_offset(use, static_cast<std::uint32_t>(from)),
                   sizeof(LinkCursors) + sizeof(LinkWords), StagingLayout::kLinkSlots,
                   layout.link_slot_bytes);
  }
  RINGCOMM_HD LinkWords& link_words(LinkUse use, int rank, int peer) const {
    return at<LinkWords>(
        rank, layout.link_offset(use, static_cast<std::uint32_t>(peer)) + sizeof(LinkCursors));
  }

 private:
  RINGCOMM_HD LinkGeometry link_of(int from, int to, std::size_t at_sender, std::size_t at_receiver,
                                   std::size_t slots, std::uint32_t num_slots,
                                   std::size_t slot_bytes) const {
    return {&at<LinkCursors>(to, at_receiver).tail, &at<LinkCursors>(from, at_sender).head,
            of[to] + at_receiver + slots, num_slots, slot_bytes};
  }
};

/// The rendezvous of all ranks; a geometry of core's Board without regions.
struct Meeting {
  const Staging& staging;
  int world_size;
  static constexpr bool kHasCopies = true;

  RINGCOMM_HD explicit Meeting(const Staging& all)
      : staging(all), world_size(static_cast<int>(all.layout.world_size)) {}
  RINGCOMM_HD Cursor& cursor(int reader, int writer, std::uint64_t /*phase*/) const {
    return staging.published(reader, writer);
  }
};

}  // namespace ringcomm::cuda
