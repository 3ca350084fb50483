#include "bindings/callback_thread.h"

#include <unistd.h>

#include <utility>

#include "transport/background_thread.h"

namespace ringcomm {

CallbackThread& CallbackThread::instance() {
  static std::mutex mutex;
  static CallbackThread* current = nullptr;
  const std::lock_guard lock(mutex);
  // Threads do not survive a fork: a child starts its own.
  if (current == nullptr || current->owner_ != ::getpid()) current = new CallbackThread();
  return *current;
}

CallbackThread::CallbackThread() : owner_(::getpid()) {
  start_background_thread("ringcomm-future", [this] { run(); }).detach();
}

void CallbackThread::post(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    callbacks_.push_back(std::move(callback));
  }
  has_work_.notify_one();
}

void CallbackThread::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [this] { return !callbacks_.empty(); });
    std::function<void()> callback = std::move(callbacks_.front());
    callbacks_.pop_front();
    lock.unlock();
    callback();
    callback = nullptr;  // what it holds goes without the lock
    lock.lock();
  }
}

}  // namespace ringcomm
