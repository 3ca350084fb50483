#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/arch.h"
#include "core/chunk_layout.h"
#include "core/link_protocol.h"
#include "core/packet_protocol.h"
#include "cuda/kernels/control.h"
#include "cuda/kernels/limits.h"

namespace ringcomm::cuda {

/// Whether peers can use the buffers of a rank's call where they are: read what it has for them,
/// and, in calls whose results peers write, write those.
enum class Lends : std::uint64_t {
  kNothing,  ///< it has nothing for any peer, and gets no result of a peer: it does as the others
  kNo,
  kYes
};

/// The heading of the data of a call's first phase.
struct alignas(kLineBytes) Heading {
  std::uint32_t header[kHeaderWords];  ///< compared with every peer's before its data is read
  /// Whether peers may access this rank's buffers, and their places; see Lent. There is an input
  /// for each rank.
  Lends lends;
  std::uint64_t lent_inputs[kMaxRanks];
  std::uint64_t lent_output;
  /// Bytes of the shares for and from each rank, where they may differ from rank to rank.
  std::uint64_t input_bytes[kMaxRanks];
  std::uint64_t output_bytes[kMaxRanks];
};

/// The layout of the staging memory of every rank of a group: cursors, packets, regions, mailboxes.
///
/// A block works in its own part of each, regardless of the call's number of blocks, so that its
/// cursors protect everything that it accesses.
struct StagingLayout {
  std::uint32_t world_size = 1;
  std::uint32_t num_blocks = 1;         ///< of any call, at most
  std::uint32_t num_packet_blocks = 1;  ///< of a call by packets, at most
  std::uint32_t packets_per_block = 0;  ///< for each peer, in each of two places
  std::uint32_t region_bytes = 0;       ///< of a block, in each of two phases
  std::uint32_t num_mail_channels = 1;  ///< of a send or receive, at most
  std::uint32_t mail_slot_bytes = 0;

  static constexpr std::uint32_t kMailSlots = 2;

  /// Precedes everything: the word for the first block that failed.
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
  /// Words that show whether a kernel is active: for each block of collectives, then for each
  /// channel of messages to a rank and from one.
  RINGCOMM_HD constexpr std::size_t busy_offset(std::uint32_t idx) const {
    return packet_calls_offset(num_packet_blocks) + std::size_t{idx} * sizeof(std::uint32_t);
  }
  RINGCOMM_HD constexpr std::size_t busy_mail_offset(std::uint32_t peer, bool is_send,
                                                     std::uint32_t channel) const {
    return busy_offset(num_blocks + (2 * peer + (is_send ? 1u : 0u)) * num_mail_channels + channel);
  }
  /// A link from `sender` to this rank: its tail, then slots. The head next to the tail belongs to
  /// the link to `sender`, because this rank waits for it.
  RINGCOMM_HD constexpr std::size_t mail_offset(std::uint32_t sender, std::uint32_t channel) const {
    return num_slices(busy_mail_offset(world_size, false, 0), kLineBytes) * kLineBytes +
           std::size_t{sender * num_mail_channels + channel} *
               (sizeof(LinkCursors) + kMailSlots * std::size_t{mail_slot_bytes});
  }
  /// The packets from `sender` to this rank in calls with odd, or even, numbers.
  RINGCOMM_HD constexpr std::size_t packets_offset(std::uint32_t block, std::uint32_t turn,
                                                   std::uint32_t sender) const {
    return mail_offset(world_size, 0) +
           std::size_t{((block * 2 + turn) * world_size + sender) * packets_per_block} *
               sizeof(Packet);
  }
  /// In front of both regions of a block, which so are one piece of memory for a ring's slots.
  RINGCOMM_HD constexpr std::size_t heading_offset(std::uint32_t block, std::uint64_t phase) const {
    return packets_offset(num_packet_blocks, 0, 0) +
           std::size_t{block} * (2 * (sizeof(Heading) + std::size_t{region_bytes})) +
           (phase & 1) * sizeof(Heading);
  }
  RINGCOMM_HD constexpr std::size_t region_offset(std::uint32_t block, std::uint64_t phase) const {
    return heading_offset(block, 0) + 2 * sizeof(Heading) + (phase & 1) * std::size_t{region_bytes};
  }
  RINGCOMM_HD constexpr std::size_t num_bytes() const { return heading_offset(num_blocks, 0); }
};

/// The addresses of the ranks' staging memories in one rank's mapping.
struct Staging {
  StagingLayout layout;
  std::byte* of[kMaxRanks] = {};

  RINGCOMM_HD std::uint32_t& word_at(int rank, std::size_t offset) const {
    return *reinterpret_cast<std::uint32_t*>(of[rank] + offset);
  }
  RINGCOMM_HD std::uint32_t& claim(int rank) const { return word_at(rank, 0); }
  RINGCOMM_HD std::uint32_t& busy(int rank, unsigned block) const {
    return word_at(rank, layout.busy_offset(block));
  }
  /// The writer's `published` cursor, in the memory of the reader, which waits for it there.
  RINGCOMM_HD Cursor& published(int reader, int writer, unsigned block) const {
    return *reinterpret_cast<Cursor*>(
        of[reader] + layout.published_offset(block, static_cast<std::uint32_t>(writer)));
  }
  RINGCOMM_HD Heading& heading(int rank, unsigned block, std::uint64_t phase) const {
    return *reinterpret_cast<Heading*>(of[rank] + layout.heading_offset(block, phase));
  }
  /// The link of a ring that ends at `to`. Its slots and its tail are in the memory of `to`, which
  /// waits for the tail; the head is in the sender's memory.
  RINGCOMM_HD LinkGeometry ring_link(int from, int to, unsigned block, std::uint32_t num_slots,
                                     std::size_t slot_bytes) const {
    return {&reinterpret_cast<LinkCursors*>(of[to] + layout.ring_offset(block))->tail,
            &reinterpret_cast<LinkCursors*>(of[from] + layout.ring_offset(block))->head,
            of[to] + layout.region_offset(block, 0), num_slots, slot_bytes};
  }
  RINGCOMM_HD LinkGeometry mail_link(int from, int to, unsigned channel) const {
    auto* there = of[to] + layout.mail_offset(static_cast<std::uint32_t>(from), channel);
    auto* here = of[from] + layout.mail_offset(static_cast<std::uint32_t>(to), channel);
    return {&reinterpret_cast<LinkCursors*>(there)->tail,
            &reinterpret_cast<LinkCursors*>(here)->head, there + sizeof(LinkCursors),
            StagingLayout::kMailSlots, layout.mail_slot_bytes};
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
  RINGCOMM_HD Cursor& cursor(int reader, int writer) const {
    return staging.published(reader, writer, block);
  }
  RINGCOMM_HD std::byte* region(int rank, std::uint64_t phase) const {
    return staging.of[rank] + staging.layout.region_offset(block, phase);
  }
};

}  // namespace ringcomm::cuda
