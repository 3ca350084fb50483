#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "collectives/call.h"
#include "cuda/collectives/device_transport.h"

namespace ringcomm {

/// Calls on device tensors by another backend of torch.distributed: by its collectives, and by a
/// ring over its sends and receives where the user has named that.
///
/// Requirements for the backend: operations start after the work of the current stream at the call,
/// in the order of the calls. Work::wait() makes the current stream wait, not the host. Sends and
/// receives between startCoalescing() and endCoalescing() progress together; without coalescing
/// none may wait for another. Shards of alltoall, allgather and reduce_scatter may differ in size
/// and be empty. Its abort() ends all of them.
///
/// All functions run in the order of the current stream, which has waited for their work then.
class BackendCalls {
 public:
  using Outcomes = std::vector<cuda::DeviceTransport::Outcome>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  /// `backend` is for this group alone; null in a group of one.
  BackendCalls(c10::intrusive_ptr<c10d::Backend> backend, int rank, int world_size,
               c10::Device device)
      : backend_(std::move(backend)), rank_(rank), world_size_(world_size), device_(device) {}
  ~BackendCalls();
  BackendCalls(const BackendCalls&) = delete;
  BackendCalls& operator=(const BackendCalls&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  c10::Device device() const { return device_; }

  /// Uses what NCCL connects at its first use, when it blocks the host.
  void connect();
  /// Sets the call's algorithm from values that are equal on all ranks. Throws
  /// std::invalid_argument for what NCCL cannot reduce, and NotImplementedError for an update
  /// without a kernel.
  void plan(const CommunicatorOptions& options, Collective& call) const;
  /// Runs a planned collective. Returns the bytes that were sent, as a ring would. After an
  /// exception it may be incomplete, and its memory is kept: the group ends. Throws Error once
  /// aborted.
  std::uint64_t run(const Collective& call);
  void exchange(const std::vector<cuda::P2pMessage>& messages);

  /// Of the works that were waited for since the last call.
  Outcomes take_outcomes() { return std::exchange(outcomes_, {}); }

  /// For ever, from any thread: calls that were on their way may have ended undone.
  void abort() noexcept;
  bool is_aborted() const noexcept { return is_aborted_.load(std::memory_order_acquire); }

  // ---- for the ring

  /// Adds to the batch that post() starts; nothing if there are no bytes, which both ends know.
  void send(const void* data, std::size_t num_bytes, int peer, int tag = 0);
  void recv(void* data, std::size_t num_bytes, int peer, int tag = 0);
  std::vector<Work> post();
  void wait(const Work& work);
  void wait(std::vector<Work>&& works);
  /// Memory of the current stream until the end of the call.
  std::byte* stage(std::size_t num_bytes);
  at::Tensor array(const void* data, std::size_t num_elems, at::ScalarType type) const;

 private:
  struct Message {
    bool is_send;
    at::Tensor data;
    int peer;
    int tag;
  };

  c10d::Backend& backend() const;  // throws Error once aborted
  at::Tensor bytes(const void* data, std::size_t num_bytes) const {
    return array(data, num_bytes, at::kByte);
  }
  at::Tensor joined(const std::vector<at::Tensor>& shards) const;
  void copy(void* to, const void* from, std::size_t num_bytes) const;

  void run_alone(const Collective& call) const;
  void collective(const Collective& call);
  void reduce_scatter(const Collective& call);
  void all_gather(const Collective& call);
  void all_to_all(const Collective& call);
  void exchange_with_root(const Collective& call);
  void reduce_update_gather(const Collective& call);
  void update(const Collective& call, const void* grad, void* param, std::size_t num_elems) const;

  c10::intrusive_ptr<c10d::Backend> backend_;
  int rank_;
  int world_size_;
  c10::Device device_;
  std::vector<Message> next_;  // of the next batch
  std::vector<at::Tensor> staging_;
  Outcomes outcomes_;
  std::uint64_t sent_bytes_ = 0;  // of this call
  std::atomic<bool> is_aborted_ = false;
};

}  // namespace ringcomm
