#pragma once

#include <algorithm>
#include <cstddef>

namespace ringcomm {

/// A half-open range of elements.
struct ElemRange {
  std::size_t begin_elems = 0;
  std::size_t num_elems = 0;

  constexpr std::size_t end_elems() const { return begin_elems + num_elems; }
  friend constexpr bool operator==(const ElemRange&, const ElemRange&) = default;
};

/// Cuts `num_elems` elements, any number, into one chunk per rank: contiguous, in rank order, and
/// the first num_elems % num_chunks have one element more.
class ChunkLayout {
 public:
  constexpr ChunkLayout(std::size_t num_elems, int num_chunks)
      : base_elems_(num_elems / static_cast<std::size_t>(num_chunks)),
        num_longer_(num_elems % static_cast<std::size_t>(num_chunks)) {}

  constexpr ElemRange chunk(int chunk_idx) const {
    const auto idx = static_cast<std::size_t>(chunk_idx);
    return {idx * base_elems_ + std::min(idx, num_longer_),
            base_elems_ + (idx < num_longer_ ? 1 : 0)};
  }

  /// Elements of the longest chunk: chunk 0.
  constexpr std::size_t max_chunk_elems() const { return base_elems_ + (num_longer_ > 0 ? 1 : 0); }

 private:
  std::size_t base_elems_;
  std::size_t num_longer_;
};

/// Number of pieces of at most `max_elems` that cover `num_elems`; none for an empty range.
constexpr std::size_t num_slices(std::size_t num_elems, std::size_t max_elems) {
  return (num_elems + max_elems - 1) / max_elems;
}

/// Slice `slice_idx` of `range` when cut into pieces of `max_elems`; empty past the end, so that
/// ranks whose chunks differ by one element can run the same number of slices.
constexpr ElemRange slice_of(const ElemRange& range, std::size_t slice_idx, std::size_t max_elems) {
  const std::size_t begin_elems = std::min(slice_idx * max_elems, range.num_elems);
  return {range.begin_elems + begin_elems, std::min(max_elems, range.num_elems - begin_elems)};
}

/// Which rank sends which chunk at which step of a ring; accesses no memory. In each of world_size
/// - 1 steps a rank sends one chunk to `next` and receives from `previous` the one that it sends in
/// the next step. After the reduce-scatter rank r holds the complete chunk r.
class RingSchedule {
 public:
  constexpr RingSchedule(int rank, int world_size) : rank_(rank), world_size_(world_size) {}

  constexpr int num_steps() const { return world_size_ - 1; }
  constexpr int next() const { return wrap(rank_ + 1); }
  constexpr int previous() const { return wrap(rank_ - 1); }

  constexpr int reduce_scatter_send_chunk(int step) const { return wrap(rank_ - step - 1); }
  constexpr int reduce_scatter_recv_chunk(int step) const { return wrap(rank_ - step - 2); }
  constexpr int all_gather_send_chunk(int step) const { return wrap(rank_ - step); }
  constexpr int all_gather_recv_chunk(int step) const { return wrap(rank_ - step - 1); }

 private:
  constexpr int wrap(int idx) const { return ((idx % world_size_) + world_size_) % world_size_; }

  int rank_;
  int world_size_;
};

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

/// The order in which a rank moves the shards of a gather, scatter or all_to_all over several
/// hosts: in step d to the rank d places on, and inside its host at once.
///
/// `inside` returns when all ranks of the host have called it. `move` starts the messages of a
/// step, `finish` waits for those that were started, and `must_finish` says whether so much was
/// sent that the next step has to wait. Where that may differ between ranks, as in an all_to_all,
/// `inside` is first: afterwards messages wait for messages only, and the rank in the lowest step
/// for ranks that have started it. Were it last, ranks of two hosts would wait for each other in a
/// circle.
template <class Inside, class MustFinish, class Move, class Finish>
void move_over_hosts(int rank, int world_size, bool is_inside_first, const Inside& inside,
                     const MustFinish& must_finish, const Move& move, const Finish& finish) {
  const bool is_inside_last = !is_inside_first;
  if (!is_inside_last) inside();
  for (int distance = 1; distance < world_size; ++distance) {
    if (must_finish()) finish();
    move((rank + distance) % world_size, (rank + world_size - distance) % world_size);
  }
  if (is_inside_last) inside();
  finish();
}

}  // namespace ringcomm
