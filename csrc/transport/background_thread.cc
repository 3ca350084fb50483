#include "transport/background_thread.h"

#include <cerrno>
#include <csignal>
#include <exception>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

namespace ringcomm {
namespace {

// A thread inherits the signal mask of the thread that starts it.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t previous_;
};

using Body = std::function<void()>;

void* run_body(void* body) {
  const std::unique_ptr<Body> owned(static_cast<Body*>(body));
  (*owned)();
  return nullptr;
}

int create(::pthread_t& thread, std::size_t stack_bytes, Body* body) {
  ::pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  if (stack_bytes > 0) ::pthread_attr_setstacksize(&attributes, stack_bytes);
  const int error = ::pthread_create(&thread, &attributes, run_body, body);
  ::pthread_attr_destroy(&attributes);
  return error;
}

}  // namespace

BackgroundThread start_background_thread(const char* name, std::function<void()> body,
                                         std::size_t stack_bytes) {
  const AllSignalsBlocked blocked;
  auto owned = std::make_unique<Body>(std::move(body));
  BackgroundThread thread;
  int error = create(thread.thread_, stack_bytes, owned.get());
  // Thread-local variables of the program's libraries are part of the stack, and may fill a small
  // one.
  if (error == EINVAL) error = create(thread.thread_, kDefaultStackBytes, owned.get());
  if (error != 0)
    throw std::system_error(error, std::generic_category(),
                            std::string("ringcomm: the thread ") + name +
                                " could not be started; check the limits of threads (ulimit -u, "
                                "pids.max of the cgroup) and of memory");
  owned.release();
  thread.is_joinable_ = true;
  ::pthread_setname_np(thread.thread_, name);
  return thread;
}

BackgroundThread::~BackgroundThread() {
  if (is_joinable_) std::terminate();
}

BackgroundThread& BackgroundThread::operator=(BackgroundThread&& other) noexcept {
  if (is_joinable_) std::terminate();
  is_joinable_ = std::exchange(other.is_joinable_, false);
  thread_ = other.thread_;
  return *this;
}

void BackgroundThread::join() {
  ::pthread_join(thread_, nullptr);
  is_joinable_ = false;
}

void BackgroundThread::detach() {
  ::pthread_detach(thread_);
  is_joinable_ = false;
}

}  // namespace ringcomm
