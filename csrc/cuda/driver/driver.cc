#include "cuda/driver/driver.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

namespace ringcomm::cuda {
namespace {

struct Found {
  DriverApi api;
  std::string reason;  // why the driver is unusable; empty if it is usable
};

Found find_driver() {
  Found found;
  const char* wanted = std::getenv("RINGCOMM_CUDA_DRIVER");
  const char* name = wanted != nullptr && *wanted != '\0' ? wanted : "libcuda.so.1";
  void* library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    found.reason = std::string("this machine has no driver for NVIDIA GPUs (") + dlerror() + ")";
    return found;
  }
  const auto find = [&](auto& function, const char* symbol) {
    void* address = dlsym(library, symbol);
    if (address == nullptr && found.reason.empty())
      found.reason = std::string("the driver for NVIDIA GPUs is too old: it lacks ") + symbol;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
#define RINGCOMM_FIND(member, symbol, parameters) find(found.api.member, symbol);
  RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_FIND)
#undef RINGCOMM_FIND
  if (!found.reason.empty()) return found;
  if (const Result result = found.api.init(0); result != kSuccess) {
    const char* text = nullptr;
    found.api.get_error_string(result, &text);
    found.reason = std::string("the driver for NVIDIA GPUs does not start: ") +
                   (text != nullptr ? text : "unknown error");
  }
  return found;
}

const Found& found_driver() {
  static const Found found = find_driver();
  return found;
}

}  // namespace

const DriverApi& driver() {
  const Found& found = found_driver();
  if (!found.reason.empty()) throw Error({.kind = ErrorKind::kSystem}, "ringcomm: " + found.reason);
  return found.api;
}

bool has_driver() { return found_driver().reason.empty(); }

void check(Result result, const char* what) {
  if (result == kSuccess) return;
  const char* name = nullptr;
  const char* text = nullptr;
  driver().get_error_name(result, &name);
  driver().get_error_string(result, &text);
  throw Error({.kind = ErrorKind::kSystem},
              std::string("ringcomm: cannot ") + what + ": " +
                  (name != nullptr ? name : std::to_string(result).c_str()) +
                  (text != nullptr ? std::string(", ") + text : std::string()));
}

// Primary contexts are counted; one that is in use stays for the life of the process.
static Context primary_context(DeviceOrdinal device) {
  static std::array<std::atomic<Context>, 64> contexts = {};
  std::atomic<Context>& known = contexts.at(static_cast<std::size_t>(device));
  Context context = known.load(std::memory_order_acquire);
  if (context != nullptr) return context;
  check(driver().device_primary_ctx_retain(&context, device), "use the GPU's primary context");
  known.store(context, std::memory_order_release);  // every thread finds the same
  return context;
}

ContextGuard::ContextGuard(DeviceOrdinal device) {
  const Context context = primary_context(device);
  check(driver().ctx_get_current(&previous_), "ask for the current context");
  if (previous_ == context) return;
  check(driver().ctx_set_current(context), "make the GPU's primary context current");
  is_changed_ = true;
}

ContextGuard::~ContextGuard() {
  if (is_changed_) driver().ctx_set_current(previous_);
}

std::vector<Module> load_kernels(std::initializer_list<const void*> built_in) {
  std::vector<Module> modules;
  const auto load = [&](const void* image) {
    check(driver().module_load_data(&modules.emplace_back(), image), "load kernels onto the GPU");
  };
  const char* path = std::getenv("RINGCOMM_CUDA_IMAGE");
  if (path == nullptr || *path == '\0') {
    for (const void* image : built_in)
      if (image != nullptr) load(image);
    return modules;
  }
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> image((std::istreambuf_iterator<char>(file)), {});
  if (image.empty())
    throw Error({.kind = ErrorKind::kSystem},
                std::string("ringcomm: RINGCOMM_CUDA_IMAGE: cannot read ") + path);
  load(image.data());
  return modules;
}

Function find_kernel(const std::vector<Module>& modules, const char* name) {
  Function function = nullptr;
  for (Module module : modules)
    if (driver().module_get_function(&function, module, name) == kSuccess) return function;
  return nullptr;
}

}  // namespace ringcomm::cuda
