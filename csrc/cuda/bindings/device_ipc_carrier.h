#pragma once

#include <memory>
#include <string>

#include "cuda/bindings/device_carrier.h"
#include "cuda/collectives/engine.h"

namespace ringcomm {

/// Collectives of device tensors by kernels in memory that all ranks have mapped.
class IpcDeviceCarrier final : public DeviceCarrier {
 public:
  explicit IpcDeviceCarrier(std::unique_ptr<cuda::Engine> engine) : engine_(std::move(engine)) {}

  const std::string& name() const override { return engine_->description(); }
  Traffic enqueue(const Collective& call, const CallHeader& header,
                  const DevicePlace& place) override;
  void exchange(const std::vector<DeviceMessage>& messages, const DevicePlace& place) override;
  std::shared_ptr<const cuda::Event> last_end() const override { return engine_->last_end(); }
  void plan(const Collective& call, CallHeader& header) const override {
    engine_->plan(call, header);
  }
  void check_collective(const DevicePlace& place) const override;
  void check_messages(const std::vector<DeviceMessage>& messages) override;
  bool has_room_for_messages(int peer) override { return engine_->has_room_for_messages(peer); }
  bool finds_mismatches() const override { return true; }
  SharedDeviceMemory lend(std::size_t num_bytes) override;
  bool can_lend() const override { return engine_->can_lend(); }
  SharedDeviceMemory borrow(std::size_t num_bytes, const DevicePlace& place) override;
  bool may_have_given_up() const noexcept override { return engine_->may_have_given_up(); }
  void abort() noexcept override { engine_->abort(); }

 private:
  std::unique_ptr<cuda::Engine> engine_;
};

/// Null on all ranks, with the reason, if the ranks cannot map each other's memory. Throws like
/// make_device_carrier().
std::unique_ptr<DeviceCarrier> make_ipc_device_carrier(const DeviceCarrierGroup& group,
                                                       c10::Device device, std::string& reason);

}  // namespace ringcomm
