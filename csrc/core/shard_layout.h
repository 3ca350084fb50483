#pragma once

#include <algorithm>
#include <cstddef>

#include "core/chunk_layout.h"

namespace ringcomm {

/// How shards of different sizes are cut into pieces, one for each phase of the boards, as `rank`
/// sees it: the same on every rank that knows all sizes. A slice is at the same place of the region
/// in every phase, and slices are contiguous until the first shard ends, so that small ones share
/// cache lines.
struct ShardLayout {
  /// A slice for each peer; one slice that all peers read; a slice for each peer, and a piece is
  /// the same part of each source.
  enum class Kind { kToEach, kToAll, kReduced };

  /// What `rank` needs to know of a rank that sends.
  struct Sender {
    std::size_t num_pieces = 0;
    std::size_t elems = 0;         ///< that it has for `rank`
    std::size_t offset_elems = 0;  ///< of the slice for `rank` in its region
  };

  Kind kind;
  int rank;
  int world_size;
  std::size_t room_elems;  ///< of a region, more than there are ranks
  Sender* senders;         ///< by rank; set by learn()

  /// Whether the region of `from` has a slice for `to`.
  bool is_staged(int from, int to) const {
    return to != from && (kind != Kind::kToAll || to == (from == 0 ? 1 : 0));
  }

  /// Before anything else is asked of `from`: elems_of(to) is what it has for `to`.
  template <class ElemsOf>
  void learn(int from, const ElemsOf& elems_of) const {
    std::size_t sum = 0;
    for (int to = 0; to < world_size; ++to)  // of a reduction the own shard counts, too
      if (is_staged(from, to) || kind == Kind::kReduced) sum += elems_of(to);
    Sender& sender = senders[from];
    sender = {.num_pieces = count_pieces(sum), .elems = elems_of(rank)};
    for (int to = 0; to < rank && kind != Kind::kToAll; ++to)
      if (to != from) sender.offset_elems += slice_elems(from, elems_of(to));
  }

  /// The same, in constant time, where `from` has `elems` for each of the ranks `begin` to
  /// `end` - 1 and nothing for others, to each a slice.
  void learn_even(int from, int begin, int end, std::size_t elems) const {
    const auto num_staged = [&](int last) {  // for ranks before it
      const int num = std::max(0, std::min(last, end) - begin);
      return static_cast<std::size_t>(num - (begin <= from && from < std::min(last, end) ? 1 : 0));
    };
    const bool is_for_rank = begin <= rank && rank < end;
    Sender& sender = senders[from];
    sender = {.num_pieces = count_pieces(num_staged(end) * elems),
              .elems = is_for_rank ? elems : 0};
    sender.offset_elems = num_staged(rank) * slice_elems(from, elems);
  }

  /// The pieces of the rank that has the most, once all are known.
  std::size_t num_phases() const {
    std::size_t most = 0;
    for (int from = 0; from < world_size; ++from) most = std::max(most, senders[from].num_pieces);
    return most;
  }

  /// The room of a slice in the region of `from`, for a shard of `shard_elems`.
  std::size_t slice_elems(int from, std::size_t shard_elems) const {
    return num_slices(shard_elems, senders[from].num_pieces);
  }

  /// The part of such a shard that belongs to the piece.
  ElemRange slice(int from, std::size_t shard_elems, std::size_t piece_idx) const {
    return slice_of({0, shard_elems}, piece_idx, slice_elems(from, shard_elems));
  }

  /// Whether `rank`, if it receives from `peer` into the buffer of `given_elems` that it sends it,
  /// overwrites what it has not staged yet: a rank with fewer pieces sends longer slices.
  bool overwrites(int peer, std::size_t given_elems) const {
    return senders[peer].num_pieces < senders[rank].num_pieces ||
           senders[peer].elems != given_elems;
  }

 private:
  /// So that the slices of `sum` elements fit into a region: each is longer than its part by less
  /// than one element.
  std::size_t count_pieces(std::size_t sum) const {
    const auto max_excess = static_cast<std::size_t>(world_size);
    return sum <= room_elems ? 1 : num_slices(sum, room_elems - max_excess);
  }
};

}  // namespace ringcomm
