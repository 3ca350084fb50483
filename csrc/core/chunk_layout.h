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

}  // namespace ringcomm
