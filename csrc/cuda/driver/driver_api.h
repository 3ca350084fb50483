#pragma once

#include <cstddef>
#include <cstdint>

// The part of CUDA's driver API that ringcomm calls, declared here. So ringcomm builds without a
// toolkit, and one binary runs on machines with and without a GPU. The functions are looked up in
// libcuda at a group's first call on a GPU tensor (driver.h). Names are CUDA's without "cu";
// layouts and numbers are its binary interface, which a test compares with cuda.h.

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

inline constexpr Result kSuccess = 0;
inline constexpr Result kErrorNotReady = 600;

struct DeviceUuid {
  char bytes[16];
};
struct IpcMemHandle {
  char reserved[64];
};

enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kVirtualMemoryManagementSupported = 102,
  kHandleTypePosixFdSupported = 103,
  kMpsEnabled = 133,
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
#define RINGCOMM_DRIVER_FUNCTIONS(X)                                                           \
  X(init, "cuInit", (unsigned flags))                                                          \
  X(get_error_name, "cuGetErrorName", (Result error, const char** name))                       \
  X(get_error_string, "cuGetErrorString", (Result error, const char** text))                   \
  X(device_get_uuid, "cuDeviceGetUuid_v2", (DeviceUuid * uuid, DeviceOrdinal device))          \
  X(device_get_attribute, "cuDeviceGetAttribute",                                              \
    (int* value, int attribute, DeviceOrdinal device))                                         \
  X(device_primary_ctx_retain, "cuDevicePrimaryCtxRetain",                                     \
    (Context * context, DeviceOrdinal device))                                                 \
  X(ctx_get_current, "cuCtxGetCurrent", (Context * context))                                   \
  X(ctx_set_current, "cuCtxSetCurrent", (Context context))                                     \
  X(mem_get_allocation_granularity, "cuMemGetAllocationGranularity",                           \
    (std::size_t* granularity, const MemAllocationProp* prop, int flags))                      \
  X(mem_create, "cuMemCreate",                                                                 \
    (MemoryHandle * handle, std::size_t num_bytes, const MemAllocationProp* prop,              \
     unsigned long long flags))                                                                \
  X(mem_release, "cuMemRelease", (MemoryHandle handle))                                        \
  X(mem_address_reserve, "cuMemAddressReserve",                                                \
    (DevicePtr * address, std::size_t num_bytes, std::size_t alignment, DevicePtr wanted,      \
     unsigned long long flags))                                                                \
  X(mem_address_free, "cuMemAddressFree", (DevicePtr address, std::size_t num_bytes))          \
  X(mem_map, "cuMemMap",                                                                       \
    (DevicePtr address, std::size_t num_bytes, std::size_t offset, MemoryHandle handle,        \
     unsigned long long flags))                                                                \
  X(mem_unmap, "cuMemUnmap", (DevicePtr address, std::size_t num_bytes))                       \
  X(mem_set_access, "cuMemSetAccess",                                                          \
    (DevicePtr address, std::size_t num_bytes, const MemAccessDesc* access,                    \
     std::size_t num_access))                                                                  \
  X(mem_export_to_shareable_handle, "cuMemExportToShareableHandle",                            \
    (void* shareable, MemoryHandle handle, int type, unsigned long long flags))                \
  X(mem_import_from_shareable_handle, "cuMemImportFromShareableHandle",                        \
    (MemoryHandle * handle, void* shareable, int type))                                        \
  X(mem_alloc, "cuMemAlloc_v2", (DevicePtr * address, std::size_t num_bytes))                  \
  X(mem_free, "cuMemFree_v2", (DevicePtr address))                                             \
  X(ipc_get_mem_handle, "cuIpcGetMemHandle", (IpcMemHandle * handle, DevicePtr address))       \
  X(ipc_open_mem_handle, "cuIpcOpenMemHandle_v2",                                              \
    (DevicePtr * address, IpcMemHandle handle, unsigned flags))                                \
  X(ipc_close_mem_handle, "cuIpcCloseMemHandle", (DevicePtr address))                          \
  X(mem_host_alloc, "cuMemHostAlloc", (void** address, std::size_t num_bytes, unsigned flags)) \
  X(mem_free_host, "cuMemFreeHost", (void* address))                                           \
  X(mem_host_get_device_pointer, "cuMemHostGetDevicePointer_v2",                               \
    (DevicePtr * device_address, void* address, unsigned flags))                               \
  X(memset_d8_async, "cuMemsetD8Async",                                                        \
    (DevicePtr address, unsigned char value, std::size_t num_bytes, StreamHandle stream))      \
  X(memcpy_async, "cuMemcpyAsync",                                                             \
    (DevicePtr to, DevicePtr from, std::size_t num_bytes, StreamHandle stream))                \
  X(stream_create, "cuStreamCreate", (StreamHandle * stream, unsigned flags))                  \
  X(stream_destroy, "cuStreamDestroy_v2", (StreamHandle stream))                               \
  X(stream_synchronize, "cuStreamSynchronize", (StreamHandle stream))                          \
  X(stream_wait_event, "cuStreamWaitEvent",                                                    \
    (StreamHandle stream, EventHandle event, unsigned flags))                                  \
  X(stream_get_capture_info, "cuStreamGetCaptureInfo_v2",                                      \
    (StreamHandle stream, int* status, unsigned long long* id, CapturedGraph* graph,           \
     const CapturedNode** dependencies, std::size_t* num_dependencies))                        \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int* mode))                   \
  X(event_create, "cuEventCreate", (EventHandle * event, unsigned flags))                      \
  X(event_destroy, "cuEventDestroy_v2", (EventHandle event))                                   \
  X(event_record, "cuEventRecord", (EventHandle event, StreamHandle stream))                   \
  X(event_query, "cuEventQuery", (EventHandle event))                                          \
  X(event_synchronize, "cuEventSynchronize", (EventHandle event))                              \
  X(module_load_data, "cuModuleLoadData", (Module * module, const void* image))                \
  X(module_get_function, "cuModuleGetFunction",                                                \
    (Function * function, Module module, const char* name))                                    \
  X(occupancy_max_active_blocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                \
    (int* num_blocks, Function function, int block_threads, std::size_t shared_bytes))         \
  X(launch_kernel, "cuLaunchKernel",                                                           \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,   \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, StreamHandle stream,           \
     void** parameters, void** extra))                                                         \
  X(func_set_attribute, "cuFuncSetAttribute", (Function function, int attribute, int value))   \
  X(occupancy_max_active_clusters, "cuOccupancyMaxActiveClusters",                             \
    (int* num_clusters, Function function, const LaunchConfig* config))                        \
  X(launch_kernel_ex, "cuLaunchKernelEx",                                                      \
    (const LaunchConfig* config, Function function, void** parameters, void** extra))

/// The functions, as found in a library.
struct DriverApi {
#define RINGCOMM_DECLARE(member, symbol, parameters) Result(*member) parameters = nullptr;
  RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_DECLARE)
#undef RINGCOMM_DECLARE
};

}  // namespace ringcomm::cuda
