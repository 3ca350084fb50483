#pragma once

#include "cuda/driver/driver_api.h"

namespace ringcomm::emulator {

using cuda::Result;

/// X(constant, number, CUDA's name). Success and not ready are in driver_api.h.
#define RINGCOMM_EMULATED_ERRORS(X)                                     \
  X(kInvalidValue, 1, CUDA_ERROR_INVALID_VALUE)                         \
  X(kErrorOutOfMemory, 2, CUDA_ERROR_OUT_OF_MEMORY)                     \
  X(kNotInitialized, 3, CUDA_ERROR_NOT_INITIALIZED)                     \
  X(kNoDevice, 100, CUDA_ERROR_NO_DEVICE)                               \
  X(kInvalidDevice, 101, CUDA_ERROR_INVALID_DEVICE)                     \
  X(kInvalidImage, 200, CUDA_ERROR_INVALID_IMAGE)                       \
  X(kInvalidContext, 201, CUDA_ERROR_INVALID_CONTEXT)                   \
  X(kMapFailed, 205, CUDA_ERROR_MAP_FAILED)                             \
  X(kAlreadyMapped, 208, CUDA_ERROR_ALREADY_MAPPED)                     \
  X(kPeerAccessUnsupported, 217, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)    \
  X(kOperatingSystem, 304, CUDA_ERROR_OPERATING_SYSTEM)                 \
  X(kInvalidHandle, 400, CUDA_ERROR_INVALID_HANDLE)                     \
  X(kNotFound, 500, CUDA_ERROR_NOT_FOUND)                               \
  X(kNotSupported, 801, CUDA_ERROR_NOT_SUPPORTED)                       \
  X(kCaptureUnsupported, 900, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)    \
  X(kCaptureWasInvalidated, 901, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) \
  X(kCaptureMerge, 902, CUDA_ERROR_STREAM_CAPTURE_MERGE)                \
  X(kCaptureUnmatched, 903, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)        \
  X(kCaptureUnjoined, 904, CUDA_ERROR_STREAM_CAPTURE_UNJOINED)          \
  X(kCaptureIsolation, 905, CUDA_ERROR_STREAM_CAPTURE_ISOLATION)        \
  X(kCaptureImplicit, 906, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)          \
  X(kCapturedEvent, 907, CUDA_ERROR_CAPTURED_EVENT)                     \
  X(kCaptureWrongThread, 908, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)

#define RINGCOMM_DEFINE_ERROR(constant, number, name) inline constexpr Result constant = number;
RINGCOMM_EMULATED_ERRORS(RINGCOMM_DEFINE_ERROR)
#undef RINGCOMM_DEFINE_ERROR

}  // namespace ringcomm::emulator
