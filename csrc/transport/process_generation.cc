#include "transport/process_generation.h"

#include <pthread.h>

#include <atomic>

namespace ringcomm {
namespace {

std::atomic<int> generation = 0;

}  // namespace

int process_generation() {
  // A load instead of a system call, because every collective calls it.
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace ringcomm
