#include "cuda/driver/peer_mappings.h"

namespace ringcomm::cuda {

PeerMappings& PeerMappings::of(DeviceOrdinal device) {
  return per_device<PeerMappings>(
      device, [&] { return std::unique_ptr<PeerMappings>(new PeerMappings(device)); });
}

std::shared_ptr<PeerMappings::Mapping> PeerMappings::map(const PeerAllocation& source) {
  const std::lock_guard lock(mutex_);
  std::erase_if(all_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Mapping>& entry = all_[{source.process, source.id}];
  if (auto found = entry.lock(); found != nullptr && found->memory_.has_value()) return found;
  auto made = std::make_shared<Mapping>();
  made->memory_.emplace(device_, source.handle);
  made->data_ = made->memory_->data();
  entry = made;
  return made;
}

void PeerMappings::unmap(Mapping& mapping) {
  const std::lock_guard lock(mutex_);
  mapping.memory_.reset();
}

}  // namespace ringcomm::cuda
