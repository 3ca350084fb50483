#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/api.h"
#include "host/fd.h"

/// A device's primary context: the only one it has.
struct ringcomm::cuda::ContextTag {
  DeviceOrdinal device = 0;
  std::atomic<long long> used_bytes = 0;
  std::mutex mutex;  ///< of null_stream
  StreamHandle null_stream = nullptr;
  std::mutex turn_mutex;
  std::weak_ptr<host::UniqueFd> turn;  ///< of this process's kernels, where there is no MPS
};

namespace ringcomm::emulator {

/// kNotInitialized before cuInit.
Result require_initialized();
/// And that there is a device of this number; gives its context.
Result require_device(DeviceOrdinal device, Context* context = nullptr);
/// And that this thread has a current context.
Result require_context(Context* current = nullptr);

/// The objects of one kind that the program has handles of. A removed object lives while submitted
/// work needs it; an invalid handle finds nothing.
template <class T>
class Handles {
 public:
  /// The handles of the process. Never destroyed, because threads run until the process ends.
  static Handles& all() {
    static Handles& handles = *new Handles();
    return handles;
  }

  T* add(std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    T* handle = object.get();
    objects_.emplace(handle, std::move(object));
    return handle;
  }
  std::shared_ptr<T> find(T* handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    return found != objects_.end() ? found->second : nullptr;
  }
  std::shared_ptr<T> remove(T* handle) {
    const std::lock_guard lock(mutex_);
    auto removed = objects_.extract(handle);
    return removed ? std::move(removed.mapped()) : nullptr;
  }
  std::vector<std::shared_ptr<T>> list() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<T>> listed;
    for (const auto& [handle, object] : objects_) listed.push_back(object);
    return listed;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<T*, std::shared_ptr<T>> objects_;
};

}  // namespace ringcomm::emulator
