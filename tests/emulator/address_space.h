#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "emulator/physical_memory.h"

namespace ringcomm::emulator {

/// How a piece of the address space was created, which determines how it is removed.
enum class Origin { kReserved, kAllocated, kIpc, kHost };

/// A piece of the address space that the driver knows.
struct Piece {
  DevicePtr base = 0;
  std::size_t num_bytes = 0;
  Origin origin = Origin::kAllocated;
  std::shared_ptr<PhysicalMemory> memory;  // none for the host's, nor for what is only reserved
  bool is_accessible = false;              // kReserved: a device has access
  int num_opened = 1;                      // kIpc

  bool contains(DevicePtr address) const { return address >= base && address - base < num_bytes; }
  /// Whether all of it is in here and may be read and written; `address` is.
  bool may_access(DevicePtr address, std::size_t length) const {
    return length <= base + num_bytes - address && (origin != Origin::kReserved || is_accessible);
  }
};

/// The address space of this process. Each function locks; pieces are returned as copies.
class AddressSpace {
 public:
  static AddressSpace& of_process();

  void add(Piece piece);
  /// Removes the piece that begins at `base` and has `origin`; false if there is none.
  bool remove(DevicePtr base, Origin origin, Piece* removed);
  bool find(DevicePtr address, Piece* found);
  /// Calls `change(piece)` with the one that begins at `base`, or null, under the lock, and returns
  /// its Result.
  template <class Change>
  Result change(DevicePtr base, Change change) {
    const std::lock_guard lock(mutex_);
    const auto found = pieces_.find(base);
    return change(found != pieces_.end() ? &found->second : nullptr);
  }
  /// Where memory that another process has made was opened; counts once more. 0: nowhere.
  DevicePtr reopen(ino_t inode);

 private:
  std::mutex mutex_;
  std::map<DevicePtr, Piece> pieces_;
};

/// Maps all of `memory` writable, followed by a page that faults; null if the system refuses.
void* map_whole(const PhysicalMemory& memory);
void unmap_whole(DevicePtr address, std::size_t num_bytes);

inline void* as_pointer(DevicePtr address) { return reinterpret_cast<void*>(address); }
inline DevicePtr as_address(const void* pointer) { return reinterpret_cast<DevicePtr>(pointer); }

}  // namespace ringcomm::emulator
