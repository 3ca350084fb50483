#include "emulator/testing.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace ringcomm::emulator::testing {

const ExtraDriverApi& extra() {
  static const ExtraDriverApi api = [] {
    driver();
    void* library = dlopen(std::getenv("RINGCOMM_CUDA_DRIVER"), RTLD_NOW | RTLD_NOLOAD);
    ExtraDriverApi found;
#define RINGCOMM_FIND(member, symbol, parameters) \
  found.member = reinterpret_cast<decltype(found.member)>(dlsym(library, symbol));
    RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_FIND)
#undef RINGCOMM_FIND
    return found;
  }();
  return api;
}

Context use_device(DeviceOrdinal device) {
  Context context = nullptr;
  check(driver().device_primary_ctx_retain(&context, device), "retain a context");
  check(driver().ctx_set_current(context), "make it current");
  toy("toy_add");  // a capture would forbid to load the module
  return context;
}

Function toy(const char* name) {
  static std::mutex mutex;
  static std::map<Context, Module> modules;
  const std::lock_guard lock(mutex);
  Context context = nullptr;
  check(driver().ctx_get_current(&context), "ask for the context");
  Module& module = modules[context];
  if (module == nullptr)
    check(driver().module_load_data(&module, "RINGCOMM-EMULATED"), "load the module");
  Function function = nullptr;
  check(driver().module_get_function(&function, module, name), "find the kernel");
  return function;
}

std::int32_t* zeros(std::size_t num_elems) {
  DevicePtr address = 0;
  check(driver().mem_alloc(&address, num_elems * sizeof(std::int32_t)), "allocate");
  return elems_at(address);
}

std::uint32_t* flag() {
  void* address = nullptr;
  check(driver().mem_host_alloc(&address, sizeof(std::uint32_t), kHostDeviceMap), "allocate");
  return static_cast<std::uint32_t*>(address);
}

void set(std::uint32_t* flag, std::uint32_t value) { std::atomic_ref(*flag).store(value); }

std::uint32_t get(const std::uint32_t* flag) {
  return std::atomic_ref(const_cast<std::uint32_t&>(*flag)).load();
}

std::vector<std::int32_t> values(const std::int32_t* from, std::size_t num_elems) {
  std::vector<std::int32_t> to(num_elems);
  const StreamHandle stream = new_stream();
  check(driver().memcpy_async(address_of(to.data()), address_of(from),
                              num_elems * sizeof(std::int32_t), stream),
        "copy");
  check(driver().stream_synchronize(stream), "wait");
  check(driver().stream_destroy(stream), "destroy a stream");
  return to;
}

StreamHandle new_stream() {
  StreamHandle stream = nullptr;
  check(driver().stream_create(&stream, kStreamNonBlocking), "create a stream");
  return stream;
}

EventHandle new_event(unsigned flags) {
  EventHandle event = nullptr;
  check(driver().event_create(&event, flags), "create an event");
  return event;
}

MemAllocationProp shareable_on(DeviceOrdinal device) {
  MemAllocationProp prop = {};
  prop.type = kAllocationPinned;
  prop.requested_handle_types = kHandlePosixFd;
  prop.location = {kLocationDevice, device};
  return prop;
}

}  // namespace ringcomm::emulator::testing
