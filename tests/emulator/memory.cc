// Memory that is allocated with its address: cuMemAlloc, cuMemHostAlloc, and IPC handles of the
// former.
#include <sys/mman.h>

#include <cstdio>
#include <utility>

#include "emulator/address_space.h"
#include "emulator/capture.h"
#include "emulator/settings.h"
#include "emulator/stream.h"

namespace ringcomm::emulator {
namespace {

constexpr unsigned kHostAllocFlags = kHostPortable | kHostDeviceMap | 4;  // 4: write-combined

/// The granularity of IPC handles; allocations of other sizes share a piece with others.
constexpr std::size_t kSharedGranularity = std::size_t{2} << 20;

}  // namespace

Result api::mem_get_info(std::size_t* num_free, std::size_t* num_total) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  if (num_free == nullptr || num_total == nullptr) return kInvalidValue;
  *num_total = settings().memory_bytes;
  *num_free = settings().memory_bytes - used_bytes(context->device);
  return kSuccess;
}

Result api::mem_alloc(DevicePtr* address, std::size_t num_bytes) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  if (address == nullptr || num_bytes == 0) return kInvalidValue;
  RINGCOMM_TRY(check_unsafe_call());
  std::shared_ptr<PhysicalMemory> memory;
  RINGCOMM_TRY(PhysicalMemory::create(context->device, num_bytes, &memory));
  const void* mapped = map_whole(*memory);
  if (mapped == nullptr) return kErrorOutOfMemory;
  *address = as_address(mapped);
  AddressSpace::of_process().add({*address, num_bytes, Origin::kAllocated, std::move(memory)});
  return kSuccess;
}

Result api::mem_free(DevicePtr address) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  RINGCOMM_TRY(check_unsafe_call());
  if (address == 0) return kSuccess;
  Piece piece;
  if (!AddressSpace::of_process().remove(address, Origin::kAllocated, &piece)) return kInvalidValue;
  check_not_opened_elsewhere(piece.memory->fd(), "memory");
  synchronize_context(context);  // as CUDA does before it takes memory away
  unmap_whole(piece.base, piece.num_bytes);
  return kSuccess;
}

Result api::ipc_get_mem_handle(IpcMemHandle* handle, DevicePtr address) {
  RINGCOMM_TRY(require_context());
  Piece piece;
  if (handle == nullptr || !AddressSpace::of_process().find(address, &piece) ||
      piece.origin != Origin::kAllocated)
    return kInvalidValue;
  if (piece.num_bytes % kSharedGranularity != 0) {
    std::fprintf(stderr,
                 "libcuda_emulator: cuIpcGetMemHandle of %zu bytes: CUDA cuts them from 2 MiB that "
                 "it hands out whole, with what others have in there\n",
                 piece.num_bytes);
    return kInvalidValue;
  }
  return write_handle(IpcKind::kMemory, piece.memory->fd(), handle);
}

Result api::ipc_open_mem_handle(DevicePtr* address, IpcMemHandle handle, unsigned flags) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  if (address == nullptr || flags != kIpcLazyPeerAccess) return kInvalidValue;
  RINGCOMM_TRY(check_unsafe_call());
  shm::UniqueFd fd;
  RINGCOMM_TRY(open_handle(IpcKind::kMemory, &handle, &fd));
  std::shared_ptr<PhysicalMemory> memory;
  RINGCOMM_TRY(PhysicalMemory::import(fd.get(), &memory));
  if (!can_map(context->device, memory->physical_device())) return kPeerAccessUnsupported;
  if ((*address = AddressSpace::of_process().reopen(memory->inode())) != 0) return kSuccess;
  const void* mapped = map_whole(*memory);
  if (mapped == nullptr) return kMapFailed;
  *address = as_address(mapped);
  const std::size_t num_bytes = memory->num_bytes();
  AddressSpace::of_process().add({*address, num_bytes, Origin::kIpc, std::move(memory)});
  return kSuccess;
}

Result api::ipc_close_mem_handle(DevicePtr address) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  const Result result = AddressSpace::of_process().change(address, [](Piece* piece) {
    if (piece == nullptr || piece->origin != Origin::kIpc) return kInvalidValue;
    return --piece->num_opened > 0 ? kErrorNotReady : kSuccess;
  });
  if (result == kErrorNotReady) return kSuccess;  // opened more often than closed
  RINGCOMM_TRY(result);
  Piece piece;
  AddressSpace::of_process().remove(address, Origin::kIpc, &piece);
  synchronize_context(context);  // as CUDA does before it takes memory away
  unmap_whole(piece.base, piece.num_bytes);
  return kSuccess;
}

Result api::mem_host_alloc(void** address, std::size_t num_bytes, unsigned flags) {
  RINGCOMM_TRY(require_context());
  if (address == nullptr || num_bytes == 0 || (flags & ~kHostAllocFlags) != 0) return kInvalidValue;
  RINGCOMM_TRY(check_unsafe_call());
  void* mapped =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return kErrorOutOfMemory;
  *address = mapped;
  AddressSpace::of_process().add({as_address(mapped), num_bytes, Origin::kHost, nullptr});
  return kSuccess;
}

Result api::mem_free_host(void* address) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  RINGCOMM_TRY(check_unsafe_call());
  Piece piece;
  if (!AddressSpace::of_process().remove(as_address(address), Origin::kHost, &piece))
    return kInvalidValue;
  synchronize_context(context);  // as CUDA does before it takes memory away
  munmap(as_pointer(piece.base), piece.num_bytes);
  return kSuccess;
}

Result api::mem_host_get_device_pointer(DevicePtr* device_address, void* address, unsigned flags) {
  RINGCOMM_TRY(require_context());
  Piece piece;
  if (device_address == nullptr || flags != 0 ||
      !AddressSpace::of_process().find(as_address(address), &piece) ||
      piece.origin != Origin::kHost)
    return kInvalidValue;
  *device_address = as_address(address);
  return kSuccess;
}

}  // namespace ringcomm::emulator
