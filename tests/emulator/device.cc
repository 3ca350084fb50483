// The library's functions under CUDA's names, its settings, devices and contexts.
#include "emulator/device.h"

#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>

#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

template <auto kFunction>
struct Counted;
template <class... Parameters, Result (*kFunction)(Parameters...)>
struct Counted<kFunction> {
  static inline std::atomic<long long> num_calls = 0;
  static Result call(Parameters... parameters) {
    num_calls.fetch_add(1, std::memory_order_relaxed);
    return kFunction(parameters...);
  }
};

struct Exported {
  const char* symbol;
  const std::atomic<long long>& num_calls;
};
#define RINGCOMM_EXPORTED(member, symbol, parameters) {symbol, Counted<&api::member>::num_calls},
const Exported kExported[] = {RINGCOMM_EMULATED_FUNCTIONS(RINGCOMM_EXPORTED)};
#undef RINGCOMM_EXPORTED

}  // namespace

// Under CUDA's name dlsym() finds what the resolver returns.
#define RINGCOMM_EXPORT(member, symbol, parameters)            \
  extern "C" decltype(&api::member) ringcomm_find_##member() { \
    return &Counted<&api::member>::call;                       \
  }                                                            \
  Result exported_##member parameters __asm__(symbol)          \
      __attribute__((visibility("default"), ifunc("ringcomm_find_" #member)));
RINGCOMM_EMULATED_FUNCTIONS(RINGCOMM_EXPORT)
#undef RINGCOMM_EXPORT

/// The name of the function of this index, and how often this process has called it; null after the
/// last one.
extern "C" [[gnu::visibility("default")]] const char* emulator_function(int index,
                                                                        long long* num_calls) {
  if (index >= static_cast<int>(std::size(kExported))) return nullptr;
  *num_calls = kExported[index].num_calls;
  return kExported[index].symbol;
}

// ---- settings

long long setting(const char* name, long long otherwise, long long least, long long most) {
  const std::string variable = std::string("RINGCOMM_EMULATOR_") + name;
  const char* text = std::getenv(variable.c_str());
  if (text == nullptr || *text == '\0') return otherwise;
  long long value = 0;
  const char* const end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, value);
  if (error != std::errc() || rest != end || value < least || value > most) {
    std::fprintf(stderr, "libcuda_emulator: %s=%s means nothing\n", variable.c_str(), text);
    std::abort();
  }
  return value;
}

const Settings& settings() {
  static const Settings& read_once = *[] {
    auto* made = new Settings();
    if (const char* box = std::getenv("RINGCOMM_EMULATOR_BOX"); box != nullptr)
      for (const char letter : std::string_view(box))  // FNV-1a
        made->box = (made->box ^ static_cast<unsigned char>(letter)) * 0x01000193u;
    return made;
  }();
  return read_once;
}

// ---- devices and contexts

namespace {

std::atomic<bool> is_initialized = false;
thread_local Context current = nullptr;

std::deque<ContextTag>& contexts() {
  static std::deque<ContextTag>& made = *[] {
    auto* list = new std::deque<ContextTag>(static_cast<std::size_t>(settings().num_devices));
    for (std::size_t i = 0; i < list->size(); ++i) (*list)[i].device = static_cast<int>(i);
    return list;
  }();
  return made;
}

}  // namespace

Result require_initialized() {
  // Every function calls this, some more than once.
  static std::atomic<long long> num_calls = 0;
  if (is_initialized && ++num_calls == settings().dies_at) raise(SIGKILL);
  return is_initialized ? kSuccess : kNotInitialized;
}

Result require_device(DeviceOrdinal device, Context* context) {
  RINGCOMM_TRY(require_initialized());
  if (device < 0 || static_cast<std::size_t>(device) >= contexts().size()) return kInvalidDevice;
  if (context != nullptr) *context = &contexts()[static_cast<std::size_t>(device)];
  return kSuccess;
}

Result require_context(Context* context) {
  RINGCOMM_TRY(require_initialized());
  if (context != nullptr) *context = current;
  return current != nullptr ? kSuccess : kInvalidContext;
}

Result api::get_error_name(Result error, const char** name) {
  *name = nullptr;
  if (error == kSuccess) *name = "CUDA_SUCCESS";
  if (error == kErrorNotReady) *name = "CUDA_ERROR_NOT_READY";
#define RINGCOMM_NAME(constant, number, text) \
  if (error == constant) *name = #text;
  RINGCOMM_EMULATED_ERRORS(RINGCOMM_NAME)
#undef RINGCOMM_NAME
  return *name != nullptr ? kSuccess : kInvalidValue;
}

/// The error's text is its name.
Result api::get_error_string(Result error, const char** text) {
  return get_error_name(error, text);
}

Result api::init(unsigned flags) {
  if (flags != 0) return kInvalidValue;
  if (settings().num_devices == 0) return kNoDevice;
  is_initialized = true;
  return kSuccess;
}

Result api::device_get_count(int* count) {
  RINGCOMM_TRY(require_initialized());
  *count = static_cast<int>(contexts().size());
  return kSuccess;
}

Result api::device_get_uuid(DeviceUuid* uuid, DeviceOrdinal device) {
  RINGCOMM_TRY(require_device(device));
  *uuid = {{'e', 'm', 'u', 'l', 'a', 't', 'e', 'd'}};
  std::memcpy(uuid->bytes + 8, &settings().box, sizeof(settings().box));
  std::memcpy(uuid->bytes + 12, &device, sizeof(device));
  return kSuccess;
}

Result api::device_get_attribute(int* value, int attribute, DeviceOrdinal device) {
  RINGCOMM_TRY(require_device(device));
  if (attribute == kMultiprocessorCount)
    *value = settings().num_sms;
  else if (attribute == kVirtualMemoryManagementSupported ||
           attribute == kHandleTypePosixFdSupported)
    *value = settings().has_vmm;
  else if (attribute == kMulticastSupported)
    *value = settings().has_multicast;
  else if (attribute == kMpsEnabled)
    *value = settings().has_mps;
  else
    return kInvalidValue;
  return kSuccess;
}

Result api::device_primary_ctx_retain(Context* context, DeviceOrdinal device) {
  return require_device(device, context);
}

Result api::ctx_get_current(Context* context) {
  RINGCOMM_TRY(require_initialized());
  *context = current;
  return kSuccess;
}

Result api::ctx_set_current(Context context) {
  RINGCOMM_TRY(require_initialized());
  current = context;
  return kSuccess;
}

}  // namespace ringcomm::emulator
