#include "cuda/driver/device_memory.h"

#include <cstring>

#include "core/chunk_layout.h"

namespace ringcomm::cuda {
namespace {

// The driver takes smaller allocations from pieces of this size. A handle exports the whole piece,
// and with it other allocations.
constexpr std::size_t kIpcGranularity = std::size_t{2} << 20;

MemAllocationProp prop_of(DeviceOrdinal device) {
  MemAllocationProp prop = {};
  prop.type = kAllocationPinned;
  prop.requested_handle_types = kHandlePosixFd;
  prop.location = {.type = kLocationDevice, .id = device};
  return prop;
}

std::size_t rounded_up(DeviceOrdinal device, std::size_t num_bytes) {
  std::size_t granularity = 0;
  const MemAllocationProp prop = prop_of(device);
  check(driver().mem_get_allocation_granularity(&granularity, &prop, kGranularityMinimum),
        "ask for the granularity of device memory");
  return num_slices(num_bytes, granularity) * granularity;
}

AddressRange reserve(std::size_t num_bytes) {
  DevicePtr base = 0;
  check(driver().mem_address_reserve(&base, num_bytes, 0, 0, 0), "reserve addresses");
  return {new DevicePtr(base), [num_bytes](const DevicePtr* range) {
            driver().mem_address_free(*range, num_bytes);
            delete range;
          }};
}

// That which is mapped at `base`; `handle` is retained, and becomes the result's.
std::shared_ptr<const MappedPiece> piece_at(DevicePtr base, MemoryHandle handle) {
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<DevicePtr, std::weak_ptr<const MappedPiece>>;
  static std::uint64_t num_made = std::uint64_t{1} << 63;
  const std::lock_guard lock(mutex);
  if (auto found = all[base].lock(); found != nullptr && found->handle == handle) {
    driver().mem_release(handle);  // which is retained already
    return found;
  }
  std::shared_ptr<const MappedPiece> made(new MappedPiece{handle, num_made++});
  std::erase_if(all, [](const auto& entry) { return entry.second.expired(); });
  all[base] = made;
  return made;
}

// Makes the piece that the address is in of what the driver says of its range.
void find_piece(DevicePtr address, Allocation& found) {
  DevicePtr base = 0;
  std::size_t num_bytes = 0;
  MemoryHandle handle = 0;
  if (driver().mem_get_address_range(&base, &num_bytes, address) != kSuccess) return;
  auto* const pointer = reinterpret_cast<void*>(address);
  if (driver().mem_retain_allocation_handle(&handle, pointer) != kSuccess) return;
  found.piece = piece_at(base, handle);
  found.id = found.piece->id;
  found.range_base = std::exchange(found.base, base);
  found.range_bytes = std::exchange(found.num_bytes, num_bytes);
  found.has_handle = true;
}

}  // namespace

Allocation allocation_of(const void* address) {
  Allocation found;
  unsigned has_handle = 0;
  std::uint64_t handle_types = 0;  // wide enough for what any driver writes
  int attributes[] = {kPointerBufferId, kPointerRangeStart, kPointerRangeSize, kPointerHasIpcHandle,
                      kPointerHandleTypes};
  void* results[] = {&found.id, &found.base, &found.num_bytes, &has_handle, &handle_types};
  const auto at = reinterpret_cast<DevicePtr>(address);
  if (driver().pointer_get_attributes(5, attributes, results, at) != kSuccess) return {};
  // Others share what a handle exports.
  found.has_handle = has_handle != 0 && found.num_bytes % kIpcGranularity == 0;
  if (has_handle == 0 && (handle_types & kHandlePosixFd) != 0) find_piece(at, found);
  return found;
}

host::UniqueFd export_memory(MemoryHandle handle) {
  int fd = -1;
  check(driver().mem_export_to_shareable_handle(&fd, handle, kHandlePosixFd, 0),
        "hand out memory of the GPU");
  return host::UniqueFd(fd);
}

bool is_memory_scarce() {
  std::size_t num_free = 0, num_total = 0;
  const Result result = driver().mem_get_info(&num_free, &num_total);
  return result != kSuccess || num_free < num_total / 16;
}

DeviceMemory::DeviceMemory(DeviceOrdinal device, std::size_t num_bytes)
    : device_(device), num_bytes_(rounded_up(device, num_bytes)) {
  const ContextGuard guard(device);
  const MemAllocationProp prop = prop_of(device);
  check(driver().mem_create(&handle_, num_bytes_, &prop, 0), "allocate staging memory on the GPU");
  map(0);
}

DeviceMemory::DeviceMemory(DeviceOrdinal device, std::size_t num_bytes, const host::UniqueFd& fd,
                           AddressRange range, std::size_t offset)
    : device_(device), num_bytes_(rounded_up(device, num_bytes)), range_(std::move(range)) {
  const ContextGuard guard(device);
  auto* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd.get()));
  check(driver().mem_import_from_shareable_handle(&handle_, shareable, kHandlePosixFd),
        "import another rank's memory");
  map(offset);
}

DeviceMemory::DeviceMemory(DeviceOrdinal device, const IpcMemHandle& handle) : device_(device) {
  const ContextGuard guard(device);
  check(driver().ipc_open_mem_handle(&address_, handle, kIpcLazyPeerAccess),
        "open another rank's memory");
}

void DeviceMemory::map(std::size_t offset) {
  try {
    if (range_ == nullptr) range_ = reserve(num_bytes_);
    address_ = *range_ + offset;
    check(driver().mem_map(address_, num_bytes_, 0, handle_, 0), "map memory of a GPU");
    is_mapped_ = true;
    const MemAccessDesc access = {.location = {.type = kLocationDevice, .id = device_},
                                  .flags = kAccessReadWrite};
    check(driver().mem_set_access(address_, num_bytes_, &access, 1),
          "give the GPU access to the memory of a rank");
  } catch (...) {
    release();
    throw;
  }
}

DeviceMemory::~DeviceMemory() {
  try_in_context(device_, [this] { release(); });
}

void DeviceMemory::release() noexcept {
  if (handle_ == 0) {
    driver().ipc_close_mem_handle(address_);
    return;
  }
  if (is_mapped_) driver().mem_unmap(address_, num_bytes_);
  driver().mem_release(handle_);
}

MappedHostMemory::MappedHostMemory(DeviceOrdinal device, std::size_t num_bytes) : ordinal_(device) {
  const ContextGuard guard(device);
  check(driver().mem_host_alloc(&host_, num_bytes, kHostPortable | kHostDeviceMap),
        "allocate host memory for the GPU");
  std::memset(host_, 0, num_bytes);
  DevicePtr address = 0;
  check(driver().mem_host_get_device_pointer(&address, host_, 0), "map host memory for the GPU");
  device_ = reinterpret_cast<void*>(address);
}

MappedHostMemory::~MappedHostMemory() {
  try_in_context(ordinal_, [this] { driver().mem_free_host(host_); });
}

std::shared_ptr<PeerMappings::Mapping> PeerMappings::map(
    const PeerAllocation& source, const std::function<host::UniqueFd()>& fetch) {
  const auto has_expired = [](const auto& entry) { return entry.second.expired(); };
  const std::lock_guard lock(mutex_);
  std::erase_if(all_, has_expired);
  std::erase_if(ranges_, has_expired);
  std::weak_ptr<Mapping>& entry = all_[{source.process, source.id}];
  if (auto found = entry.lock(); found != nullptr && found->memory.has_value()) return found;
  auto made = std::make_shared<Mapping>();
  if (source.num_bytes == 0) {
    made->memory.emplace(device_, source.handle);
  } else {
    auto& known = ranges_[{source.process, source.range_base, source.range_bytes}];
    auto range = known.lock();
    if (range == nullptr) known = range = reserve(source.range_bytes);
    made->memory.emplace(device_, source.num_bytes, fetch(), std::move(range),
                         source.base - source.range_base);
  }
  made->data = made->memory->data();
  entry = made;
  return made;
}

void PeerMappings::unmap(Mapping& mapping) {
  const std::lock_guard lock(mutex_);
  mapping.memory.reset();
}

}  // namespace ringcomm::cuda
