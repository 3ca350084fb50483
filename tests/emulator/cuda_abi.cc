// Compares the CUDA binary interface in driver_api.h and the emulator with a toolkit's cuda.h.
// Compiled only (make abi); abi_names.inc is generated from the lists of functions, with one line
// for each.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "emulator/api.h"

// Older versions have types only.
extern "C" std::remove_pointer_t<PFN_cuStreamGetCaptureInfo_v11030> cuStreamGetCaptureInfo_v2;

namespace ringcomm::emulator {
namespace {

template <class T>
concept Complete = requires { sizeof(T); };
template <class T>
concept Number = std::is_integral_v<T> || std::is_enum_v<T>;

/// Whether two types are passed in the same way: numbers of one size, structs of one size and
/// alignment, and pointers to such types. Opaque CUDA types are pointers to any incomplete type.
template <class Ours, class Theirs>
constexpr bool same_type() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using OurTarget = std::remove_pointer_t<Ours>;
    using TheirTarget = std::remove_pointer_t<Theirs>;
    if constexpr (std::is_const_v<OurTarget> != std::is_const_v<TheirTarget>)
      return false;
    else if constexpr (Complete<OurTarget> && Complete<TheirTarget>)
      return same_type<std::remove_cv_t<OurTarget>, std::remove_cv_t<TheirTarget>>();
    else
      return !Complete<OurTarget> && !Complete<TheirTarget> &&
             std::is_void_v<OurTarget> == std::is_void_v<TheirTarget>;
  } else if constexpr (Number<Ours> && Number<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs);
  } else if constexpr (std::is_class_v<Ours> && std::is_class_v<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs);
  } else {
    return false;
  }
}

template <class Ours, class Theirs>
struct SameFunction : std::false_type {};
template <class Ours, class... OurParameters, class Theirs, class... TheirParameters>
  requires(sizeof...(OurParameters) == sizeof...(TheirParameters))
struct SameFunction<Ours (*)(OurParameters...), Theirs (*)(TheirParameters...)>
    : std::bool_constant<same_type<Ours, Theirs>() &&
                         (same_type<OurParameters, TheirParameters>() && ...)> {};

struct AllFunctions : DriverApi {
#define RINGCOMM_DECLARE(member, symbol, parameters) Result(*member) parameters = nullptr;
  RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_DECLARE)
#undef RINGCOMM_DECLARE
};

// cuda.h names the present version of a function by a macro, so that the name that is looked up
// must be what the macro makes of it: another would find an older version.
#define RINGCOMM_EXPANDED(symbol) #symbol
#define RINGCOMM_COMPARE(member, symbol)                                 \
  static_assert(std::string_view(RINGCOMM_EXPANDED(symbol)) == #symbol); \
  static_assert(SameFunction<decltype(AllFunctions::member), decltype(&::symbol)>::value);
#include "abi_names.inc"
#undef RINGCOMM_COMPARE

constexpr int kNumCompared = 0
#define RINGCOMM_COMPARE(member, symbol) +1
#include "abi_names.inc"
    ;
static_assert(sizeof(AllFunctions) == kNumCompared * sizeof(void (*)()));

// Two names differ in nothing but their types.
static_assert(!same_type<int, long>() && !same_type<int*, void*>() && !same_type<int, int*>());
static_assert(!same_type<const char*, char*>() && same_type<Context, CUcontext>());
static_assert(!SameFunction<int (*)(int), int (*)(int, int)>::value);

#define RINGCOMM_SAME_FIELD(ours, our_field, theirs, their_field)             \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(ours::our_field) == sizeof(theirs::their_field))
RINGCOMM_SAME_FIELD(DeviceUuid, bytes, CUuuid, bytes);
RINGCOMM_SAME_FIELD(IpcMemHandle, reserved, CUipcMemHandle, reserved);
RINGCOMM_SAME_FIELD(MemLocation, type, CUmemLocation, type);
RINGCOMM_SAME_FIELD(MemLocation, id, CUmemLocation, id);
RINGCOMM_SAME_FIELD(MemAllocationProp, type, CUmemAllocationProp, type);
RINGCOMM_SAME_FIELD(MemAllocationProp, requested_handle_types, CUmemAllocationProp,
                    requestedHandleTypes);
RINGCOMM_SAME_FIELD(MemAllocationProp, location, CUmemAllocationProp, location);
RINGCOMM_SAME_FIELD(MemAllocationProp, win32_metadata, CUmemAllocationProp, win32HandleMetaData);
RINGCOMM_SAME_FIELD(MemAllocationProp, flags, CUmemAllocationProp, allocFlags);
RINGCOMM_SAME_FIELD(MemAllocationProp, flags.compression_type, CUmemAllocationProp,
                    allocFlags.compressionType);
RINGCOMM_SAME_FIELD(MemAllocationProp, flags.gpu_direct_rdma_capable, CUmemAllocationProp,
                    allocFlags.gpuDirectRDMACapable);
RINGCOMM_SAME_FIELD(MemAllocationProp, flags.usage, CUmemAllocationProp, allocFlags.usage);
RINGCOMM_SAME_FIELD(MemAccessDesc, location, CUmemAccessDesc, location);
RINGCOMM_SAME_FIELD(MemAccessDesc, flags, CUmemAccessDesc, flags);
RINGCOMM_SAME_FIELD(LaunchAttribute, id, CUlaunchAttribute, id);
RINGCOMM_SAME_FIELD(LaunchAttribute, value, CUlaunchAttribute, value);
RINGCOMM_SAME_FIELD(LaunchAttribute, value.cluster, CUlaunchAttribute, value.clusterDim);
RINGCOMM_SAME_FIELD(LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes);
RINGCOMM_SAME_FIELD(LaunchConfig, stream, CUlaunchConfig, hStream);
RINGCOMM_SAME_FIELD(LaunchConfig, attributes, CUlaunchConfig, attrs);
RINGCOMM_SAME_FIELD(LaunchConfig, num_attributes, CUlaunchConfig, numAttrs);
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(sizeof(MemAllocationProp) == sizeof(CUmemAllocationProp));
static_assert(sizeof(MemAccessDesc) == sizeof(CUmemAccessDesc));
static_assert(sizeof(DeviceUuid) == sizeof(CUuuid));

#define RINGCOMM_SAME_NUMBER(ours, theirs) \
  static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs))
RINGCOMM_SAME_NUMBER(kSuccess, CUDA_SUCCESS);
RINGCOMM_SAME_NUMBER(kErrorNotReady, CUDA_ERROR_NOT_READY);
#define RINGCOMM_SAME_ERROR(constant, number, name) RINGCOMM_SAME_NUMBER(constant, name);
RINGCOMM_EMULATED_ERRORS(RINGCOMM_SAME_ERROR)
RINGCOMM_SAME_NUMBER(kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
RINGCOMM_SAME_NUMBER(kVirtualMemoryManagementSupported,
                     CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
RINGCOMM_SAME_NUMBER(kHandleTypePosixFdSupported,
                     CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
RINGCOMM_SAME_NUMBER(kMulticastSupported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
RINGCOMM_SAME_NUMBER(kMpsEnabled, CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
RINGCOMM_SAME_NUMBER(kPointerBufferId, CU_POINTER_ATTRIBUTE_BUFFER_ID);
RINGCOMM_SAME_NUMBER(kPointerHasIpcHandle, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
RINGCOMM_SAME_NUMBER(kPointerRangeStart, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
RINGCOMM_SAME_NUMBER(kPointerRangeSize, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
RINGCOMM_SAME_NUMBER(kPointerHandleTypes, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES);
RINGCOMM_SAME_NUMBER(kMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
RINGCOMM_SAME_NUMBER(kClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
RINGCOMM_SAME_NUMBER(kLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE);
RINGCOMM_SAME_NUMBER(kAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
RINGCOMM_SAME_NUMBER(kHandlePosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
RINGCOMM_SAME_NUMBER(kAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
RINGCOMM_SAME_NUMBER(kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
RINGCOMM_SAME_NUMBER(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
RINGCOMM_SAME_NUMBER(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
RINGCOMM_SAME_NUMBER(kHostPortable, CU_MEMHOSTALLOC_PORTABLE);
RINGCOMM_SAME_NUMBER(kHostDeviceMap, CU_MEMHOSTALLOC_DEVICEMAP);
RINGCOMM_SAME_NUMBER(kIpcLazyPeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
RINGCOMM_SAME_NUMBER(cuda::kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
RINGCOMM_SAME_NUMBER(cuda::kCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE);
RINGCOMM_SAME_NUMBER(kCaptureInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
RINGCOMM_SAME_NUMBER(kCaptureGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
RINGCOMM_SAME_NUMBER(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);

}  // namespace
}  // namespace ringcomm::emulator
