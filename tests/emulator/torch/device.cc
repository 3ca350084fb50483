// Devices, streams and events.
#include "emulator/torch/device.h"

#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "emulator/api.h"
#include "emulator/kernel_registry.h"

namespace ringcomm::emulator {
namespace {

constexpr int kMaxDevices = 16;
constexpr int kPoolSize = 32;  // as torch's

struct Device {
  std::mutex mutex;
  // Stream 0 is the null stream.
  std::array<cuda::StreamHandle, kPoolSize + 1> streams = {};
  cuda::Function operators = nullptr;  // a kernel that calls a function of the host
  std::atomic<int> num_taken = 0;
};

// Never destroyed, because threads of streams use it until the process ends.
Device& device_of(c10::DeviceIndex index) {
  static auto& devices = *new std::array<Device, kMaxDevices>();
  return devices.at(static_cast<std::size_t>(index));
}

thread_local c10::DeviceIndex this_threads_device = 0;
thread_local bool has_context = false;
thread_local std::array<c10::StreamId, kMaxDevices> this_threads_streams = {};

c10::StreamId& current_id(c10::DeviceIndex device) {
  return this_threads_streams.at(static_cast<std::size_t>(device));
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kEmulatedGpu, device), id);
}

c10::Stream made_stream(c10::DeviceIndex index, int id) {
  Device& device = device_of(index);
  const std::lock_guard lock(device.mutex);
  cuda::StreamHandle& handle = device.streams.at(static_cast<std::size_t>(id));
  if (handle == nullptr) {
    const ContextGuard context(index);
    check(driver().stream_create(&handle, cuda::kStreamNonBlocking), "make a stream");
  }
  return stream_of(index, id);
}

/// Whether a query has the answer yes; `what` is what it asks.
bool is_over(cuda::Result result, const char* what) {
  if (result != cuda::kErrorNotReady) check(result, what);
  return result == cuda::kSuccess;
}

using HostFunction = std::function<void()>;

/// An exception ends the process, with its text.
void call_host_function(void* function) noexcept { (*static_cast<HostFunction*>(function))(); }

void call_host_function_once(void* function) noexcept {
  call_host_function(function);
  delete static_cast<HostFunction*>(function);
}

/// Shared memory of a multiprocessor.
constexpr unsigned kWholeSharedBytes = 227 << 10;

cuda::Function operators_of(c10::DeviceIndex index) {
  Device& device = device_of(index);
  const std::lock_guard lock(device.mutex);
  if (device.operators != nullptr) return device.operators;
  const cuda::RelaxedCapture relaxed;  // the first operator may be one that is captured
  cuda::Module module = nullptr;
  check(driver().module_load_data(&module, "RINGCOMM-EMULATED"), "load a module");
  check(driver().module_get_function(&device.operators, module, FunctionCall::kName),
        "find a kernel");
  return device.operators;
}

}  // namespace

c10::DeviceIndex num_devices() noexcept {
  static const int num_found = [] {
    int num = 0;
    if (cuda::has_driver()) extra::device_get_count(&num);
    return std::min(num, kMaxDevices);
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

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, current_id(device));
}

c10::Stream stream_from_pool(c10::DeviceIndex device) {
  return made_stream(device, 1 + device_of(device).num_taken++ % kPoolSize);
}

cuda::StreamHandle handle_of(c10::Stream stream) {
  Device& device = device_of(stream.device_index());
  const std::lock_guard lock(device.mutex);
  return device.streams.at(static_cast<std::size_t>(stream.id()));
}

bool is_idle(c10::Stream stream) {
  const ContextGuard context(stream.device_index());
  return is_over(driver().stream_query(handle_of(stream)), "ask whether a stream is done");
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
}

void wait_for_stream(c10::Stream waiting, c10::Stream stream) {
  c10::Event reached(kEmulatedGpu);
  reached.record(stream);
  reached.block(waiting);
}

void launch(c10::Stream stream, HostFunction function, bool is_operator) {
  const bool is_captured = is_capturing(stream);  // a graph may call it at any time
  const ContextGuard context(stream.device_index());
  auto launched = std::make_unique<HostFunction>(std::move(function));
  FunctionCall call{is_captured ? call_host_function : call_host_function_once, launched.get()};
  void* parameters[] = {&call};
  check(is_operator
            ? driver().launch_kernel(operators_of(stream.device_index()), 1, 1, 1, 1, 1, 1,
                                     kWholeSharedBytes, handle_of(stream), parameters, nullptr)
            : extra::launch_host_func(handle_of(stream), call.function, call.data),
        "launch a function of the host");
  launched.release();
}

// ---- c10's interface to a device

namespace {

/// A device without an index is the current one.
c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

cuda::EventHandle event_of(void* event) { return static_cast<cuda::EventHandle>(event); }

/// When timed events were reached.
class EventTimes {
 public:
  using Clock = std::chrono::steady_clock;

  /// Before the event is recorded on the stream.
  void stamp(void* event, const c10::Stream& stream) {
    auto time = std::make_shared<Clock::time_point>();
    {
      const std::lock_guard lock(mutex_);
      times_[event] = time;
    }
    launch(stream, [time] { *time = Clock::now(); });
  }
  Clock::time_point of(void* event) {
    const std::lock_guard lock(mutex_);
    return *times_.at(event);
  }
  void forget(void* event) {
    const std::lock_guard lock(mutex_);
    times_.erase(event);
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Clock::time_point>> times_;
};

struct EmulatedGpuGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kEmulatedGpu; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return {kEmulatedGpu, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kEmulatedGpu, current_device()}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < num_devices()) exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const ContextGuard context(device);
    check(driver().ctx_synchronize(), "wait for an emulated GPU");
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_from_pool(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_from_pool(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::DeviceIndex device = stream.device_index();
    return stream_of(device, std::exchange(current_id(device), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
#if TORCH_VERSION_MINOR >= 13
  bool isStreamCapturing(const c10::Stream& stream) const override { return is_capturing(stream); }
#endif

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    const ContextGuard context(stream.device_index());
    auto handle = event_of(*event);
    if (handle == nullptr) {
      const unsigned flags =
          flag == c10::EventFlag::BACKEND_DEFAULT ? 0U : unsigned{cuda::kEventDisableTiming};
      check(driver().event_create(&handle, flags), "make an event");
      *event = handle;
    }
    if (flag == c10::EventFlag::BACKEND_DEFAULT) times_.stamp(handle, stream);
    check(driver().event_record(handle, handle_of(stream)), "record an event");
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(times_.of(end) - times_.of(begin)).count();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const ContextGuard context(stream.device_index());
    check(driver().stream_wait_event(handle_of(stream), event_of(event), 0), "let a stream wait");
  }
  bool queryEvent(void* event) const override {
    return event == nullptr ||
           is_over(driver().event_query(event_of(event)), "ask whether an event has happened");
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) check(driver().event_synchronize(event_of(event)), "wait for an event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr) return;
    times_.forget(event);
    driver().event_destroy(event_of(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream);
  }

 private:
  mutable EventTimes times_;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, EmulatedGpuGuard)

}  // namespace
}  // namespace ringcomm::emulator
