#include "transport/background_thread.h"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace ringcomm {

std::thread start_background_thread(const char* name, std::function<void()> body) {
  sigset_t all_signals, previous;
  sigfillset(&all_signals);
  ::pthread_sigmask(SIG_SETMASK, &all_signals, &previous);
  std::thread thread(std::move(body));
  ::pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  ::pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace ringcomm
