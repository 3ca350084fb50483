#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "emulator/physical_memory.h"

namespace ringcomm::emulator {

/// How a piece of the address space came about, which says how it goes.
enum class Origin { kMapped, kAllocated, kIpc, kHost };

/// A piece of the address space that the driver knows.
struct Piece {
  DevicePtr base = 0;
  std::size_t num_bytes = 0;
  Origin origin = Origin::kAllocated;
  std::shared_ptr<PhysicalMemory> memory;    // none for the host's
  std::map<DeviceOrdinal, int> access = {};  // kMapped: who may do what
  int num_opened = 1;                        // kIpc

  bool contains(DevicePtr address) const { return address >= base && address - base < num_bytes; }
};

/// What lies where in this process. Each function locks; pieces are returned as copies.
class AddressSpace {
 public:
  static AddressSpace& of_process();

  void add(Piece piece);
  /// Removes the piece that begins at `base` and is of `origin`; false where there is none.
  bool remove(DevicePtr base, Origin origin, Piece* removed);
  bool find(DevicePtr address, Piece* found);
  /// Whether every byte is of a piece that may be read and, if `writes`, written.
  bool may_access(DevicePtr address, std::size_t num_bytes, bool writes);
  /// Calls `change(pieces)` with those that touch the range, under the lock, and returns its
  /// Result.
  template <class Change>
  Result change(DevicePtr address, std::size_t num_bytes, Change change) {
    const std::lock_guard lock(mutex_);
    std::vector<Piece*> touched;
    for (auto& [base, piece] : pieces_)
      if (base < address + num_bytes && address < base + piece.num_bytes) touched.push_back(&piece);
    return change(touched);
  }
  void erase_mapped(DevicePtr address, std::size_t num_bytes);

 private:
  const Piece* at(DevicePtr address) const;

  std::mutex mutex_;
  std::map<DevicePtr, Piece> pieces_;
};

/// Maps all of `memory`, writable, behind it a page that faults; null if the system refuses.
void* map_whole(const PhysicalMemory& memory);
void unmap_whole(DevicePtr address, std::size_t num_bytes);

inline void* as_pointer(DevicePtr address) { return reinterpret_cast<void*>(address); }
inline DevicePtr as_address(const void* pointer) { return reinterpret_cast<DevicePtr>(pointer); }

}  // namespace ringcomm::emulator
