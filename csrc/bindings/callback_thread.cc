#include "bindings/callback_thread.h"

#include <array>
#include <cstddef>
#include <utility>

#include "transport/process.h"

namespace ringcomm {

namespace {

thread_local int current_level = -1;  // of a thread that runs no continuations

}  // namespace

int CallbackThread::level_of_new_work() { return (current_level + 1) % kNumLevels; }

CallbackThread& CallbackThread::at(int level) {
  struct All {
    std::mutex mutex;
    std::array<CallbackThread*, kNumLevels> threads = {};
  };
  // Threads do not survive a fork: a child starts its own.
  static constinit PerProcess<All> all_of_process;
  All& all = all_of_process.get();
  const std::lock_guard lock(all.mutex);
  CallbackThread*& thread = all.threads[static_cast<std::size_t>(level)];
  if (thread == nullptr) thread = new CallbackThread(level);
  return *thread;
}

CallbackThread::CallbackThread(int level) : level_(level) {
  start_background_thread("ringcomm-future", [this] { run(); }, kDefaultStackBytes).detach();
}

void CallbackThread::post(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    callbacks_.push_back(std::move(callback));
  }
  has_work_.notify_one();
}

void CallbackThread::run() {
  current_level = level_;
  std::unique_lock lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [this] { return !callbacks_.empty(); });
    std::function<void()> callback = std::move(callbacks_.front());
    callbacks_.pop_front();
    lock.unlock();
    callback();
    callback = nullptr;  // destroys what it holds without the lock
    lock.lock();
  }
}

}  // namespace ringcomm
