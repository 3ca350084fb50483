#include "emulator/address_space.h"

#include <sys/mman.h>

#include <utility>

namespace ringcomm::emulator {
namespace {

constexpr std::size_t kPageBytes = 4096;

std::size_t whole_pages(std::size_t num_bytes) {
  return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace

AddressSpace& AddressSpace::of_process() {
  static AddressSpace& space = *new AddressSpace();
  return space;
}

void AddressSpace::add(Piece piece) {
  const std::lock_guard lock(mutex_);
  pieces_[piece.base] = std::move(piece);
}

bool AddressSpace::remove(DevicePtr base, Origin origin, Piece* removed) {
  const std::lock_guard lock(mutex_);
  const auto found = pieces_.find(base);
  if (found == pieces_.end() || found->second.origin != origin) return false;
  *removed = std::move(found->second);
  pieces_.erase(found);
  return true;
}

bool AddressSpace::find(DevicePtr address, Piece* found) {
  const std::lock_guard lock(mutex_);
  auto after = pieces_.upper_bound(address);
  if (after == pieces_.begin() || !(--after)->second.contains(address)) return false;
  *found = after->second;
  return true;
}

DevicePtr AddressSpace::reopen(ino_t inode) {
  const std::lock_guard lock(mutex_);
  for (auto& [base, piece] : pieces_)
    if (piece.origin == Origin::kIpc && piece.memory->inode() == inode) {
      ++piece.num_opened;
      return base;
    }
  return 0;
}

void* map_whole(const PhysicalMemory& memory) {
  const std::size_t num_bytes = whole_pages(memory.num_bytes());
  void* range = mmap(nullptr, num_bytes + kPageBytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return nullptr;
  void* mapped =
      mmap(range, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.fd(), 0);
  if (mapped != MAP_FAILED) return mapped;
  munmap(range, num_bytes + kPageBytes);
  return nullptr;
}

void unmap_whole(DevicePtr address, std::size_t num_bytes) {
  munmap(as_pointer(address), whole_pages(num_bytes) + kPageBytes);
}

}  // namespace ringcomm::emulator
