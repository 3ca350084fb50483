#include "emulator/torch/streams.h"

#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "emulator/extra_api.h"
#include "emulator/kernel_registry.h"

namespace ringcomm::emulator {
namespace {

using cuda::check;
using cuda::ContextGuard;
using cuda::driver;

constexpr int kMaxDevices = 16;
constexpr int kPoolSize = 32;  // as torch's

// Stream 0 of a device is the null stream, the last one reclaim_stream().
struct Pool {
  std::mutex mutex;
  std::array<cuda::StreamHandle, kPoolSize + 2> handles = {};
  std::atomic<int> num_taken = 0;
};

// Never destroyed, because threads of streams use it until the process ends.
Pool& pool_of(c10::DeviceIndex device) {
  static auto& pools = *new std::array<Pool, kMaxDevices>();
  return pools.at(static_cast<std::size_t>(device));
}

thread_local c10::DeviceIndex this_threads_device = 0;
thread_local bool has_context = false;
thread_local std::array<c10::StreamId, kMaxDevices> this_threads_streams = {};

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kEmulatedGpu, device), id);
}

c10::Stream made_stream(c10::DeviceIndex device, int idx) {
  Pool& pool = pool_of(device);
  const std::lock_guard lock(pool.mutex);
  cuda::StreamHandle& handle = pool.handles.at(static_cast<std::size_t>(idx));
  if (handle == nullptr) {
    const ContextGuard context(device);
    check(driver().stream_create(&handle, cuda::kStreamNonBlocking), "make a stream");
  }
  return stream_of(device, idx);
}

/// An error on a stream, for the next caller that waits for a stream.
class StreamError {
 public:
  static StreamError& of_process() {
    static auto& one = *new StreamError();
    return one;
  }
  void set(const char* what) {
    const std::lock_guard lock(mutex_);
    if (what_.empty()) what_ = what;
  }
  void check() {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(what_.empty(), "on a stream of an emulated GPU: ", std::exchange(what_, {}));
  }

 private:
  std::mutex mutex_;
  std::string what_;
};

using HostFunction = std::function<void()>;

void call_host_function(void* function) {
  try {
    (*static_cast<HostFunction*>(function))();
  } catch (const std::exception& error) {
    StreamError::of_process().set(error.what());
  }
}

void call_host_function_once(void* function) {
  call_host_function(function);
  delete static_cast<HostFunction*>(function);
}

/// Shared memory of a multiprocessor.
constexpr unsigned kWholeSharedBytes = 227 << 10;

cuda::Function function_kernel(c10::DeviceIndex device) {
  static auto& mutex = *new std::mutex();
  static auto& functions = *new std::array<cuda::Function, kMaxDevices>();
  const std::lock_guard lock(mutex);
  cuda::Function& function = functions.at(static_cast<std::size_t>(device));
  if (function != nullptr) return function;
  const cuda::RelaxedCapture relaxed;  // the first operator may be one that is captured
  cuda::Module module = nullptr;
  check(driver().module_load_data(&module, "RINGCOMM-EMULATED"), "load a module");
  check(driver().module_get_function(&function, module, FunctionCall::kName), "find a kernel");
  return function;
}

/// `give` hands the driver a function, and what to call it with.
template <class Give>
void launch(c10::Stream stream, HostFunction function, const Give& give) {
  // A graph may call it at any time.
  const auto call = is_capturing(stream) ? call_host_function : call_host_function_once;
  const ContextGuard context(stream.device_index());
  auto launched = std::make_unique<HostFunction>(std::move(function));
  give(call, launched.get());
  launched.release();
}

}  // namespace

c10::DeviceIndex num_devices() noexcept {
  static const int num_found = [] {
    int count = 0;
    const bool is_known = cuda::has_driver() && extra::device_get_count(&count) == cuda::kSuccess;
    return is_known ? std::min(count, kMaxDevices) : 0;
  }();
  return static_cast<c10::DeviceIndex>(num_found);
}

c10::DeviceIndex current_device() { return this_threads_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(device < num_devices(), "no device emugpu:", static_cast<int>(device), "; ",
              static_cast<int>(num_devices()), " are emulated");
  if (device < 0) return this_threads_device;
  if (device != this_threads_device || !std::exchange(has_context, true)) {
    // As with CUDA's runtime, a thread that uses a device keeps its context current.
    cuda::Context context = nullptr;
    check(driver().device_primary_ctx_retain(&context, device), "use a context");
    check(driver().ctx_set_current(context), "make a context current");
  }
  return std::exchange(this_threads_device, device);
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

c10::Stream default_stream(c10::DeviceIndex device) { return stream_of(device, 0); }

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, this_threads_streams.at(static_cast<std::size_t>(device)));
}

c10::Stream stream_from_pool(c10::DeviceIndex device) {
  return made_stream(device, 1 + pool_of(device).num_taken++ % kPoolSize);
}

c10::Stream reclaim_stream(c10::DeviceIndex device) { return made_stream(device, kPoolSize + 1); }

c10::Stream exchange_stream(c10::Stream stream) {
  auto& current = this_threads_streams.at(static_cast<std::size_t>(stream.device_index()));
  return stream_of(stream.device_index(), std::exchange(current, stream.id()));
}

cuda::StreamHandle handle_of(c10::Stream stream) {
  Pool& pool = pool_of(stream.device_index());
  const std::lock_guard lock(pool.mutex);
  return pool.handles.at(static_cast<std::size_t>(stream.id()));
}

bool is_idle(c10::Stream stream) {
  const ContextGuard context(stream.device_index());
  const cuda::Result result = extra::stream_query(handle_of(stream));
  if (result != cuda::kErrorNotReady) check(result, "ask whether a stream is done");
  return result == cuda::kSuccess;
}

bool is_capturing(c10::Stream stream) {
  const ContextGuard context(stream.device_index());
  int status = cuda::kCaptureNone;
  check(driver().stream_get_capture_info(handle_of(stream), &status, nullptr, nullptr, nullptr,
                                         nullptr),
        "ask whether a stream captures");
  return status != cuda::kCaptureNone;
}

void synchronize(c10::Stream stream) {
  const ContextGuard context(stream.device_index());
  check(driver().stream_synchronize(handle_of(stream)), "wait for a stream");
  StreamError::of_process().check();
}

void synchronize_device(c10::DeviceIndex device) {
  const ContextGuard context(device);
  check(extra::ctx_synchronize(), "wait for an emulated GPU");
  StreamError::of_process().check();
}

void wait_for_stream(c10::Stream waiting, c10::Stream stream) {
  c10::Event reached(kEmulatedGpu);
  reached.record(stream);
  reached.block(waiting);
}

void launch_host_function(c10::Stream stream, HostFunction function) {
  launch(stream, std::move(function), [&](void (*call)(void*), void* data) {
    check(extra::launch_host_func(handle_of(stream), call, data), "launch a host function");
  });
}

void launch_operator(c10::Stream stream, HostFunction function) {
  launch(stream, std::move(function), [&](void (*call)(void*), void* data) {
    FunctionCall parameter{call, data};
    void* parameters[] = {&parameter};
    check(driver().launch_kernel(function_kernel(stream.device_index()), 1, 1, 1, 1, 1, 1,
                                 kWholeSharedBytes, handle_of(stream), parameters, nullptr),
          "launch an operator");
  });
}

}  // namespace ringcomm::emulator
