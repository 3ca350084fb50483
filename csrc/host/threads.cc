#include "host/threads.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <memory>
#include <string>
#include <system_error>
#include <tuple>

#include "host/process.h"

namespace ringcomm {
namespace {

using Body = std::function<void()>;

void* run_body(void* body) {
  const std::unique_ptr<Body> owned(static_cast<Body*>(body));
  (*owned)();
  return nullptr;
}

int create_thread(::pthread_t& thread, std::size_t stack_bytes, Body* body) {
  ::pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  if (stack_bytes > 0) ::pthread_attr_setstacksize(&attributes, stack_bytes);
  const int error = ::pthread_create(&thread, &attributes, run_body, body);
  ::pthread_attr_destroy(&attributes);
  return error;
}

class Helpers {
 public:
  void run(Body work) {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_idle_, false)) {
      work_ = std::move(work);
      changed_.notify_one();
    } else {
      auto body = [this, work = std::move(work)]() mutable { serve(std::move(work)); };
      start_background_thread("ringcomm-helper", std::move(body)).detach();
    }
  }

 private:
  void serve(Body work) {
    while (work) {
      work();
      work = nullptr;  // what it holds ends without the lock
      std::unique_lock lock(mutex_);
      if (is_idle_ || work_) return;
      is_idle_ = true;
      changed_.wait(lock, [this] { return static_cast<bool>(work_); });
      work = std::exchange(work_, {});
    }
  }

  std::mutex mutex_;  // guards the next ones
  std::condition_variable changed_;
  bool is_idle_ = false;
  Body work_;  // for the thread that was idle
};
constinit PerProcess<Helpers> helpers;
constinit PerProcess<std::atomic<bool>> is_saying;

}  // namespace

void run_aside(std::function<void()> work) { helpers.get().run(std::move(work)); }

void say_aside(std::string lines, std::function<void()> work) noexcept try {
  std::atomic<bool>& is_busy = is_saying.get();
  if (is_busy.exchange(true)) return;
  try {
    run_aside([&is_busy, lines = std::move(lines), work = std::move(work)] {
      std::ignore = ::write(STDERR_FILENO, lines.data(), lines.size());
      is_busy = false;
      if (work) work();
    });
  } catch (const std::system_error&) {
    is_busy = false;
  }
} catch (const std::exception&) {  // no memory
}

BackgroundThread start_background_thread(const char* name, std::function<void()> body,
                                         std::size_t stack_bytes) {
  auto owned = std::make_unique<Body>(std::move(body));
  sigset_t all, previous;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &previous);  // the thread inherits it
  ::pthread_t thread{};
  int error = create_thread(thread, stack_bytes, owned.get());
  // Thread-local variables of the program's libraries are part of the stack, and may fill a small
  // one.
  if (error == EINVAL) error = create_thread(thread, kDefaultStackBytes, owned.get());
  ::pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  if (error != 0)
    throw std::system_error(error, std::generic_category(),
                            std::string("ringcomm: the thread ") + name +
                                " could not be started; check the limits of threads (ulimit -u, "
                                "pids.max of the cgroup) and of memory");
  owned.release();
  ::pthread_setname_np(thread, name);
  return BackgroundThread(thread);
}

WatchThread::WatchThread(Pace pace, std::function<bool()> look)
    : pace_(pace), look_(std::move(look)) {
  thread_ = start_background_thread("ringcomm-watch", [this] { run(); });
}

WatchThread::~WatchThread() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WatchThread::look_for(std::int64_t num_looks) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(looks_left_, std::max(looks_left_, num_looks)) == 0) changed_.notify_all();
}

void WatchThread::run() {
  std::unique_lock lock(mutex_);
  for (bool goes_on = true; goes_on; lock.lock()) {
    changed_.wait(lock, [this] { return is_over_ || looks_left_ > 0; });
    if (changed_.wait_for(lock, pace_.interval, [this] { return is_over_; })) return;
    --looks_left_;
    lock.unlock();
    goes_on = look_();
  }
}

}  // namespace ringcomm
