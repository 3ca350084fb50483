#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "bindings/devices.h"
#include "collectives/call.h"
#include "communicator/communicator.h"
#include "cuda/collectives/device_transport.h"

namespace ringcomm {

/// Messages and collectives of device tensors by another backend of torch.distributed, in batches:
/// sends and receives that progress together, or one collective. All ranks post the batches of a
/// collective in the same order, and a batch depends on earlier ones only, so this cannot deadlock.
///
/// Requirements for the backend: operations start after the work of the current stream at the call,
/// in the order of the calls. Work::wait() makes the current stream wait, not the host. Sends and
/// receives between startCoalescing() and endCoalescing() progress together; without coalescing
/// none may wait for another. It has alltoall and broadcast of bytes; parts of alltoall may differ
/// in size and have no bytes. Its abort() ends all of them.
class DeviceMessageContext {
 public:
  /// The slices of data that is sent in pieces. Each costs several launches of kernels.
  static constexpr std::size_t kNumSlots = 2;
  static constexpr std::size_t kSlotBytes = std::size_t{4} << 20;

  /// A batch that has been posted; empty after wait(), or without messages.
  using Batch = std::vector<c10::intrusive_ptr<c10d::Work>>;
  using Outcomes = std::vector<cuda::DeviceTransport::Outcome>;

  /// What one rank sends or receives in a collective.
  struct Part {
    void* data = nullptr;
    std::size_t num_bytes = 0;
  };
  using Parts = std::vector<Part>;  ///< by rank

  /// `backend` is for these messages alone; null in a group of one.
  DeviceMessageContext(c10::intrusive_ptr<c10d::Backend> backend, int rank, int world_size,
                       c10::Device device)
      : backend_(std::move(backend)), rank_(rank), world_size_(world_size), device_(device) {}
  ~DeviceMessageContext();
  DeviceMessageContext(const DeviceMessageContext&) = delete;
  DeviceMessageContext& operator=(const DeviceMessageContext&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  c10::Device device() const { return device_; }

  /// Adds to the batch that post() will start; nothing if there are no bytes, which both ends know.
  /// Messages of a pair arrive in their order.
  void send(const void* data, std::size_t num_bytes, int peer, int tag = 0);
  void recv(void* data, std::size_t num_bytes, int peer, int tag = 0);
  /// Throws Error once aborted, as the collectives do.
  Batch post();

  /// Collectives of the backend, batches of their own.
  Batch all_to_all(const Parts& sent, const Parts& received);
  Batch broadcast(void* data, std::size_t num_bytes, int root);

  /// Afterwards the current stream has the data, and the buffers of sends may be reused.
  void wait(Batch& batch);
  void wait(Batch&& batch) { wait(batch); }

  /// Memory of the current stream until finish().
  std::byte* stage(std::size_t num_bytes);
  void copy(void* to, const void* from, std::size_t num_bytes) const;
  /// Ends a collective whose batches have all been waited for. Returns the bytes that were sent.
  std::uint64_t finish();
  /// Ends a collective that failed in the middle, and keeps its memory, which may still be in use.
  void abandon();

  /// Of the batches that were waited for since the last call.
  Outcomes take_outcomes() { return std::exchange(outcomes_, {}); }

  /// For ever, from any thread: messages that were on their way may have ended undone.
  void abort() noexcept;
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

/// Sets the call's algorithm from values that are equal on all ranks.
void plan_device_collective(int world_size, const CommunicatorOptions& options, Collective& call);

/// Runs any planned collective in the order of the current stream, which has waited for its batches
/// then. The ring is this library's own; all else moves bytes by the backend's collectives and
/// reduces here, so that all types have the CPU's sums, in the order of the ranks.
void run_device_collective(DeviceMessageContext& context, const Collective& call,
                           const CommunicatorOptions& options);

/// Collectives of device tensors over another backend, which ringcomm.message_backend chooses, for
/// ranks that cannot map each other's memory. Takes every group. Collective over it; takes the GIL.
/// Throws Error, and ValueError if no backend supports the device.
std::unique_ptr<cuda::DeviceTransport> make_message_device_transport(
    const c10::intrusive_ptr<c10d::Store>& store, Communicator& communicator,
    const GroupOptions& options, c10::Device device);

/// Starts to compare a call's header, and the sizes of the shards of each pair, between the hosts:
/// the data has no headers. A difference, or a rank that does not make the call in time, ends the
/// group. `done` is called from another thread, with whether that has happened.
void check_header(Communicator& communicator, const Collective& call,
                  std::chrono::milliseconds timeout, std::function<void(bool)> done);

}  // namespace ringcomm
