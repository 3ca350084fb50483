#pragma once

#include "transport/cuda/driver_api.h"

namespace ringcomm::emulator {

using cuda::Result;

/// X(constant, number, CUDA's name, CUDA's words). Success and not ready are in driver_api.h.
#define RINGCOMM_EMULATED_ERRORS(X)                                                 \
  X(kInvalidValue, 1, CUDA_ERROR_INVALID_VALUE, "invalid argument")                 \
  X(kErrorOutOfMemory, 2, CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                \
  X(kNotInitialized, 3, CUDA_ERROR_NOT_INITIALIZED, "initialization error")         \
  X(kNoDevice, 100, CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")     \
  X(kInvalidDevice, 101, CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")       \
  X(kInvalidImage, 200, CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid") \
  X(kInvalidContext, 201, CUDA_ERROR_INVALID_CONTEXT, "invalid device context")     \
  X(kMapFailed, 205, CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed")      \
  X(kAlreadyMapped, 208, CUDA_ERROR_ALREADY_MAPPED, "resource already mapped")      \
  X(kPeerAccessUnsupported, 217, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,                \
    "peer access is not supported between these two devices")                       \
  X(kOperatingSystem, 304, CUDA_ERROR_OPERATING_SYSTEM,                             \
    "OS call failed or operation not supported on this OS")                         \
  X(kInvalidHandle, 400, CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")      \
  X(kNotFound, 500, CUDA_ERROR_NOT_FOUND, "named symbol not found")                 \
  X(kNotSupported, 801, CUDA_ERROR_NOT_SUPPORTED, "operation not supported")        \
  X(kCaptureUnsupported, 900, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,                \
    "operation not permitted when stream is capturing")                             \
  X(kCaptureWasInvalidated, 901, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,             \
    "operation failed due to a previous error during capture")                      \
  X(kCaptureMerge, 902, CUDA_ERROR_STREAM_CAPTURE_MERGE,                            \
    "operation would result in a merge of separate capture sequences")              \
  X(kCaptureUnmatched, 903, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,                    \
    "capture was not ended in the same stream as it began")                         \
  X(kCaptureUnjoined, 904, CUDA_ERROR_STREAM_CAPTURE_UNJOINED,                      \
    "capturing stream has unjoined work")                                           \
  X(kCaptureIsolation, 905, CUDA_ERROR_STREAM_CAPTURE_ISOLATION,                    \
    "dependency created on uncaptured work in another stream")                      \
  X(kCaptureImplicit, 906, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,                      \
    "operation would make the legacy stream depend on a capturing blocking stream") \
  X(kCapturedEvent, 907, CUDA_ERROR_CAPTURED_EVENT,                                 \
    "operation not permitted on an event last recorded in a capturing stream")      \
  X(kCaptureWrongThread, 908, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,               \
    "attempt to terminate a thread-local capture sequence from another thread")

#define RINGCOMM_DEFINE_ERROR(constant, number, name, text) \
  inline constexpr Result constant = number;
RINGCOMM_EMULATED_ERRORS(RINGCOMM_DEFINE_ERROR)
#undef RINGCOMM_DEFINE_ERROR

}  // namespace ringcomm::emulator
