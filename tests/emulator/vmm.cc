// Physical memory apart from addresses: cuMemCreate, cuMemMap and what belongs to them.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

#include "emulator/address_space.h"
#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

constexpr std::size_t kGranularityBytes = std::size_t{2} << 20;

struct Vmm {
  std::mutex mutex;
  MemoryHandle last_handle = 0;
  std::map<MemoryHandle, std::shared_ptr<PhysicalMemory>> handles;
  std::map<DevicePtr, std::size_t> reserved;

  MemoryHandle add(std::shared_ptr<PhysicalMemory> memory) {
    const std::lock_guard lock(mutex);
    handles.emplace(++last_handle, std::move(memory));
    return last_handle;
  }
  std::shared_ptr<PhysicalMemory> find(MemoryHandle handle) {
    const std::lock_guard lock(mutex);
    const auto found = handles.find(handle);
    return found != handles.end() ? found->second : nullptr;
  }
  bool is_reserved(DevicePtr address, std::size_t num_bytes) {
    const std::lock_guard lock(mutex);
    const auto found = reserved.find(address);
    return found != reserved.end() && found->second == num_bytes;
  }
};

Vmm& vmm() {
  static Vmm& all = *new Vmm();
  return all;
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
  *handle = vmm().add(std::move(memory));
  return kSuccess;
}

Result api::mem_release(MemoryHandle handle) {
  RINGCOMM_TRY(require_vmm());
  const std::lock_guard lock(vmm().mutex);
  return vmm().handles.erase(handle) == 1 ? kSuccess : kInvalidValue;
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
  const std::lock_guard lock(vmm().mutex);
  vmm().reserved.emplace(*address, num_bytes);
  return kSuccess;
}

Result api::mem_address_free(DevicePtr address, std::size_t num_bytes) {
  RINGCOMM_TRY(require_vmm());
  const std::lock_guard lock(vmm().mutex);
  const auto found = vmm().reserved.find(address);
  if (found == vmm().reserved.end() || found->second != num_bytes) return kInvalidValue;
  RINGCOMM_TRY(AddressSpace::of_process().change(
      address, [](const Piece* piece) { return piece == nullptr ? kSuccess : kInvalidValue; }));
  munmap(as_pointer(address), num_bytes);
  vmm().reserved.erase(found);
  return kSuccess;
}

Result api::mem_map(DevicePtr address, std::size_t num_bytes, std::size_t offset,
                    MemoryHandle handle, unsigned long long flags) {
  RINGCOMM_TRY(require_vmm());
  const std::shared_ptr<PhysicalMemory> memory = vmm().find(handle);
  if (memory == nullptr || flags != 0 || offset != 0 || num_bytes > memory->num_bytes() ||
      !vmm().is_reserved(address, num_bytes))
    return kInvalidValue;
  AddressSpace& space = AddressSpace::of_process();
  RINGCOMM_TRY(space.change(address, [&](const Piece* piece) {
    if (piece != nullptr) return kAlreadyMapped;
    const void* mapped =
        mmap(as_pointer(address), num_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd(), 0);
    return mapped != MAP_FAILED ? kSuccess : kMapFailed;
  }));
  space.add({address, num_bytes, Origin::kMapped, memory});
  return kSuccess;
}

Result api::mem_unmap(DevicePtr address, std::size_t num_bytes) {
  RINGCOMM_TRY(require_vmm());
  AddressSpace& space = AddressSpace::of_process();
  RINGCOMM_TRY(space.change(address, [&](const Piece* piece) {
    if (piece == nullptr || piece->origin != Origin::kMapped || piece->num_bytes != num_bytes)
      return kInvalidValue;
    const void* mapped = mmap(as_pointer(address), num_bytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return mapped != MAP_FAILED ? kSuccess : kOperatingSystem;
  }));
  Piece removed;
  space.remove(address, Origin::kMapped, &removed);
  return kSuccess;
}

Result api::mem_set_access(DevicePtr address, std::size_t num_bytes, const MemAccessDesc* access,
                           std::size_t num_access) {
  RINGCOMM_TRY(require_vmm());
  if (access == nullptr || num_access != 1 || access->location.type != kLocationDevice ||
      access->flags != kAccessReadWrite)
    return kInvalidValue;
  RINGCOMM_TRY(require_device(access->location.id));
  return AddressSpace::of_process().change(address, [&](Piece* piece) {
    if (piece == nullptr || piece->origin != Origin::kMapped || piece->num_bytes != num_bytes)
      return kInvalidValue;
    if (!can_map(access->location.id, piece->memory->physical_device())) return kInvalidDevice;
    piece->is_accessible = true;
    return mprotect(as_pointer(address), num_bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess
                                                                                 : kOperatingSystem;
  });
}

Result api::mem_export_to_shareable_handle(void* shareable, MemoryHandle handle, int type,
                                           unsigned long long flags) {
  RINGCOMM_TRY(require_vmm());
  const std::shared_ptr<PhysicalMemory> memory = vmm().find(handle);
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
  *handle = vmm().add(std::move(memory));
  return kSuccess;
}

}  // namespace ringcomm::emulator
