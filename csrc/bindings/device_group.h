#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "bindings/device_carrier.h"
#include "bindings/device_work.h"
#include "bindings/group_options.h"
#include "bindings/tensor_call.h"
#include "collectives/communicator.h"

namespace ringcomm {

/// What of a call is not its data.
struct DeviceCallInfo {
  c10d::OpType op_type;
  const char* title;
  std::vector<at::Tensor> results;
  bool is_async = true;
  std::optional<std::chrono::milliseconds> barrier_timeout = {};  ///< of what the host waits for
  int peer = -1;                                                  ///< of a message alone
};

/// A user's send or receive, and what it needs: `finish` of `item` is for afterwards.
struct DeviceMessageCall {
  c10::Device device;
  DeviceMessage message;
  TensorCall item;
};

/// A group's calls on device tensors: gives them their order, their streams and a carrier, and
/// keeps alive what they use. May be used from any thread.
class DeviceGroup : public std::enable_shared_from_this<DeviceGroup> {
 public:
  DeviceGroup(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<GroupOptions> options,
              std::weak_ptr<Communicator> communicator, int rank, int world_size);
  ~DeviceGroup();

  /// Enqueues collectives. Synchronous ones go to the caller's current stream; others to the
  /// group's own, behind what the current one holds. Throws what the engine throws.
  c10::intrusive_ptr<c10d::Work> start(c10::Device device, std::vector<TensorCall> calls,
                                       DeviceCallInfo info);
  /// Enqueues messages of which none waits for another.
  c10::intrusive_ptr<c10d::Work> exchange(c10::Device device, std::vector<DeviceMessageCall> calls,
                                          DeviceCallInfo info);
  /// Makes the carrier for a device, where there is none yet: collective over the group.
  DeviceCarrier& carrier(c10::Device device);
  /// DeviceCarrier::row_clusters().
  int row_clusters(c10::Device device, unsigned cluster_blocks, int max_active);
  /// Memory that other ranks use where it lies: collective over the group.
  DeviceCarrier::LentMemory lend(c10::Device device, std::size_t num_bytes);
  /// By device, what carries its tensors; for people.
  std::map<std::string, std::string> transports();

  /// Where the group has failed, ends what is enqueued; check() then throws what the cause was.
  void abort_if_failed();
  void check();
  /// Ends the group.
  void end(const std::string& why);
  void abort() noexcept;
  /// A call of this group has ended on a device without having done all: throws why, which other
  /// threads and ranks may be about to tell, or else ends the group for `detail`.
  [[noreturn]] void throw_given_up(const char* title, const std::string& detail);
  /// Whether another rank has given up, by a look where it says so: in the store, between hosts.
  bool has_another_given_up();
  bool is_stuck();
  /// Waits until devices are through with all calls; where the group has failed, ends them.
  void drain();

 private:
  /// Whether the last that it has enqueued was the carrier's.
  using Body = std::function<bool(DeviceCarrier&, const DevicePlace&)>;

  c10::intrusive_ptr<c10d::Work> enqueue(c10::Device device, DeviceCallInfo info,
                                         const std::vector<at::Tensor>& inputs,
                                         std::vector<at::Tensor> kept, const Body& body);
  void run(const TensorCall& item, DeviceCarrier& carrier, const DevicePlace& place);
  std::shared_ptr<Communicator> communicator() const;
  c10::Stream own_stream(c10::Device device, int peer);
  void keep(const std::shared_ptr<DeviceUse>& use);
  void lose(const std::vector<at::Tensor>& kept);
  template <class Enqueue>
  void ending_on_failure(const std::function<std::string()>& what, const Enqueue& enqueue);

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<GroupOptions> options_;
  std::weak_ptr<Communicator> communicator_;
  int rank_;
  int world_size_;

  std::mutex order_;  // held while a call is enqueued; guards what follows
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> streams_;

  std::mutex mutex_;                             // held for moments; guards what follows
  std::deque<std::shared_ptr<DeviceUse>> uses_;  // that nobody may have waited for
  std::vector<at::Tensor> lost_;  // of calls that failed half-way: they may still be in use
  std::vector<std::pair<c10::Device, std::unique_ptr<DeviceCarrier>>> carriers_;  // none ever goes
  bool is_aborted_ = false;
};

}  // namespace ringcomm
