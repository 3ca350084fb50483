// Memory of GPUs, which processes share by handles and descriptors, memory of the host, and copies.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <string_view>

#include "emulator/settings.h"
#include "emulator/stream.h"

namespace ringcomm::emulator {
namespace {

constexpr std::size_t kPageBytes = 4096;
/// Of cuMemCreate and of IPC handles; allocations of other sizes share a piece with others.
constexpr std::size_t kGranularityBytes = std::size_t{2} << 20;
constexpr unsigned kHostAllocFlags = kHostPortable | kHostDeviceMap | 4;  // 4: write-combined
constexpr std::string_view kName = "ringcomm-emulated-gpu-";

ino_t inode_of(int fd) {
  struct stat status = {};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

/// Memory of a GPU: a memfd, which exists until the last process closes it. Its name identifies the
/// GPU, for processes that receive the descriptor.
struct PhysicalMemory {
  host::UniqueFd fd;
  std::size_t num_bytes = 0;
  int device = 0;             ///< the GPU itself
  bool is_exportable = true;  ///< by descriptor
  int num_handles = 0;        ///< of this process, which are equal
  Context charged = nullptr;  ///< null for imported memory

  ~PhysicalMemory() {
    if (charged != nullptr) charged->used_bytes -= static_cast<long long>(num_bytes);
  }

  /// kErrorOutOfMemory if this process would have more on the device than it may.
  static Result create(Context context, std::size_t num_bytes,
                       std::shared_ptr<PhysicalMemory>* memory) {
    auto made = std::make_shared<PhysicalMemory>();
    made->charged = context;
    made->num_bytes = num_bytes;
    made->device = context->device;
    if ((context->used_bytes += static_cast<long long>(num_bytes)) > settings().memory_bytes)
      return kErrorOutOfMemory;
    const std::string name = std::string(kName) + std::to_string(made->device);
    made->fd.reset(memfd_create(name.c_str(), MFD_CLOEXEC));
    if (!made->fd || ftruncate(made->fd.get(), static_cast<off_t>(num_bytes)) != 0)
      return kErrorOutOfMemory;
    *memory = std::move(made);
    return kSuccess;
  }

  /// Memory that another process, or this one, created. kInvalidValue unless `fd` is of such.
  static Result import(int fd, std::shared_ptr<PhysicalMemory>* memory) {
    struct stat status = {};
    char link[128] = {};
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    if (readlink(path.c_str(), link, sizeof(link) - 1) < 0 || fstat(fd, &status) != 0)
      return kInvalidValue;
    const std::string_view name = link;  // "/memfd:NAME (deleted)"
    const std::size_t begin = name.find(kName);
    if (begin == name.npos) return kInvalidValue;
    auto made = std::make_shared<PhysicalMemory>();
    std::from_chars(name.data() + begin + kName.size(), name.data() + name.size(), made->device);
    made->fd.reset(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!made->fd) return kOperatingSystem;
    made->num_bytes = static_cast<std::size_t>(status.st_size);
    *memory = std::move(made);
    return kSuccess;
  }
};

/// Whether kernels of a device can have memory of this GPU.
bool can_map(Context context, int physical) {
  return context->device == physical || settings().has_peer_access;
}

void* as_pointer(DevicePtr address) { return reinterpret_cast<void*>(address); }
DevicePtr as_address(const void* pointer) { return reinterpret_cast<DevicePtr>(pointer); }

// ---- the address space of this process

/// How a piece of the address space was created, which determines how it is removed.
enum class Origin { kMapped, kAllocated, kIpc, kHost };

/// A piece of the address space that the driver knows.
struct Piece {
  DevicePtr base = 0;
  std::size_t num_bytes = 0;
  Origin origin = Origin::kAllocated;
  std::shared_ptr<PhysicalMemory> memory;  // none for the host's
  std::uint64_t id = 0;                    // never used again, but with REUSES_IDS
  // Of one by a handle: where its owner has it, which context opened it, and how often.
  pid_t owner = 0;
  DevicePtr owners_base = 0;
  Context opened_in = nullptr;
  int num_opens = 1;
};

/// Addresses that are reserved, into which pieces are mapped. CUDA does not say that these have
/// numbers of their own, so they have that of the reservation.
struct Reservation {
  std::size_t num_bytes = 0;
  std::uint64_t id = 0;
};

// Never destroyed.
std::mutex& space_mutex = *new std::mutex();
std::map<DevicePtr, Piece>& pieces = *new std::map<DevicePtr, Piece>();
std::map<DevicePtr, Reservation>& reservations = *new std::map<DevicePtr, Reservation>();

std::uint64_t new_id(DevicePtr base) {
  static std::uint64_t num_made = 0;
  return settings().reuses_ids ? base : ++num_made;
}

void add_piece(Piece piece) {
  const std::lock_guard lock(space_mutex);
  piece.id = new_id(piece.base);
  pieces[piece.base] = std::move(piece);
}

/// That which the addresses are in, or else the end of `reservations`; under the lock.
auto reservation_of(DevicePtr address, std::size_t num_bytes = 1) {
  auto after = reservations.upper_bound(address);
  if (after == reservations.begin()) return reservations.end();
  const auto found = std::prev(after);
  const auto& [base, reservation] = *found;
  return address - base + num_bytes <= reservation.num_bytes ? found : reservations.end();
}

/// Calls change(piece) with the one that begins at `base`, under the lock, and returns its Result;
/// kInvalidValue if there is none of this origin.
template <class Change>
Result change_piece(DevicePtr base, Origin origin, Change change) {
  const std::lock_guard lock(space_mutex);
  const auto found = pieces.find(base);
  if (found == pieces.end() || found->second.origin != origin) return kInvalidValue;
  return change(found->second);
}

/// The same with what is mapped into a reservation, all of it.
template <class Change>
Result change_mapped(DevicePtr address, std::size_t num_bytes, Change change) {
  return change_piece(address, Origin::kMapped, [&](Piece& piece) {
    return piece.num_bytes == num_bytes ? change(piece) : kInvalidValue;
  });
}

/// A copy of the piece that has the address; false if there is none.
bool find_piece(DevicePtr address, Piece* found) {
  const std::lock_guard lock(space_mutex);
  auto after = pieces.upper_bound(address);
  if (after == pieces.begin()) return false;
  const Piece& piece = (--after)->second;
  if (address - piece.base >= piece.num_bytes) return false;
  *found = piece;
  return true;
}

/// Reserves addresses; 0 if the system refuses.
DevicePtr reserve(std::size_t num_bytes) {
  void* range =
      mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return range != MAP_FAILED ? as_address(range) : 0;
}

bool map_over(DevicePtr address, std::size_t num_bytes, int protection, int flags, int fd) {
  return mmap(as_pointer(address), num_bytes, protection, flags | MAP_FIXED, fd, 0) != MAP_FAILED;
}

/// The bytes of a mapping of whole pages, and of one behind it that faults.
std::size_t mapped_bytes(std::size_t num_bytes) {
  return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes + kPageBytes;
}

/// Maps all of the memory, or if there is none memory of the host, as a piece of its own.
Result map_piece(std::shared_ptr<PhysicalMemory> memory, std::size_t num_bytes, Origin origin,
                 DevicePtr* address, Piece piece = {}) {
  const std::size_t reserved_bytes = mapped_bytes(num_bytes);
  *address = reserve(reserved_bytes);
  if (*address == 0) return kErrorOutOfMemory;
  const int flags = memory != nullptr ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS;
  if (!map_over(*address, reserved_bytes - kPageBytes, PROT_READ | PROT_WRITE, flags,
                memory != nullptr ? memory->fd.get() : -1)) {
    munmap(as_pointer(*address), reserved_bytes);
    return kMapFailed;
  }
  piece.base = *address;
  piece.num_bytes = num_bytes;
  piece.origin = origin;
  piece.memory = std::move(memory);
  add_piece(std::move(piece));
  return kSuccess;
}

// ---- handles for other processes

/// The content of a 64-byte IPC handle: where to find the memory's descriptor while the process
/// that created it lives. The inode shows whether it is still the same memory.
struct IpcHandle {
  char magic[8];
  pid_t pid;
  int fd;
  ino_t inode;
  DevicePtr base;  // in that process
  std::uint8_t reserved[32];
};
static_assert(sizeof(IpcHandle) == sizeof(IpcMemHandle));
constexpr char kMagic[8] = "emu-ipc";

/// Of this process in /proc, whatever getpid() says.
pid_t own_pid() {
  char link[32] = {};
  return readlink("/proc/self", link, sizeof(link) - 1) > 0 ? std::atoi(link) : 0;
}

/// As CUDA does, counts one more use of memory that this context has open. kNotFound: it has not.
Result reopen(Context context, const IpcHandle& handle, std::size_t num_bytes, DevicePtr* address) {
  const std::lock_guard lock(space_mutex);
  for (auto& [base, piece] : pieces) {
    if (piece.origin != Origin::kIpc || piece.owner != handle.pid || piece.opened_in != context)
      continue;
    if (inode_of(piece.memory->fd.get()) == handle.inode) {
      ++piece.num_opens;
      *address = base;
      return kSuccess;
    }
    if (settings().refuses_reused && handle.base < piece.owners_base + piece.num_bytes &&
        piece.owners_base < handle.base + num_bytes)
      return kAlreadyMapped;
  }
  return kNotFound;
}

/// Takes the piece that begins at `base` away.
Result unmap_piece(DevicePtr base, Origin origin) {
  RINGCOMM_GET(Context, context, require_context(&context));
  Piece piece;
  RINGCOMM_TRY(change_piece(base, origin, [&](Piece& found) {
    piece = std::move(found);
    pieces.erase(base);
    return kSuccess;
  }));
  synchronize_context(context);  // as CUDA does before it takes memory away
  munmap(as_pointer(base), mapped_bytes(piece.num_bytes));
  return kSuccess;
}

}  // namespace

// ---- memory that is allocated with its address

Result api::mem_get_info(std::size_t* num_free, std::size_t* num_total) {
  RINGCOMM_GET(Context, context, require_context(&context));
  *num_total = static_cast<std::size_t>(settings().memory_bytes);
  *num_free = *num_total - static_cast<std::size_t>(context->used_bytes);
  return kSuccess;
}

Result api::pointer_get_attributes(unsigned num_attributes, int* attributes, void** results,
                                   DevicePtr address) {
  RINGCOMM_TRY(require_context());
  Piece piece;  // all zeros for memory that the driver does not know
  find_piece(address, &piece);
  DevicePtr range_base = piece.base;
  std::size_t range_bytes = piece.num_bytes;
  if (piece.origin == Origin::kMapped) {
    const std::lock_guard lock(space_mutex);
    const auto found = reservation_of(address);
    range_base = found->first;
    range_bytes = found->second.num_bytes;
  }
  for (unsigned i = 0; i < num_attributes; ++i) {
    if (attributes[i] == kPointerBufferId)
      *static_cast<std::uint64_t*>(results[i]) = piece.id;
    else if (attributes[i] == kPointerRangeStart)
      *static_cast<DevicePtr*>(results[i]) = range_base;
    else if (attributes[i] == kPointerRangeSize)
      *static_cast<std::size_t*>(results[i]) = range_bytes;
    else if (attributes[i] == kPointerHandleTypes)
      *static_cast<int*>(results[i]) =
          piece.origin == Origin::kMapped && piece.memory->is_exportable ? kHandlePosixFd : 0;
    else if (attributes[i] == kPointerHasIpcHandle)
      *static_cast<unsigned*>(results[i]) =
          piece.id != 0 && piece.origin == Origin::kAllocated && settings().has_ipc;
    else
      return kInvalidValue;
  }
  return kSuccess;
}

/// Of what is mapped there, also where that is less than the reservation.
Result api::mem_get_address_range(DevicePtr* base, std::size_t* num_bytes, DevicePtr address) {
  RINGCOMM_TRY(require_context());
  Piece piece;
  if (!find_piece(address, &piece)) return kInvalidValue;
  *base = piece.base;
  *num_bytes = piece.num_bytes;
  return kSuccess;
}

Result api::mem_alloc(DevicePtr* address, std::size_t num_bytes) {
  RINGCOMM_GET(Context, context, require_context(&context));
  if (num_bytes == 0) return kInvalidValue;
  RINGCOMM_TRY(check_unsafe_call());
  RINGCOMM_GET(std::shared_ptr<PhysicalMemory>, memory,
               PhysicalMemory::create(context, num_bytes, &memory));
  return map_piece(std::move(memory), num_bytes, Origin::kAllocated, address);
}

Result api::mem_free(DevicePtr address) {
  RINGCOMM_TRY(require_context());
  RINGCOMM_TRY(check_unsafe_call());
  return address != 0 ? unmap_piece(address, Origin::kAllocated) : kSuccess;
}

Result api::ipc_get_mem_handle(IpcMemHandle* handle, DevicePtr address) {
  RINGCOMM_TRY(require_context());
  Piece piece;
  if (!find_piece(address, &piece) || piece.origin != Origin::kAllocated) return kInvalidValue;
  if (piece.num_bytes % kGranularityBytes != 0) {
    std::fprintf(stderr,
                 "libcuda_emulator: cuIpcGetMemHandle of %zu bytes: CUDA cuts them from 2 MiB that "
                 "it hands out whole, with what others have in there\n",
                 piece.num_bytes);
    return kInvalidValue;
  }
  if (!settings().has_ipc) return kNotSupported;
  const int fd = piece.memory->fd.get();
  IpcHandle made = {{}, own_pid(), fd, inode_of(fd), piece.base, {}};
  std::memcpy(made.magic, kMagic, sizeof(kMagic));
  *handle = std::bit_cast<IpcMemHandle>(made);
  return kSuccess;
}

Result api::ipc_open_mem_handle(DevicePtr* address, IpcMemHandle handle, unsigned flags) {
  RINGCOMM_GET(Context, context, require_context(&context));
  if (flags != kIpcLazyPeerAccess) return kInvalidValue;
  RINGCOMM_TRY(check_unsafe_call());
  if (!settings().has_ipc) return kNotSupported;
  const auto made = std::bit_cast<IpcHandle>(handle);
  if (std::memcmp(made.magic, kMagic, sizeof(kMagic)) != 0) return kInvalidValue;
  if (made.pid == own_pid()) return kInvalidContext;
  const std::string path = "/proc/" + std::to_string(made.pid) + "/fd/" + std::to_string(made.fd);
  const host::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  // Where its maker is gone, or has freed it.
  if (!fd || inode_of(fd.get()) != made.inode) return kMapFailed;
  RINGCOMM_GET(std::shared_ptr<PhysicalMemory>, memory, PhysicalMemory::import(fd.get(), &memory));
  if (!can_map(context, memory->device)) return kPeerAccessUnsupported;
  const std::size_t num_bytes = memory->num_bytes;
  const Result reopened = reopen(context, made, num_bytes, address);
  if (reopened != kNotFound) return reopened;
  Piece piece;
  piece.owner = made.pid;
  piece.owners_base = made.base;
  piece.opened_in = context;
  return map_piece(std::move(memory), num_bytes, Origin::kIpc, address, std::move(piece));
}

Result api::ipc_close_mem_handle(DevicePtr address) {
  bool is_last = false;
  RINGCOMM_TRY(change_piece(address, Origin::kIpc, [&](Piece& piece) {
    is_last = --piece.num_opens == 0;
    return kSuccess;
  }));
  return is_last ? unmap_piece(address, Origin::kIpc) : kSuccess;
}

Result api::mem_host_alloc(void** address, std::size_t num_bytes, unsigned flags) {
  RINGCOMM_TRY(require_context());
  if (num_bytes == 0 || (flags & ~kHostAllocFlags) != 0) return kInvalidValue;
  RINGCOMM_TRY(check_unsafe_call());
  DevicePtr mapped = 0;
  RINGCOMM_TRY(map_piece(nullptr, num_bytes, Origin::kHost, &mapped));
  *address = as_pointer(mapped);
  return kSuccess;
}

Result api::mem_free_host(void* address) {
  RINGCOMM_TRY(require_context());
  RINGCOMM_TRY(check_unsafe_call());
  return unmap_piece(as_address(address), Origin::kHost);
}

Result api::mem_host_get_device_pointer(DevicePtr* device_address, void* address, unsigned flags) {
  RINGCOMM_TRY(require_context());
  Piece piece;
  if (flags != 0 || !find_piece(as_address(address), &piece) || piece.origin != Origin::kHost)
    return kInvalidValue;
  *device_address = as_address(address);
  return kSuccess;
}

// ---- physical memory without addresses, and addresses without memory

namespace {

std::shared_ptr<PhysicalMemory> find_memory(MemoryHandle handle) {
  return Handles<PhysicalMemory>::all().find(reinterpret_cast<PhysicalMemory*>(handle));
}

/// One more handle of it, which keeps it: the same number, as long as any is left or it is mapped.
MemoryHandle add_memory(std::shared_ptr<PhysicalMemory> memory) {
  const std::lock_guard lock(space_mutex);
  ++memory->num_handles;
  return reinterpret_cast<MemoryHandle>(Handles<PhysicalMemory>::all().add(std::move(memory)));
}

Result require_vmm() {
  RINGCOMM_TRY(require_initialized());
  return settings().has_vmm ? kSuccess : kNotSupported;
}

bool is_granular(std::size_t num_bytes) {
  return num_bytes > 0 && num_bytes % kGranularityBytes == 0;
}

Result check_prop(const MemAllocationProp* prop, Context* context) {
  if (prop->type != kAllocationPinned || prop->location.type != kLocationDevice ||
      prop->win32_metadata != nullptr)
    return kInvalidValue;
  if ((prop->requested_handle_types & ~kHandlePosixFd) != 0) return kNotSupported;
  return require_device(prop->location.id, context);
}

}  // namespace

Result api::mem_get_allocation_granularity(std::size_t* granularity, const MemAllocationProp* prop,
                                           int flags) {
  RINGCOMM_TRY(require_vmm());
  Context context = nullptr;
  if (flags != kGranularityMinimum) return kInvalidValue;
  RINGCOMM_TRY(check_prop(prop, &context));
  *granularity = kGranularityBytes;
  return kSuccess;
}

Result api::mem_create(MemoryHandle* handle, std::size_t num_bytes, const MemAllocationProp* prop,
                       unsigned long long flags) {
  RINGCOMM_TRY(require_vmm());
  Context context = nullptr;
  if (flags != 0 || !is_granular(num_bytes)) return kInvalidValue;
  RINGCOMM_TRY(check_prop(prop, &context));
  RINGCOMM_GET(std::shared_ptr<PhysicalMemory>, memory,
               PhysicalMemory::create(context, num_bytes, &memory));
  memory->is_exportable = (prop->requested_handle_types & kHandlePosixFd) != 0;
  *handle = add_memory(std::move(memory));
  return kSuccess;
}

Result api::mem_release(MemoryHandle handle) {
  RINGCOMM_TRY(require_vmm());
  const std::shared_ptr<PhysicalMemory> memory = find_memory(handle);
  if (memory == nullptr) return kInvalidValue;
  const std::lock_guard lock(space_mutex);
  if (--memory->num_handles == 0) Handles<PhysicalMemory>::all().remove(memory.get());
  return kSuccess;
}

Result api::mem_retain_allocation_handle(MemoryHandle* handle, void* address) {
  RINGCOMM_TRY(require_vmm());
  Piece piece;
  if (!find_piece(as_address(address), &piece) || piece.origin != Origin::kMapped)
    return kInvalidValue;
  *handle = add_memory(piece.memory);
  return kSuccess;
}

Result api::mem_address_reserve(DevicePtr* address, std::size_t num_bytes, std::size_t alignment,
                                DevicePtr, unsigned long long flags) {
  RINGCOMM_TRY(require_vmm());
  if (!is_granular(num_bytes) || flags != 0) return kInvalidValue;
  if (alignment != 0) return kNotSupported;
  *address = reserve(num_bytes);
  if (*address == 0) return kErrorOutOfMemory;
  const std::lock_guard lock(space_mutex);
  reservations[*address] = {num_bytes, new_id(*address)};
  return kSuccess;
}

Result api::mem_address_free(DevicePtr address, std::size_t num_bytes) {
  RINGCOMM_TRY(require_vmm());
  const std::lock_guard lock(space_mutex);
  const auto found = reservations.find(address);
  if (found == reservations.end() || found->second.num_bytes != num_bytes) return kInvalidValue;
  const auto first = pieces.lower_bound(address);
  if (first != pieces.end() && first->first < address + num_bytes) return kInvalidValue;
  reservations.erase(found);
  munmap(as_pointer(address), num_bytes);
  return kSuccess;
}

Result api::mem_map(DevicePtr address, std::size_t num_bytes, std::size_t offset,
                    MemoryHandle handle, unsigned long long flags) {
  RINGCOMM_TRY(require_vmm());
  const std::shared_ptr<PhysicalMemory> memory = find_memory(handle);
  if (memory == nullptr || flags != 0 || offset != 0 || num_bytes > memory->num_bytes)
    return kInvalidValue;
  const std::lock_guard lock(space_mutex);
  const auto range = reservation_of(address, num_bytes);
  if (range == reservations.end()) return kInvalidValue;
  const auto after = pieces.lower_bound(address + num_bytes);
  if (after != pieces.begin()) {
    const Piece& before = std::prev(after)->second;
    if (before.base + before.num_bytes > address) return kAlreadyMapped;
  }
  if (!map_over(address, num_bytes, PROT_NONE, MAP_SHARED, memory->fd.get())) return kMapFailed;
  pieces[address] = {address, num_bytes, Origin::kMapped, memory, range->second.id};
  return kSuccess;
}

Result api::mem_unmap(DevicePtr address, std::size_t num_bytes) {
  RINGCOMM_TRY(require_vmm());
  std::shared_ptr<PhysicalMemory> memory;  // goes without the lock
  return change_mapped(address, num_bytes, [&](Piece& piece) {
    if (!map_over(address, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1))
      return kOperatingSystem;
    memory = std::move(piece.memory);
    pieces.erase(address);
    return kSuccess;
  });
}

Result api::mem_set_access(DevicePtr address, std::size_t num_bytes, const MemAccessDesc* access,
                           std::size_t num_access) {
  RINGCOMM_TRY(require_vmm());
  if (num_access != 1 || access->location.type != kLocationDevice ||
      access->flags != kAccessReadWrite)
    return kInvalidValue;
  RINGCOMM_GET(Context, context, require_device(access->location.id, &context));
  return change_mapped(address, num_bytes, [&](const Piece& piece) {
    if (!can_map(context, piece.memory->device)) return kInvalidDevice;
    const bool is_lossy = settings().loses_peer_writes && context->device != piece.memory->device;
    return map_over(address, num_bytes, PROT_READ | PROT_WRITE, is_lossy ? MAP_PRIVATE : MAP_SHARED,
                    piece.memory->fd.get())
               ? kSuccess
               : kOperatingSystem;
  });
}

Result api::mem_export_to_shareable_handle(void* shareable, MemoryHandle handle, int type,
                                           unsigned long long flags) {
  RINGCOMM_TRY(require_vmm());
  const std::shared_ptr<PhysicalMemory> memory = find_memory(handle);
  if (memory == nullptr || !memory->is_exportable || type != kHandlePosixFd || flags != 0)
    return kInvalidValue;
  const int fd = fcntl(memory->fd.get(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kOperatingSystem;
  *static_cast<int*>(shareable) = fd;
  return kSuccess;
}

Result api::mem_import_from_shareable_handle(MemoryHandle* handle, void* shareable, int type) {
  RINGCOMM_TRY(require_vmm());
  if (type != kHandlePosixFd) return kNotSupported;
  RINGCOMM_GET(std::shared_ptr<PhysicalMemory>, memory,
               PhysicalMemory::import(static_cast<int>(as_address(shareable)), &memory));
  *handle = add_memory(std::move(memory));
  return kSuccess;
}

// ---- copies

namespace {

/// Memory that the driver does not know is taken for pageable memory of the host; what begins in
/// memory that it knows must not leave it.
Result check_operand(DevicePtr address, std::size_t num_bytes, bool* is_pageable) {
  Piece piece;
  *is_pageable = !find_piece(address, &piece);
  if (*is_pageable) return address != 0 ? kSuccess : kInvalidValue;
  DevicePtr end = piece.base + piece.num_bytes;
  // Pieces that are mapped side by side are as one.
  while (end - address < num_bytes && piece.origin == Origin::kMapped && find_piece(end, &piece))
    end = piece.base + piece.num_bytes;
  return num_bytes <= end - address ? kSuccess : kInvalidValue;
}

}  // namespace

Result api::memset_d8_async(DevicePtr address, unsigned char value, std::size_t num_bytes,
                            StreamHandle handle) {
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(handle, &stream));
  if (num_bytes == 0) return kSuccess;
  bool is_pageable = false;
  RINGCOMM_TRY(check_operand(address, num_bytes, &is_pageable));
  if (is_pageable) return kInvalidValue;
  return submit(*stream, [=] { std::memset(as_pointer(address), value, num_bytes); });
}

Result api::memcpy_async(DevicePtr to, DevicePtr from, std::size_t num_bytes, StreamHandle handle) {
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(handle, &stream));
  if (num_bytes == 0) return kSuccess;
  bool writes_pageable = false;
  bool reads_pageable = false;
  RINGCOMM_TRY(check_operand(to, num_bytes, &writes_pageable));
  RINGCOMM_TRY(check_operand(from, num_bytes, &reads_pageable));
  RINGCOMM_TRY(submit(*stream, [=] { std::memmove(as_pointer(to), as_pointer(from), num_bytes); }));
  // Pageable memory is only used during the call; a graph that has it uses it when it runs.
  if ((writes_pageable || reads_pageable) && !is_capturing(*stream)) stream->synchronize();
  return kSuccess;
}

}  // namespace ringcomm::emulator
