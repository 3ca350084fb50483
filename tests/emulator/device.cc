#include "emulator/device.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <deque>
#include <string>

#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

std::atomic<bool> is_initialized = false;
thread_local Context current = nullptr;

std::deque<ContextTag>& contexts() {
  static std::deque<ContextTag>& made = *[] {
    auto* list = new std::deque<ContextTag>(settings().devices.size());
    for (std::size_t i = 0; i < list->size(); ++i)
      (*list)[i].device = static_cast<DeviceOrdinal>(i);
    return list;
  }();
  return made;
}

bool is_context(Context context) {
  return std::ranges::any_of(contexts(), [&](ContextTag& one) {
    const std::lock_guard lock(one.mutex);
    return &one == context && one.is_retained;
  });
}

int attribute_value(int attribute, bool* is_known) {
  *is_known = true;
  switch (attribute) {
    case kMultiprocessorCount:
      return settings().num_sms;
    case kVirtualMemoryManagementSupported:
    case kHandleTypePosixFdSupported:
      return settings().has_vmm;
    case kMpsEnabled:
      return settings().has_mps;
    default:
      *is_known = false;
      return 0;
  }
}

}  // namespace

Result require_initialized() {
  // Every function calls this, some more than once.
  static std::atomic<long long> num_calls = 0;
  if (is_initialized && ++num_calls == settings().dies_at) raise(SIGKILL);
  return is_initialized ? kSuccess : kNotInitialized;
}

Result require_device(DeviceOrdinal device) {
  RINGCOMM_TRY(require_initialized());
  const bool exists = device >= 0 && device < static_cast<int>(settings().devices.size());
  return exists ? kSuccess : kInvalidDevice;
}

Result require_context(Context* context) {
  RINGCOMM_TRY(require_initialized());
  if (context != nullptr) *context = current;
  return current != nullptr ? kSuccess : kInvalidContext;
}

int physical_device(DeviceOrdinal device) {
  return settings().devices[static_cast<std::size_t>(device)];
}

bool can_map(DeviceOrdinal device, int physical) {
  return physical_device(device) == physical || settings().has_peer_access;
}

Context context_of(DeviceOrdinal device) { return &contexts()[static_cast<std::size_t>(device)]; }

Result api::init(unsigned flags) {
  if (flags != 0) return kInvalidValue;
  if (settings().devices.empty()) return kNoDevice;
  // A forked child has none of its parent's threads; as under CUDA it can only start anew by exec.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { is_initialized = false; });
  static const pid_t initialized_by = getpid();
  if (registered != 0 || getpid() != initialized_by) return kNotInitialized;
  is_initialized = true;
  return kSuccess;
}

Result api::device_get_count(int* count) {
  RINGCOMM_TRY(require_initialized());
  if (count == nullptr) return kInvalidValue;
  *count = static_cast<int>(settings().devices.size());
  return kSuccess;
}

Result api::device_get_uuid(DeviceUuid* uuid, DeviceOrdinal device) {
  RINGCOMM_TRY(require_device(device));
  if (uuid == nullptr) return kInvalidValue;
  *uuid = {{'e', 'm', 'u', 'l', 'a', 't', 'e', 'd'}};
  const std::uint32_t box = settings().box;
  std::memcpy(uuid->bytes + 8, &box, sizeof(box));
  const int physical = physical_device(device);
  std::memcpy(uuid->bytes + 12, &physical, sizeof(physical));
  return kSuccess;
}

Result api::device_get_attribute(int* value, int attribute, DeviceOrdinal device) {
  RINGCOMM_TRY(require_device(device));
  if (value == nullptr) return kInvalidValue;
  bool is_known = false;
  const int found = attribute_value(attribute, &is_known);
  if (!is_known) return kInvalidValue;
  *value = found;
  return kSuccess;
}

Result api::device_primary_ctx_retain(Context* context, DeviceOrdinal device) {
  RINGCOMM_TRY(require_device(device));
  if (context == nullptr) return kInvalidValue;
  *context = context_of(device);
  const std::lock_guard lock((*context)->mutex);
  (*context)->is_retained = true;
  return kSuccess;
}

Result api::ctx_get_current(Context* context) {
  RINGCOMM_TRY(require_initialized());
  if (context == nullptr) return kInvalidValue;
  *context = current;
  return kSuccess;
}

Result api::ctx_set_current(Context context) {
  RINGCOMM_TRY(require_initialized());
  if (context != nullptr && !is_context(context)) return kInvalidContext;
  current = context;
  return kSuccess;
}

}  // namespace ringcomm::emulator
