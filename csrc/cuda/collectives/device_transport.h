#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/call.h"
#include "cuda/collectives/events.h"
#include "cuda/collectives/launch_plan.h"
#include "transport/transport.h"

namespace ringcomm::cuda {

/// In the description of a group whose streams share hardware queues: under MPS a process has 2
/// unless the variable says another number, and a kernel that waits for a peer blocks its queue.
inline constexpr const char* kFewQueues = "2 hardware queues (set CUDA_DEVICE_MAX_CONNECTIONS=8)";

/// Runs the collectives of a group's tensors on one device, in the order of streams; the host does
/// not wait. One thread at a time, except plan() and what says so.
class DeviceTransport {
 public:
  /// The error of work that was enqueued; null while it has none.
  using Outcome = std::function<std::exception_ptr()>;

  virtual ~DeviceTransport() = default;

  /// "cuda_ipc ...", "messages over nccl"
  virtual const std::string& description() const = 0;
  /// Sets the call's algorithm from values that are equal on all ranks; a call that a graph
  /// captures may have another one.
  virtual void plan(Collective& call, bool is_captured) const = 0;

  /// Throw std::invalid_argument for what cannot be enqueued; the group goes on then.
  virtual void check_messages(const std::vector<P2pMessage>&) const {}
  /// The limit of the waits of later calls, but not of those that a graph has captured.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;

  /// Enqueues one planned collective, with the device's context and the stream current; all
  /// ranks enqueue in the same order.
  virtual Traffic enqueue(const Collective& call, const StreamContext& stream) = 0;
  /// Sends and receives that must not wait for each other: two ranks may both send first.
  virtual void exchange(std::vector<P2pMessage> messages, const StreamContext& stream) = 0;
  /// The event after the last of these two calls, if the transport has recorded one.
  virtual std::shared_ptr<const Event> last_end() const { return nullptr; }
  /// Of what was enqueued since the last call of this function and can fail by itself.
  virtual std::vector<Outcome> take_outcomes() { return {}; }

  /// Whether its data has headers, so that kernels detect different calls.
  virtual bool finds_mismatches() const { return false; }

  /// How many ranks share a device at most; 0 where ranks do not access each other's memory.
  virtual int ranks_per_device() const { return 0; }

  /// Collective: maps a buffer of each rank, so that peers access it where it is. False where some
  /// of it cannot be mapped; null is a buffer that could not be allocated.
  virtual bool map(const void* data, std::size_t num_bytes) = 0;

  /// Why calls copy some buffers that peers would use where they are; null: none yet.
  virtual const char* why_staged() const { return nullptr; }

  /// Whether work may end without being complete, because a rank has failed. Work that ended while
  /// this was false is complete. From any thread.
  virtual bool may_be_aborted() const noexcept = 0;
  /// Ends enqueued work for ever. From any thread.
  virtual void abort() noexcept = 0;
};

}  // namespace ringcomm::cuda
