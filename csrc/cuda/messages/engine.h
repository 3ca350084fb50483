#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "cuda/collectives/device_carrier.h"

namespace ringcomm {

/// Messages and collectives of device tensors by another backend of torch.distributed, in batches:
/// sends and receives that progress together, or one collective.
///
/// Requirements for the backend: operations start after the work of the current stream at the call,
/// in the order of the calls. Work::wait() makes the current stream wait, not the host. Sends and
/// receives between startCoalescing() and endCoalescing() progress together in any order; without
/// coalescing none of them may wait for another. It has alltoall and broadcast of bytes; parts of
/// alltoall may differ in size and have no bytes. Its abort() ends all of them.
///
/// Why this cannot deadlock: all ranks post the batches of a collective in the same order, and the
/// batches of a message's two ends depend on earlier batches only.
class DeviceEngine {
 public:
  /// The slices of data that is sent in pieces. Each costs several launches of kernels.
  static constexpr std::size_t kNumSlots = 2;
  static constexpr std::size_t kSlotBytes = std::size_t{4} << 20;

  /// A batch that has been posted. wait() leaves it empty; so is one of no messages.
  using Batch = std::vector<c10::intrusive_ptr<c10d::Work>>;
  using Outcomes = std::vector<cuda::DeviceCarrier::Outcome>;

  /// What one rank sends or receives in a collective; of no bytes where it has no part.
  struct Part {
    void* data = nullptr;
    std::size_t num_bytes = 0;
  };
  using Parts = std::vector<Part>;  ///< by rank

  /// `backend` is for these messages alone; null in a group of one.
  DeviceEngine(c10::intrusive_ptr<c10d::Backend> backend, int rank, int world_size,
               c10::Device device)
      : backend_(std::move(backend)), rank_(rank), world_size_(world_size), device_(device) {}
  ~DeviceEngine();
  DeviceEngine(const DeviceEngine&) = delete;
  DeviceEngine& operator=(const DeviceEngine&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  c10::Device device() const { return device_; }

  /// Adds to the batch that post() will start. Nothing of no bytes is sent: both ends know the
  /// size. Messages of a pair arrive in their order.
  void send(const void* data, std::size_t num_bytes, int peer, int tag = 0);
  void recv(void* data, std::size_t num_bytes, int peer, int tag = 0);
  /// Throws Error once aborted, as the collectives do.
  Batch post();

  /// A collective of the backend, which all ranks of the group call; a batch of its own.
  Batch all_to_all(const Parts& sent, const Parts& received);
  /// From the root's `data` to that of the other ranks.
  Batch broadcast(void* data, std::size_t num_bytes, int root);

  /// Afterwards the current stream has the data, and the buffers of sends may be reused.
  void wait(Batch& batch);
  void wait(Batch&& batch) { wait(batch); }

  /// Memory of the current stream until finish(). The device's allocator reuses it for later work
  /// of that stream, which has then waited for all batches.
  std::byte* stage(std::size_t num_bytes);
  /// In the order of the current stream.
  void copy(void* to, const void* from, std::size_t num_bytes) const;
  /// Ends a collective whose batches have all been waited for. Returns the bytes that were sent.
  std::uint64_t finish();
  /// Ends a collective that failed in the middle: its messages may still use its memory, which is
  /// kept.
  void abandon();

  /// Of the batches that were waited for since the last call.
  Outcomes take_outcomes() { return std::exchange(outcomes_, {}); }

  /// For ever, from any thread.
  void abort() noexcept;
  /// Messages that were on their way at that time may have ended undone.
  bool is_aborted() const noexcept { return is_aborted_.load(std::memory_order_acquire); }

 private:
  struct Message {
    bool is_send;
    at::Tensor data;
    int peer;
    int tag;
  };

  void check() const;
  at::Tensor bytes(const void* data, std::size_t num_bytes) const;

  c10::intrusive_ptr<c10d::Backend> backend_;
  int rank_;
  int world_size_;
  c10::Device device_;
  std::vector<Message> next_;  // of the next batch
  std::vector<at::Tensor> staging_;
  std::vector<at::Tensor> abandoned_;
  Outcomes outcomes_;
  std::uint64_t sent_bytes_ = 0;  // since the last finish()
  std::atomic<bool> is_aborted_ = false;
};

}  // namespace ringcomm
