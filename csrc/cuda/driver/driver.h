#pragma once

#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/errors.h"
#include "cuda/driver/driver_api.h"

/// RINGCOMM_EMBED puts what nvcc made of NAME.cu into the source file, outside of namespaces;
/// RINGCOMM_IMAGE is its address, or null in a build without nvcc. The build defines the folder.
#ifdef RINGCOMM_CUDA_IMAGES
#define RINGCOMM_EMBED(name)                                                          \
  __asm__(".pushsection .rodata\n.balign 16\nringcomm_image_" #name                   \
          ":\n.incbin \"" RINGCOMM_CUDA_IMAGES "/" #name ".fatbin\"\n.popsection\n"); \
  extern "C" const char ringcomm_image_##name[];
#define RINGCOMM_IMAGE(name) ringcomm_image_##name
#else
#define RINGCOMM_EMBED(name)
#define RINGCOMM_IMAGE(name) nullptr
#endif

namespace ringcomm::cuda {

/// The driver of this machine's GPUs: libcuda, or what RINGCOMM_CUDA_DRIVER names, opened at the
/// first call. Throws Error (kSystem) with the reason if there is none or it is too old.
const DriverApi& driver();

/// Whether driver() would return.
bool has_driver();

/// Throws Error (kSystem) with CUDA's words unless `result` is success; `what` could not be done.
void check(Result result, const char* what);

/// Makes a device's primary context, which torch also uses, current while it lives: one driver call
/// if it is current already.
class ContextGuard {
 public:
  explicit ContextGuard(DeviceOrdinal device);
  ~ContextGuard();
  ContextGuard& operator=(ContextGuard&&) = delete;

 private:
  Context previous_ = nullptr;
  bool is_changed_ = false;
};

/// While it lives, this thread may make calls that could wait for the device, such as allocations,
/// although another stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  RelaxedCapture& operator=(RelaxedCapture&&) = delete;

 private:
  int mode_ = kCaptureRelaxed;
};

/// Calls `body` with a device's context, in a relaxed capture mode. What throws Error is left out:
/// the process is ending and the driver was unloaded before, or else the next call throws it.
template <class Body>
void try_in_context(DeviceOrdinal device, const Body& body) noexcept {
  try {
    const ContextGuard guard(device);
    const RelaxedCapture relaxed;
    body();
  } catch (const Error&) {
  }
}

/// A base of T, of which there is one object for each device.
template <class T>
class PerDevice {
 public:
  /// Made by the first call, T(device); if that throws, the next call tries again. Never destroyed:
  /// threads may use it until the process ends.
  static T& of(DeviceOrdinal device) {
    static auto& mutex = *new std::mutex;
    static auto& all = *new std::map<DeviceOrdinal, std::unique_ptr<T>>;
    const std::lock_guard lock(mutex);
    std::unique_ptr<T>& found = all[device];
    if (found == nullptr) found.reset(new T(device));
    return *found;
  }
};

/// Loads these images, but for null, or the file that RINGCOMM_CUDA_IMAGE names instead of them,
/// onto the device whose context is current, for as long as the process lives. This and
/// find_kernel() may wait for the device, so call neither between calls. Throws Error where an
/// image cannot be read or loaded.
std::vector<Module> load_kernels(std::initializer_list<const void*> built_in);
/// Null where no module has a kernel of this name.
Function find_kernel(const std::vector<Module>& modules, const char* name);

}  // namespace ringcomm::cuda
