#include "transport/shm/peer_memory.h"

#include "core/errors.h"
#include "transport/shm/bootstrap.h"

namespace ringcomm::shm {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<PeerMemory>> memories;  // by the bootstrap's address
};
constinit PerProcess<Registry> registries;

// A location comes from the peer, so it is checked.
void check_inside(const ArenaLocation& location, std::size_t num_bytes, std::size_t region_bytes) {
  if (location.offset_bytes > region_bytes || num_bytes > region_bytes - location.offset_bytes)
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: a peer's buffer is not inside the memory that it shares");
}

}  // namespace

std::shared_ptr<PeerMemory> PeerMemory::of(const std::string& bootstrap_address) {
  Registry& registry = registries.get();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.memories, [](const auto& item) { return item.second.expired(); });
  std::weak_ptr<PeerMemory>& known = registry.memories[bootstrap_address];
  std::shared_ptr<PeerMemory> memory = known.lock();
  if (memory == nullptr) known = memory = std::make_shared<PeerMemory>(bootstrap_address);
  return memory;
}

std::byte* PeerMemory::find(const ArenaLocation& location, std::size_t num_bytes,
                            std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  auto region = regions_.find(location.region_id);
  if (region == regions_.end()) {
    const UniqueFd fd = Bootstrap::instance().fetch(
        bootstrap_address_, SharedArena::key_of(location.region_id), patience);
    if (!fd) return nullptr;
    check_sealed(fd.get());
    const std::size_t num_bytes_there = size_of_memfd(fd.get());
    check_inside(location, num_bytes, num_bytes_there);
    region = regions_.emplace(location.region_id, SharedMemory(fd.get(), num_bytes_there)).first;
  }
  check_inside(location, num_bytes, region->second.num_bytes());
  return region->second.data() + location.offset_bytes;
}

}  // namespace ringcomm::shm
