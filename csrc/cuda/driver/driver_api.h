#pragma once

#include <cstddef>
#include <cstdint>

// The part of CUDA's driver API that ringcomm calls: so it builds without a toolkit, and one binary
// runs on machines with and without a GPU (driver.h). Names are CUDA's without "cu"; layouts and
// numbers are its binary interface, which a test compares with cuda.h.

namespace ringcomm::cuda {

using Result = int;  ///< CUresult; 0 is success
using DeviceOrdinal = int;
using DevicePtr = std::uint64_t;
using MemoryHandle = std::uint64_t;
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using StreamHandle = struct StreamTag*;
using EventHandle = struct EventTag*;
using CapturedGraph = struct CapturedGraphTag*;
using CapturedNode = struct CapturedNodeTag*;
using WideFlags = unsigned long long;

inline constexpr Result kSuccess = 0;
inline constexpr Result kErrorNotReady = 600;

struct DeviceUuid {
  char bytes[16];
  friend bool operator==(const DeviceUuid&, const DeviceUuid&) = default;
};
struct IpcMemHandle {
  char reserved[64];
};

enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kVirtualMemoryManagementSupported = 102,
  kHandleTypePosixFdSupported = 103,
  kMulticastSupported = 132,
  kMpsEnabled = 133,
};

enum PointerAttribute : int {
  kPointerBufferId = 7,
  kPointerHasIpcHandle = 10,
  kPointerRangeStart = 11,
  kPointerRangeSize = 12,
  kPointerHandleTypes = 14,
};

enum MemLocationType : int { kLocationDevice = 1 };
enum MemAllocationType : int { kAllocationPinned = 1 };
enum MemHandleType : int { kHandlePosixFd = 1 };
enum MemAccessFlags : int { kAccessReadWrite = 3 };
enum GranularityFlags : int { kGranularityMinimum = 0 };

struct MemLocation {
  int type;
  int id;
};
struct MemAllocationProp {
  int type;
  int requested_handle_types;
  MemLocation location;
  void* win32_metadata;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct MemAccessDesc {
  MemLocation location;
  int flags;
};

/// Blocks of a cluster along each dimension, for kClusterDimension.
struct LaunchAttribute {
  int id;
  union alignas(8) {
    char reserved[64];
    unsigned cluster[3];
  } value;
};
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  StreamHandle stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

enum EventFlags : unsigned { kEventDisableTiming = 2 };
enum StreamFlags : unsigned { kStreamNonBlocking = 1 };
enum HostAllocFlags : unsigned { kHostPortable = 1, kHostDeviceMap = 2 };
enum IpcFlags : unsigned { kIpcLazyPeerAccess = 1 };
enum FunctionAttribute : int { kMaxDynamicSharedBytes = 8 };
enum LaunchAttributeId : int { kClusterDimension = 4 };
enum CaptureStatus : int { kCaptureNone = 0, kCaptureActive = 1 };
enum CaptureMode : int { kCaptureRelaxed = 2 };

/// X(member, symbol, parameters): every function returns a Result.
#define RINGCOMM_DRIVER_FUNCTIONS(X)                                                             \
  X(init, "cuInit", (unsigned flags))                                                            \
  X(get_error_name, "cuGetErrorName", (Result, const char** name))                               \
  X(get_error_string, "cuGetErrorString", (Result, const char** text))                           \
  X(device_get_uuid, "cuDeviceGetUuid_v2", (DeviceUuid*, DeviceOrdinal))                         \
  X(device_get_attribute, "cuDeviceGetAttribute", (int* value, int attribute, DeviceOrdinal))    \
  X(device_primary_ctx_retain, "cuDevicePrimaryCtxRetain", (Context*, DeviceOrdinal))            \
  X(ctx_get_current, "cuCtxGetCurrent", (Context*))                                              \
  X(ctx_set_current, "cuCtxSetCurrent", (Context))                                               \
  X(ctx_synchronize, "cuCtxSynchronize", ())                                                     \
  X(mem_get_allocation_granularity, "cuMemGetAllocationGranularity",                             \
    (std::size_t* granularity, const MemAllocationProp*, int flags))                             \
  X(mem_create, "cuMemCreate",                                                                   \
    (MemoryHandle*, std::size_t num_bytes, const MemAllocationProp*, WideFlags))                 \
  X(mem_release, "cuMemRelease", (MemoryHandle))                                                 \
  X(mem_address_reserve, "cuMemAddressReserve",                                                  \
    (DevicePtr*, std::size_t num_bytes, std::size_t alignment, DevicePtr wanted, WideFlags))     \
  X(mem_address_free, "cuMemAddressFree", (DevicePtr, std::size_t num_bytes))                    \
  X(mem_map, "cuMemMap",                                                                         \
    (DevicePtr, std::size_t num_bytes, std::size_t offset, MemoryHandle, WideFlags))             \
  X(mem_unmap, "cuMemUnmap", (DevicePtr, std::size_t num_bytes))                                 \
  X(mem_set_access, "cuMemSetAccess",                                                            \
    (DevicePtr, std::size_t num_bytes, const MemAccessDesc*, std::size_t num_access))            \
  X(mem_export_to_shareable_handle, "cuMemExportToShareableHandle",                              \
    (void* shareable, MemoryHandle, int type, WideFlags))                                        \
  X(mem_import_from_shareable_handle, "cuMemImportFromShareableHandle",                          \
    (MemoryHandle*, void* shareable, int type))                                                  \
  X(mem_retain_allocation_handle, "cuMemRetainAllocationHandle", (MemoryHandle*, void* address)) \
  X(mem_get_info, "cuMemGetInfo_v2", (std::size_t* num_free, std::size_t* num_total))            \
  X(mem_get_address_range, "cuMemGetAddressRange_v2",                                            \
    (DevicePtr * base, std::size_t* num_bytes, DevicePtr))                                       \
  X(pointer_get_attributes, "cuPointerGetAttributes",                                            \
    (unsigned num_attributes, int* attributes, void** results, DevicePtr))                       \
  X(mem_alloc, "cuMemAlloc_v2", (DevicePtr*, std::size_t num_bytes))                             \
  X(mem_free, "cuMemFree_v2", (DevicePtr))                                                       \
  X(ipc_get_mem_handle, "cuIpcGetMemHandle", (IpcMemHandle*, DevicePtr))                         \
  X(ipc_open_mem_handle, "cuIpcOpenMemHandle_v2", (DevicePtr*, IpcMemHandle, unsigned flags))    \
  X(ipc_close_mem_handle, "cuIpcCloseMemHandle", (DevicePtr))                                    \
  X(mem_host_alloc, "cuMemHostAlloc", (void** address, std::size_t num_bytes, unsigned flags))   \
  X(mem_free_host, "cuMemFreeHost", (void* address))                                             \
  X(mem_host_get_device_pointer, "cuMemHostGetDevicePointer_v2",                                 \
    (DevicePtr*, void* address, unsigned flags))                                                 \
  X(memset_d8_async, "cuMemsetD8Async",                                                          \
    (DevicePtr, unsigned char value, std::size_t num_bytes, StreamHandle))                       \
  X(memcpy_async, "cuMemcpyAsync",                                                               \
    (DevicePtr to, DevicePtr from, std::size_t num_bytes, StreamHandle))                         \
  X(stream_create, "cuStreamCreate", (StreamHandle*, unsigned flags))                            \
  X(stream_destroy, "cuStreamDestroy_v2", (StreamHandle))                                        \
  X(stream_synchronize, "cuStreamSynchronize", (StreamHandle))                                   \
  X(stream_query, "cuStreamQuery", (StreamHandle))                                               \
  X(stream_wait_event, "cuStreamWaitEvent", (StreamHandle, EventHandle, unsigned flags))         \
  X(stream_get_capture_info, "cuStreamGetCaptureInfo_v2",                                        \
    (StreamHandle, int* status, unsigned long long* id, CapturedGraph*,                          \
     const CapturedNode** dependencies, std::size_t* num_dependencies))                          \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int* mode))                     \
  X(event_create, "cuEventCreate", (EventHandle*, unsigned flags))                               \
  X(event_destroy, "cuEventDestroy_v2", (EventHandle))                                           \
  X(event_record, "cuEventRecord", (EventHandle, StreamHandle))                                  \
  X(event_query, "cuEventQuery", (EventHandle))                                                  \
  X(event_synchronize, "cuEventSynchronize", (EventHandle))                                      \
  X(module_load_data, "cuModuleLoadData", (Module*, const void* image))                          \
  X(module_get_function, "cuModuleGetFunction", (Function*, Module, const char* name))           \
  X(launch_kernel, "cuLaunchKernel",                                                             \
    (Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,              \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, StreamHandle, void** parameters, \
     void** extra))                                                                              \
  X(func_set_attribute, "cuFuncSetAttribute", (Function, int attribute, int value))              \
  X(occupancy_max_active_clusters, "cuOccupancyMaxActiveClusters",                               \
    (int* num_clusters, Function, const LaunchConfig*))                                          \
  X(launch_kernel_ex, "cuLaunchKernelEx",                                                        \
    (const LaunchConfig*, Function, void** parameters, void** extra))

/// The functions, as found in a library.
struct DriverApi {
#define RINGCOMM_DECLARE(member, symbol, parameters) Result(*member) parameters = nullptr;
  RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_DECLARE)
#undef RINGCOMM_DECLARE
};

}  // namespace ringcomm::cuda
