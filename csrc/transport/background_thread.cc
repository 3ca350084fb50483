#include "transport/background_thread.h"

#include <pthread.h>

#include <csignal>
#include <string>
#include <system_error>
#include <utility>

namespace ringcomm {
namespace {

// A thread inherits the mask of the one that starts it.
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

}  // namespace

std::thread start_background_thread(const char* name, std::function<void()> body) {
  const AllSignalsBlocked blocked;
  try {
    std::thread thread(std::move(body));
    ::pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(), std::string("ringcomm: the thread ") + name +
                                              " could not be started; raise the limit of "
                                              "processes (ulimit -u, or pids of the container)");
  }
}

}  // namespace ringcomm
