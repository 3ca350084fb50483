#pragma once

#include "cuda/driver/driver_api.h"

// Driver functions that ringcomm does not call, for the emulator's torch device and its own tests.

namespace ringcomm::emulator {

using cuda::EventHandle;
using cuda::Result;
using cuda::StreamHandle;
using Graph = struct GraphTag*;
using GraphExec = struct GraphExecTag*;

struct IpcEventHandle {
  char reserved[64];
};

/// In addition to those that ringcomm uses.
inline constexpr unsigned kEventInterprocess = 4;
inline constexpr int kCaptureInvalidated = 2;
inline constexpr int kCaptureGlobal = 0;
inline constexpr int kCaptureThreadLocal = 1;

/// X(member, symbol, parameters), as RINGCOMM_DRIVER_FUNCTIONS.
#define RINGCOMM_EXTRA_DRIVER_FUNCTIONS(X)                                                       \
  X(device_get_count, "cuDeviceGetCount", (int* count))                                          \
  X(mem_get_info, "cuMemGetInfo_v2", (std::size_t* num_free, std::size_t* num_total))            \
  X(stream_query, "cuStreamQuery", (StreamHandle stream))                                        \
  X(ctx_synchronize, "cuCtxSynchronize", ())                                                     \
  X(ipc_get_event_handle, "cuIpcGetEventHandle", (IpcEventHandle * handle, EventHandle event))   \
  X(ipc_open_event_handle, "cuIpcOpenEventHandle", (EventHandle * event, IpcEventHandle handle)) \
  X(launch_host_func, "cuLaunchHostFunc",                                                        \
    (StreamHandle stream, void (*function)(void*), void* data))                                  \
  X(stream_begin_capture, "cuStreamBeginCapture_v2", (StreamHandle stream, int mode))            \
  X(stream_end_capture, "cuStreamEndCapture", (StreamHandle stream, Graph * graph))              \
  X(graph_instantiate, "cuGraphInstantiateWithFlags",                                            \
    (GraphExec * exec, Graph graph, unsigned long long flags))                                   \
  X(graph_launch, "cuGraphLaunch", (GraphExec exec, StreamHandle stream))                        \
  X(graph_exec_destroy, "cuGraphExecDestroy", (GraphExec exec))                                  \
  X(graph_destroy, "cuGraphDestroy", (Graph graph))

/// The library's functions, for programs that link it.
namespace extra {
#define RINGCOMM_DECLARE(member, symbol, parameters) Result member parameters __asm__(symbol);
RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_DECLARE)
#undef RINGCOMM_DECLARE
}  // namespace extra

}  // namespace ringcomm::emulator
