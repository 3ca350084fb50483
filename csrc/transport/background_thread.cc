#include "transport/background_thread.h"

#include <pthread.h>

#include <csignal>
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
  std::thread thread(std::move(body));
  ::pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace ringcomm
