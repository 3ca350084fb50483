#include "cuda/driver/peer_mappings.h"

namespace ringcomm::cuda {

PeerMappings& PeerMappings::of(DeviceOrdinal device) {
  return per_device<PeerMappings>(
      device, [&] { return std::unique_ptr<PeerMappings>(new PeerMappings(device)); });
}

std::shared_ptr<PeerMappings::Mapping> PeerMappings::map(const PeerAllocation& source,
                                                         bool may_unmap) {
  const std::lock_guard lock(mutex_);
  std::weak_ptr<Mapping>& entry = all_[{source.process, source.id}];
  if (auto found = entry.lock(); found != nullptr && found->memory_.has_value()) return found;
  if (!make_way(source, may_unmap)) return nullptr;
  auto made = std::make_shared<Mapping>();
  made->source_ = source;
  made->memory_.emplace(device_, source.handle);
  made->data_ = made->memory_->data();
  entry = made;
  return made;
}

// Forgets what is unmapped. False if something is in the way and stays.
bool PeerMappings::make_way(const PeerAllocation& source, bool may_unmap) {
  bool is_free = true;
  std::erase_if(all_, [&](const auto& entry) {
    const auto other = entry.second.lock();
    const bool is_wanted = entry.first == std::pair(source.process, source.id);
    if (other == nullptr || !other->memory_.has_value()) return !is_wanted;
    const PeerAllocation& known = other->source_;
    if (known.process != source.process || known.base >= source.base + source.num_bytes ||
        source.base >= known.base + known.num_bytes)
      return false;
    if (may_unmap) other->memory_.reset();
    is_free = is_free && may_unmap;
    return may_unmap;
  });
  return is_free;
}

void PeerMappings::unmap(Mapping& mapping) {
  const std::lock_guard lock(mutex_);
  mapping.memory_.reset();
}

}  // namespace ringcomm::cuda
