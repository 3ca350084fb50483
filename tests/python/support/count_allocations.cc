// Preloaded: counts the process's allocations, as glibc makes them.
#include <atomic>
#include <cerrno>
#include <cstddef>

extern "C" {

void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

static std::atomic<long> num_allocations;

long count_allocations() { return num_allocations; }

void* malloc(std::size_t size) {
  ++num_allocations;
  return __libc_malloc(size);
}

void* calloc(std::size_t count, std::size_t size) {
  ++num_allocations;
  return __libc_calloc(count, size);
}

void* realloc(void* block, std::size_t size) {
  ++num_allocations;
  return __libc_realloc(block, size);
}

void* memalign(std::size_t alignment, std::size_t size) {
  ++num_allocations;
  return __libc_memalign(alignment, size);
}

void* aligned_alloc(std::size_t alignment, std::size_t size) { return memalign(alignment, size); }

int posix_memalign(void** block, std::size_t alignment, std::size_t size) {
  *block = memalign(alignment, size);
  return *block == nullptr ? ENOMEM : 0;
}

}  // extern "C"
