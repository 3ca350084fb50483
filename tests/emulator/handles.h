#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ringcomm::emulator {

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
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
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
