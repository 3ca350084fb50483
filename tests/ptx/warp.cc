// What the lanes of a warp do together.
#include <bit>

#include "ptx/machine.h"

namespace ringcomm::ptx {

/// Lets the lanes go on that wait for the same lanes as this one, if all of them are there.
void Block::release_warp(Thread& thread) {
  const u32 warp = thread.linear - thread.lane();
  const u32 mask = thread.warp_mask_;
  std::array<u32, 32> values = {};
  for (u32 lane = 0; lane < 32 && warp + lane < num_threads_; ++lane) {
    const Thread& other = threads_[warp + lane];
    if ((mask >> lane & 1) == 0 || other.state_ == Thread::State::kDone) continue;
    if (other.state_ != Thread::State::kAtWarp || other.warp_mask_ != mask) return;
    values[lane] = other.warp_value_;
  }
  for (u32 lane = 0; lane < 32 && warp + lane < num_threads_; ++lane) {
    Thread& other = threads_[warp + lane];
    if ((mask >> lane & 1) == 0 || other.state_ == Thread::State::kDone) continue;
    other.lanes_ = values;
    other.state_ = Thread::State::kReady;
  }
}

void Thread::meet_warp(u32 mask, u32 value) {
  if ((mask >> lane() & 1) == 0) fail(*this, line, "a lane is not in its own mask %#x", mask);
  warp_mask_ = mask;
  warp_value_ = value;
  state_ = State::kAtWarp;
  block->release_warp(*this);
  if (state_ == State::kAtWarp) block->leave(*this);
}

// Shuffles and votes order no memory.
void Thread::warp_sync(u32 mask) {
  meet_warp(mask, 0);
  memory().pass(*this, Barrier::kWarp, static_cast<u32>(std::popcount(mask)), Order::kAcqRel);
}

u32 Thread::shfl(Shuffle kind, u32 value, u32 operand, u32 control, u32 mask, bool& is_in_range) {
  meet_warp(mask, value);
  const u32 segment = control >> 8 & 31;
  const u32 first = lane() & segment;
  const u32 limit = first | (control & 31 & ~segment);
  u32 from = 0;
  switch (kind) {
    case Shuffle::kUp:
      from = lane() - operand;
      is_in_range = static_cast<s32>(from) >= static_cast<s32>(limit);
      break;
    case Shuffle::kDown:
      from = lane() + operand;
      is_in_range = from <= limit;
      break;
    case Shuffle::kBfly:
      from = lane() ^ operand;
      is_in_range = from <= limit;
      break;
    case Shuffle::kIdx:
      from = first | (operand & 31 & ~segment);
      is_in_range = from <= limit;
      break;
  }
  if (!is_in_range) return value;
  if ((mask >> (from & 31) & 1) == 0)
    fail(*this, line, "shfl reads lane %u, not in its mask", from);
  return lanes_[from & 31];
}

u32 Thread::ballot(bool value, u32 mask) {
  meet_warp(mask, value ? 1 : 0);
  u32 result = 0;
  for (u32 lane = 0; lane < 32; ++lane) result |= (mask >> lane & lanes_[lane] & 1) << lane;
  return result;
}

u32 Thread::matrix_element(u32 matrix, bool is_transposed, u32 element) const {
  const u32 major = lane() / 4, minor = 2 * (lane() % 4) + element;
  const u32 row = is_transposed ? minor : major;
  const u32 column = is_transposed ? major : minor;
  return lanes_[8 * matrix + row] + 2 * column;
}

void Thread::ldmatrix(u32 address, bool is_transposed, u32 num_matrices, u32* to) {
  meet_warp(~0u, address);
  for (u32 matrix = 0; matrix < num_matrices; ++matrix) {
    to[matrix] = 0;
    for (u32 element = 0; element < 2; ++element) {
      u16 value = 0;
      load_shared(matrix_element(matrix, is_transposed, element), &value, 1);
      to[matrix] |= u32{value} << (16 * element);
    }
  }
}

void Thread::stmatrix(u32 address, bool is_transposed, u32 num_matrices, const u32* from) {
  meet_warp(~0u, address);
  for (u32 matrix = 0; matrix < num_matrices; ++matrix)
    for (u32 element = 0; element < 2; ++element) {
      const u16 value = static_cast<u16>(from[matrix] >> (16 * element));
      store_shared(matrix_element(matrix, is_transposed, element), &value, 1);
    }
}

}  // namespace ringcomm::ptx
