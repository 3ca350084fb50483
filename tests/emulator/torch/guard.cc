// Tells torch of the device: devices, streams and events by c10's interface that is independent of
// the device, and what ATen asks of an accelerator.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <algorithm>

#include "emulator/torch/memory.h"
#include "emulator/torch/streams.h"

namespace ringcomm::emulator {
namespace {

using cuda::check;
using cuda::ContextGuard;
using cuda::driver;

cuda::EventHandle event_of(void* event) { return static_cast<cuda::EventHandle>(event); }

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
    synchronize_device(device);
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_from_pool(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_from_pool(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
#if TORCH_VERSION_MINOR >= 13
  bool isStreamCapturing(const c10::Stream& stream) const override { return is_capturing(stream); }
#endif

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(),
        "an event of emugpu:", static_cast<int>(device),
        " cannot be recorded on a stream of emugpu:", static_cast<int>(stream.device_index()));
    const ContextGuard context(stream.device_index());
    auto handle = event_of(*event);
    if (handle == nullptr) {
      const unsigned flags =
          flag == c10::EventFlag::BACKEND_DEFAULT ? 0U : unsigned{cuda::kEventDisableTiming};
      check(driver().event_create(&handle, flags), "make an event");
      *event = handle;
    }
    check(driver().event_record(handle, handle_of(stream)), "record an event");
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const ContextGuard context(stream.device_index());
    check(driver().stream_wait_event(handle_of(stream), event_of(event), 0), "let a stream wait");
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const cuda::Result result = driver().event_query(event_of(event));
    if (result != cuda::kErrorNotReady) check(result, "ask whether an event has happened");
    return result == cuda::kSuccess;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) check(driver().event_synchronize(event_of(event)), "wait for an event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) driver().event_destroy(event_of(event));
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, EmulatedGpuGuard)

struct EmulatedGpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t num_bytes) const override {
    const c10::DeviceIndex device = storage.device().index();
    const c10::DeviceIndex previous = exchange_device(device);
    c10::DataPtr memory = allocator().allocate(num_bytes);
    exchange_device(previous);
    copy_bytes(memory.mutable_get(), storage.data(), std::min(num_bytes, storage.nbytes()),
               current_stream(device));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};

const bool is_registered = [] {
  c10::SetAllocator(kEmulatedGpu, &allocator());
  at::RegisterPrivateUse1HooksInterface(new EmulatedGpuHooks());  // torch keeps it for good
  return true;
}();

}  // namespace
}  // namespace ringcomm::emulator
