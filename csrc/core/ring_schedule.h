#pragma once

#include <cstddef>

#include "core/chunk_layout.h"

namespace ringcomm {

/// Which rank sends which chunk at which step of a ring; accesses no memory.
///
/// In each of world_size - 1 steps a rank sends one chunk to `next` and receives another from
/// `previous`. After the reduce-scatter rank r holds the complete chunk r, which is where the
/// all-gather starts. The chunk received at step s is the one sent at step s + 1: a slice can be
/// forwarded as soon as it arrives.
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

/// One message of a ring as its receiver counts them. Slices go around in groups of num_slots: a
/// group takes all its steps before the next one starts.
struct RingTurn {
  std::size_t group = 0;
  bool is_gather = false;  ///< the all-gather, and not the reduce-scatter before it
  int step = 0;
  std::size_t place = 0;  ///< of the slice in its group
};

/// The turns of a ring of num_steps steps; touches no memory.
struct RingPlan {
  std::size_t num_slices;
  std::size_t slice_elems;
  std::size_t num_slots;
  int num_steps;
  bool has_reduce_scatter;
  bool has_all_gather;

  std::size_t num_groups() const { return ringcomm::num_slices(num_slices, num_slots); }
  std::size_t group_slices(std::size_t group) const {
    return slice_of({0, num_slices}, group, num_slots).num_elems;
  }
  std::size_t slice_idx(const RingTurn& turn) const { return turn.group * num_slots + turn.place; }
  RingTurn first() const { return {.is_gather = !has_reduce_scatter}; }
  bool is_over(const RingTurn& turn) const { return turn.group >= num_groups(); }

  void advance(RingTurn& turn) const {
    if (++turn.place < group_slices(turn.group)) return;
    turn.place = 0;
    if (++turn.step < num_steps) return;
    turn.step = 0;
    if (!turn.is_gather && has_all_gather) {
      turn.is_gather = true;
    } else {
      ++turn.group;
      turn.is_gather = !has_reduce_scatter;
    }
  }
};

}  // namespace ringcomm
