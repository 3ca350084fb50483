#include "thread_limit.h"

#include <pthread.h>

#include <cerrno>

namespace {

constexpr int kNoLimit = -1;
thread_local int num_left = kNoLimit;

}  // namespace

extern "C" {

int __real_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                          void* argument);

int __wrap_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                          void* argument) {
  if (num_left == 0) return EAGAIN;
  if (num_left > 0) --num_left;
  return __real_pthread_create(thread, attributes, body, argument);
}
}

namespace ringcomm::testing {

ThreadLimit::ThreadLimit(int num_threads) { num_left = num_threads; }

ThreadLimit::~ThreadLimit() { num_left = kNoLimit; }

}  // namespace ringcomm::testing
