#pragma once

#include <memory>
#include <optional>
#include <string>

#include "collectives/collective.h"
#include "cuda/bindings/device_carrier.h"
#include "cuda/messages/algorithms.h"
#include "cuda/messages/engine.h"
#include "cuda/messages/peer_watch.h"

namespace ringcomm {

/// Collectives of device tensors over another backend, for ranks that cannot map each other's
/// memory: the ring over its sends and receives, all else over its collectives. The messages have
/// no headers; the hosts compare headers separately (header_check.h).
class MessageDeviceCarrier final : public DeviceCarrier {
 public:
  /// `backend` as for DeviceEngine. Collective over the group.
  MessageDeviceCarrier(c10::intrusive_ptr<c10d::Backend> backend, const DeviceCarrierGroup& group,
                       c10::Device device);

  const std::string& name() const override { return name_; }
  Traffic enqueue(const Collective& call, const CallHeader& header,
                  const DevicePlace& place) override;
  void exchange(const std::vector<DeviceMessage>& messages, const DevicePlace& place) override;
  void plan(const Collective& call, CallHeader& header) const override;
  std::vector<c10::intrusive_ptr<c10d::Work>> take_works() override { return engine_.take_works(); }
  bool may_have_given_up() const noexcept override;
  void abort() noexcept override { engine_.abort(); }

 private:
  void run(const Collective& call, const CallHeader& header);
  void run_planned(Collective call);
  void all_reduce(const Collective& call, const CallHeader& header);
  void reduce_scatter(const Collective& call, const CallHeader& header);
  void all_gather(const Collective& call, const CallHeader& header);
  void reduce(const Collective& call);
  void reduce_update_gather(const Collective& call);
  void reduce_own_chunk(const Collective& call, void* reduced);
  void collect_chunks(Collective call, const void* own, void* buffer);
  void run_alone(const Collective& call);
  template <class Body>
  std::uint64_t in_order(const Body& body);

  Communicator& communicator_;
  CommunicatorOptions options_;
  std::string name_;
  DeviceEngine engine_;
  DeviceUpdate update_;
  std::optional<PeerWatch> watch_;  // not of a group of one; last: it uses the engine
};

/// The same over a new backend, which ringcomm.message_backend chooses and makes. Takes every
/// group; throws as make_device_carrier() does.
std::unique_ptr<DeviceCarrier> make_message_device_carrier(const DeviceCarrierGroup& group,
                                                           c10::Device device);

}  // namespace ringcomm
