#pragma once

#include <algorithm>
#include <cstddef>

#include "core/chunk_layout.h"

namespace ringcomm {

/// How shards of different sizes are cut into pieces, one for each phase of the boards: the same on
/// every rank that knows all sizes.
///
/// A rank's region is divided among those that it has something for, in proportion to their shards,
/// so that the number of phases is that of the rank with the most to send. The slices of a region
/// are contiguous, so that small ones share cache lines.
struct ShardLayout {
  /// A slice for each peer; one slice that all peers read; a slice for each peer, and a piece is
  /// the same part of each source.
  enum class Kind { kToEach, kToAll, kReduced };

  Kind kind;
  int world_size;
  std::size_t room_elems;   ///< of a region, more than there are ranks
  std::size_t* sizes;       ///< a table for elems()
  std::size_t* num_pieces;  ///< by sending rank, for count_pieces()

  /// What `from` has for `to`; set by the caller before anything else is asked of `from`.
  std::size_t& elems(int from, int to) const { return sizes[from * world_size + to]; }

  /// Whether the region of `from` has a slice for `to`.
  bool is_staged(int from, int to) const {
    return to != from && (kind != Kind::kToAll || to == (from == 0 ? 1 : 0));
  }

  /// Counts the pieces of `from`, so that the slices of each fit into its region: each is longer
  /// than its part by less than one element.
  void count_pieces(int from) const {
    std::size_t sum = 0;
    for (int to = 0; to < world_size; ++to)  // of a reduction the own shard counts, too
      if (is_staged(from, to) || kind == Kind::kReduced) sum += elems(from, to);
    const auto max_excess = static_cast<std::size_t>(world_size);
    num_pieces[from] = sum <= room_elems ? 1 : num_slices(sum, room_elems - max_excess);
  }

  /// The pieces of the rank that has the most, once all are counted.
  std::size_t num_phases() const { return *std::max_element(num_pieces, num_pieces + world_size); }

  /// The part of the shard from `from` to `to` that belongs to the piece.
  ElemRange slice(int from, int to, std::size_t piece_idx) const {
    const std::size_t shard = elems(from, to);
    return slice_of({0, shard}, piece_idx, num_slices(shard, num_pieces[from]));
  }

  /// Where that part begins in the data of the region of `from`.
  std::size_t offset_elems(int from, int to, std::size_t piece_idx) const {
    std::size_t sum = 0;
    for (int other = 0; other < to && kind != Kind::kToAll; ++other)
      if (other != from) sum += slice(from, other, piece_idx).num_elems;
    return sum;
  }

  /// Whether `rank`, if it receives from `peer` into the buffer that it sends it, overwrites what
  /// it has not staged yet: a rank with fewer pieces sends longer slices.
  bool overwrites(int rank, int peer) const {
    return num_pieces[peer] < num_pieces[rank] || elems(peer, rank) != elems(rank, peer);
  }
};

}  // namespace ringcomm
