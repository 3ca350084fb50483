// Preloaded: system calls that ringcomm's extension makes fail, as a test asks for. Those of
// Python, torch and Gloo are left alone. No headers of the calls: each is declared once, below.
#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#include <atomic>

namespace {

struct Call {
  const char* name;
  std::atomic<long> count = 0;
};
Call calls[] = {
    {"accept4"},
    {"bind"},
    {"connect"},
    {"dup"},
    {"eventfd"},
    {"fcntl"},
    {"fstat"},
    {"ftruncate"},
    {"getrandom"},
    {"getsockopt"},
    {"ioctl"},
    {"listen"},
    {"madvise"},
    {"memfd_create"},
    {"mmap"},
    {"open"},
    {"poll"},
    {"pthread_create"},
    {"recvmsg"},
    {"sched_getaffinity"},
    {"sched_setaffinity"},
    {"send"},
    {"sendmsg"},
    {"socket"},
    {"stat"},
    {"syscall"},
    {"write"},
};

std::atomic<bool> is_watching = false;
Call* failing = nullptr;
int error = 0;
long first = 0;
bool goes_on = false;

Call* find(const char* name) {
  for (Call& call : calls)
    if (strcmp(call.name, name) == 0) return &call;
  return nullptr;
}

bool is_of_extension(void* caller) {
  Dl_info info;
  return dladdr(caller, &info) != 0 && info.dli_fname != nullptr &&
         strstr(info.dli_fname, "ringcomm/_") != nullptr;
}

// Whether this call of the extension fails; counts it.
bool must_fail(Call* call, void* caller) {
  if (!is_watching || !is_of_extension(caller)) return false;
  const long number = ++call->count;
  return call == failing && (number == first || (goes_on && number > first));
}

// It returns its error.
bool is_thread(const Call* call) { return strcmp(call->name, "pthread_create") == 0; }

}  // namespace

extern "C" {

// From now on calls are counted from 0; call `first` of `name`, and with `onwards` all behind it,
// fail with `number`. A null name: none fails.
void fail_calls(const char* name, int number, long from, int onwards) {
  is_watching = false;
  for (Call& call : calls) call.count = 0;
  failing = name != nullptr ? find(name) : nullptr;
  error = number;
  first = from;
  goes_on = onwards != 0;
  is_watching = true;
}

long count_calls(const char* name) { return find(name)->count; }

// Arguments and results of up to 64 bits are passed on as they are.
#define FAILING(name, params, args)                                                      \
  long name params {                                                                     \
    static auto* const real = reinterpret_cast<long(*) params>(dlsym(RTLD_NEXT, #name)); \
    static Call* const call = find(#name);                                               \
    if (!must_fail(call, __builtin_return_address(0))) return real args;                 \
    errno = error;                                                                       \
    return is_thread(call) ? error : -1;                                                 \
  }

FAILING(accept4, (long a, long b, long c, long d), (a, b, c, d))
FAILING(bind, (long a, long b, long c), (a, b, c))
FAILING(connect, (long a, long b, long c), (a, b, c))
FAILING(dup, (long a), (a))
FAILING(eventfd, (long a, long b), (a, b))
FAILING(fcntl, (long a, long b, long c), (a, b, c))
FAILING(fstat, (long a, long b), (a, b))
FAILING(ftruncate, (long a, long b), (a, b))
FAILING(getrandom, (long a, long b, long c), (a, b, c))
FAILING(getsockopt, (long a, long b, long c, long d, long e), (a, b, c, d, e))
FAILING(ioctl, (long a, long b, long c), (a, b, c))
FAILING(listen, (long a, long b), (a, b))
FAILING(madvise, (long a, long b, long c), (a, b, c))
FAILING(memfd_create, (long a, long b), (a, b))
FAILING(mmap, (long a, long b, long c, long d, long e, long f), (a, b, c, d, e, f))
FAILING(open, (long a, long b, long c), (a, b, c))
FAILING(poll, (long a, long b, long c), (a, b, c))
FAILING(pthread_create, (long a, long b, long c, long d), (a, b, c, d))
FAILING(recvmsg, (long a, long b, long c), (a, b, c))
FAILING(sched_getaffinity, (long a, long b, long c), (a, b, c))
FAILING(sched_setaffinity, (long a, long b, long c), (a, b, c))
FAILING(send, (long a, long b, long c, long d), (a, b, c, d))
FAILING(sendmsg, (long a, long b, long c), (a, b, c))
FAILING(socket, (long a, long b, long c), (a, b, c))
FAILING(stat, (long a, long b), (a, b))
FAILING(syscall, (long a, long b, long c, long d, long e, long f, long g), (a, b, c, d, e, f, g))
FAILING(write, (long a, long b, long c), (a, b, c))

}  // extern "C"
