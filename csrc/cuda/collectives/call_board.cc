#include "cuda/collectives/call_board.h"

namespace ringcomm::cuda {

void CallBoard::note(std::uint64_t number, const HeaderWords& header) {
  Entry& entry = of(rank_).entries[number % kNumEntries];
  // A reader that sees the same even state before and after has read one entry: no word of the next
  // entry is visible before its odd state.
  __atomic_store_n(&entry.number_and_state, 2 * number + 1, __ATOMIC_SEQ_CST);
  for (std::size_t i = 0; i < header.size(); ++i)
    __atomic_store_n(&entry.header[i], header[i], __ATOMIC_RELEASE);
  __atomic_store_n(&entry.number_and_state, 2 * (number + 1), __ATOMIC_RELEASE);
  __atomic_store_n(&of(rank_).num_noted, number + 1, __ATOMIC_RELEASE);
}

std::uint64_t CallBoard::num_noted(int rank) const {
  return __atomic_load_n(&of(rank).num_noted, __ATOMIC_ACQUIRE);
}

bool CallBoard::read(int rank, std::uint64_t number, HeaderWords& header) const {
  const Entry& entry = of(rank).entries[number % kNumEntries];
  const std::uint64_t wanted = 2 * (number + 1);
  if (__atomic_load_n(&entry.number_and_state, __ATOMIC_ACQUIRE) != wanted) return false;
  for (std::size_t i = 0; i < header.size(); ++i)
    header[i] = __atomic_load_n(&entry.header[i], __ATOMIC_ACQUIRE);
  return __atomic_load_n(&entry.number_and_state, __ATOMIC_ACQUIRE) == wanted;
}

void CallBoard::finish_turn(std::uint64_t num_turns, std::uint64_t value) {
  __atomic_store_n(&of(rank_).turn_values[num_turns % 2], value, __ATOMIC_RELAXED);
  __atomic_store_n(&of(rank_).num_turns, num_turns, __ATOMIC_RELEASE);
}

std::uint64_t CallBoard::num_turns(int rank) const {
  return __atomic_load_n(&of(rank).num_turns, __ATOMIC_ACQUIRE);
}

std::uint64_t CallBoard::turn_value(int rank, std::uint64_t turn) const {
  return __atomic_load_n(&of(rank).turn_values[turn % 2], __ATOMIC_RELAXED);
}

}  // namespace ringcomm::cuda
