#include "emulator/thread_pool.h"

#include <thread>
#include <utility>

namespace ringcomm::emulator {

ThreadPool& ThreadPool::of_process() {
  static ThreadPool& pool = *new ThreadPool();
  return pool;
}

void ThreadPool::start(std::function<void()> task) {
#ifdef __SANITIZE_THREAD__
  // A thread that is used again would order the kernels that it ran, and hide their races.
  std::thread(std::move(task)).detach();
#else
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  if (num_idle_ >= tasks_.size())
    has_task_.notify_one();
  else
    std::thread([this] { run(); }).detach();
#endif
}

void ThreadPool::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++num_idle_;
    has_task_.wait(lock, [this] { return !tasks_.empty(); });
    --num_idle_;
    {
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
    lock.lock();
  }
}

}  // namespace ringcomm::emulator
