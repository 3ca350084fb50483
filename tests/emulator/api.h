#pragma once

#include "cuda/driver/driver_api.h"

// What the emulator has of CUDA's driver besides driver_api.h: errors, and functions that ringcomm
// does not call, for the emulator's torch device and for tests.

namespace ringcomm::emulator {

using namespace cuda;

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
  X(kCaptureUnjoined, 904, CUDA_ERROR_STREAM_CAPTURE_UNJOINED)          \
  X(kCaptureIsolation, 905, CUDA_ERROR_STREAM_CAPTURE_ISOLATION)        \
  X(kCaptureImplicit, 906, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)          \
  X(kCapturedEvent, 907, CUDA_ERROR_CAPTURED_EVENT)

#define RINGCOMM_DEFINE_ERROR(constant, number, name) inline constexpr Result constant = number;
RINGCOMM_EMULATED_ERRORS(RINGCOMM_DEFINE_ERROR)
#undef RINGCOMM_DEFINE_ERROR

using Graph = struct GraphTag*;
using GraphExec = Graph;

/// In addition to those that ringcomm uses.
inline constexpr int kCaptureInvalidated = 2;
inline constexpr int kCaptureGlobal = 0;

/// X(member, symbol, parameters), as RINGCOMM_DRIVER_FUNCTIONS.
#define RINGCOMM_EXTRA_DRIVER_FUNCTIONS(X)                                            \
  X(device_get_count, "cuDeviceGetCount", (int* count))                               \
  X(launch_host_func, "cuLaunchHostFunc",                                             \
    (StreamHandle stream, void (*function)(void*), void* data))                       \
  X(stream_begin_capture, "cuStreamBeginCapture_v2", (StreamHandle stream, int mode)) \
  X(stream_end_capture, "cuStreamEndCapture", (StreamHandle stream, Graph * graph))   \
  X(graph_instantiate, "cuGraphInstantiateWithFlags",                                 \
    (GraphExec * exec, Graph graph, unsigned long long flags))                        \
  X(graph_launch, "cuGraphLaunch", (GraphExec exec, StreamHandle stream))             \
  X(graph_exec_destroy, "cuGraphExecDestroy", (GraphExec exec))                       \
  X(graph_destroy, "cuGraphDestroy", (Graph graph))

#define RINGCOMM_EMULATED_FUNCTIONS(X) \
  RINGCOMM_DRIVER_FUNCTIONS(X) RINGCOMM_EXTRA_DRIVER_FUNCTIONS(X)

/// The library's functions. A definition with other parameters does not compile, and one that is
/// missing does not link. device.cc gives them CUDA's names, under which calls are counted.
namespace api {
#define RINGCOMM_DECLARE(member, symbol, parameters) Result member parameters;
RINGCOMM_EMULATED_FUNCTIONS(RINGCOMM_DECLARE)
#undef RINGCOMM_DECLARE
}  // namespace api

/// Those that driver() lacks, for programs that link the library.
namespace extra {
#define RINGCOMM_DECLARE(member, symbol, parameters) Result member parameters __asm__(symbol);
RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_DECLARE)
#undef RINGCOMM_DECLARE
}  // namespace extra

/// Leaves the function with the Result of `expression` unless that is success.
#define RINGCOMM_TRY(expression)                                                                  \
  do {                                                                                            \
    if (const ::ringcomm::cuda::Result tried = (expression); tried != ::ringcomm::cuda::kSuccess) \
      return tried;                                                                               \
  } while (false)
/// Declares what `call` fills in.
#define RINGCOMM_GET(Type, name, call) \
  Type name = nullptr;                 \
  RINGCOMM_TRY(call)

}  // namespace ringcomm::emulator
