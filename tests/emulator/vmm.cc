// Physical memory without addresses: cuMemCreate, cuMemMap and related functions.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>

#include "emulator/address_space.h"
#include "emulator/handles.h"
#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

constexpr std::size_t kGranularityBytes = std::size_t{2} << 20;

std::shared_ptr<PhysicalMemory> find_memory(MemoryHandle handle) {
  return Handles<PhysicalMemory>::all().find(reinterpret_cast<PhysicalMemory*>(handle));
}

MemoryHandle add_memory(std::shared_ptr<PhysicalMemory> memory) {
  return reinterpret_cast<MemoryHandle>(Handles<PhysicalMemory>::all().add(std::move(memory)));
}

/// Calls change(piece) with the reservation of exactly this size at this address.
template <class Change>
Result change_reserved(DevicePtr address, std::size_t num_bytes, Change change) {
  return AddressSpace::of_process().change(address, [&](Piece* piece) {
    const bool is_whole =
        piece != nullptr && piece->origin == Origin::kReserved && piece->num_bytes == num_bytes;
    return is_whole ? change(*piece) : kInvalidValue;
  });
}

bool map_over(DevicePtr address, std::size_t num_bytes, int flags, int fd) {
  return mmap(as_pointer(address), num_bytes, PROT_NONE, flags | MAP_FIXED, fd, 0) != MAP_FAILED;
}

Result require_vmm() {
  RINGCOMM_TRY(require_initialized());
  return settings().has_vmm ? kSuccess : kNotSupported;
}

bool is_granular(std::uint64_t number) { return number % kGranularityBytes == 0; }

Result check_prop(const MemAllocationProp* prop) {
  if (prop == nullptr || prop->type != kAllocationPinned ||
      prop->location.type != kLocationDevice || prop->win32_metadata != nullptr)
    return kInvalidValue;
  if ((prop->requested_handle_types & ~kHandlePosixFd) != 0) return kNotSupported;
  return require_device(prop->location.id);
}

}  // namespace

Result api::mem_get_allocation_granularity(std::size_t* granularity, const MemAllocationProp* prop,
                                           int flags) {
  RINGCOMM_TRY(require_vmm());
  if (granularity == nullptr || (flags != kGranularityMinimum && flags != 1)) return kInvalidValue;
  RINGCOMM_TRY(check_prop(prop));
  *granularity = kGranularityBytes;
  return kSuccess;
}

Result api::mem_create(MemoryHandle* handle, std::size_t num_bytes, const MemAllocationProp* prop,
                       unsigned long long flags) {
  RINGCOMM_TRY(require_vmm());
  if (handle == nullptr || flags != 0 || num_bytes == 0 || !is_granular(num_bytes))
    return kInvalidValue;
  RINGCOMM_TRY(check_prop(prop));
  std::shared_ptr<PhysicalMemory> memory;
  RINGCOMM_TRY(PhysicalMemory::create(prop->location.id, num_bytes, &memory));
  memory->is_exportable = (prop->requested_handle_types & kHandlePosixFd) != 0;
  *handle = add_memory(std::move(memory));
  return kSuccess;
}

Result api::mem_release(MemoryHandle handle) {
  RINGCOMM_TRY(require_vmm());
  auto* const memory = reinterpret_cast<PhysicalMemory*>(handle);
  return Handles<PhysicalMemory>::all().remove(memory) != nullptr ? kSuccess : kInvalidValue;
}

Result api::mem_address_reserve(DevicePtr* address, std::size_t num_bytes, std::size_t alignment,
                                DevicePtr, unsigned long long flags) {
  RINGCOMM_TRY(require_vmm());
  if (address == nullptr || num_bytes == 0 || !is_granular(num_bytes) || flags != 0 ||
      (alignment != 0 && !std::has_single_bit(alignment)))
    return kInvalidValue;
  const std::size_t aligned_to = std::max(alignment, kGranularityBytes);
  void* range = mmap(nullptr, num_bytes + aligned_to, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return kErrorOutOfMemory;
  const DevicePtr found = as_address(range);
  *address = (found + aligned_to - 1) / aligned_to * aligned_to;
  if (*address > found) munmap(range, *address - found);
  munmap(as_pointer(*address + num_bytes), found + aligned_to - *address);
  AddressSpace::of_process().add({*address, num_bytes, Origin::kReserved, nullptr});
  return kSuccess;
}

Result api::mem_address_free(DevicePtr address, std::size_t num_bytes) {
  RINGCOMM_TRY(require_vmm());
  RINGCOMM_TRY(change_reserved(address, num_bytes, [](const Piece& piece) {
    return piece.memory == nullptr ? kSuccess : kInvalidValue;
  }));
  Piece removed;
  AddressSpace::of_process().remove(address, Origin::kReserved, &removed);
  munmap(as_pointer(address), num_bytes);
  return kSuccess;
}

Result api::mem_map(DevicePtr address, std::size_t num_bytes, std::size_t offset,
                    MemoryHandle handle, unsigned long long flags) {
  RINGCOMM_TRY(require_vmm());
  const std::shared_ptr<PhysicalMemory> memory = find_memory(handle);
  if (memory == nullptr || flags != 0 || offset != 0 || num_bytes > memory->num_bytes())
    return kInvalidValue;
  return change_reserved(address, num_bytes, [&](Piece& piece) {
    if (piece.memory != nullptr) return kAlreadyMapped;
    if (!map_over(address, num_bytes, MAP_SHARED, memory->fd())) return kMapFailed;
    piece.memory = memory;
    return kSuccess;
  });
}

Result api::mem_unmap(DevicePtr address, std::size_t num_bytes) {
  RINGCOMM_TRY(require_vmm());
  return change_reserved(address, num_bytes, [&](Piece& piece) {
    if (piece.memory == nullptr) return kInvalidValue;
    if (!map_over(address, num_bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1))
      return kOperatingSystem;
    piece.memory = nullptr;
    piece.is_accessible = false;
    return kSuccess;
  });
}

Result api::mem_set_access(DevicePtr address, std::size_t num_bytes, const MemAccessDesc* access,
                           std::size_t num_access) {
  RINGCOMM_TRY(require_vmm());
  if (access == nullptr || num_access != 1 || access->location.type != kLocationDevice ||
      access->flags != kAccessReadWrite)
    return kInvalidValue;
  RINGCOMM_TRY(require_device(access->location.id));
  return change_reserved(address, num_bytes, [&](Piece& piece) {
    if (piece.memory == nullptr) return kInvalidValue;
    if (!can_map(access->location.id, piece.memory->physical_device())) return kInvalidDevice;
    piece.is_accessible = true;
    return mprotect(as_pointer(address), num_bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess
                                                                                 : kOperatingSystem;
  });
}

Result api::mem_export_to_shareable_handle(void* shareable, MemoryHandle handle, int type,
                                           unsigned long long flags) {
  RINGCOMM_TRY(require_vmm());
  const std::shared_ptr<PhysicalMemory> memory = find_memory(handle);
  if (shareable == nullptr || memory == nullptr || !memory->is_exportable ||
      type != kHandlePosixFd || flags != 0)
    return kInvalidValue;
  const int fd = fcntl(memory->fd(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kOperatingSystem;
  *static_cast<int*>(shareable) = fd;
  return kSuccess;
}

Result api::mem_import_from_shareable_handle(MemoryHandle* handle, void* shareable, int type) {
  RINGCOMM_TRY(require_vmm());
  if (handle == nullptr) return kInvalidValue;
  if (type != kHandlePosixFd) return kNotSupported;
  std::shared_ptr<PhysicalMemory> memory;
  RINGCOMM_TRY(PhysicalMemory::import(static_cast<int>(as_address(shareable)), &memory));
  *handle = add_memory(std::move(memory));
  return kSuccess;
}

}  // namespace ringcomm::emulator
