#pragma once

#include <cstddef>

#include "core/chunk_layout.h"

namespace ringcomm {

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
