#pragma once

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

}  // namespace ringcomm
