#include "host/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <string>

#include "core/annotations.h"
#include "core/errors.h"
#include "host/process.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3
#endif

namespace ringcomm::host {

SharedMemory::SharedMemory(int fd, std::size_t num_bytes) {
  RINGCOMM_STEP("before memory is mapped");
  void* address = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED)
    throw_errno("mmap of " + std::to_string(num_bytes) + " bytes of shared memory");
  data_ = {static_cast<std::byte*>(address), Unmap{num_bytes}};
}

SharedMemory SharedMemory::of_peer(int fd) {
  constexpr int kWanted = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 && errno != EINVAL) throw_errno("fcntl(F_GET_SEALS)");  // of a file without seals
  if (seals < 0 || (seals & kWanted) != kWanted)
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: the shared memory that a peer sent is not sealed against resizing, so "
                "ringcomm did not create it; it is not used");
  struct stat status{};
  if (::fstat(fd, &status) != 0) throw_errno("fstat of a memfd");
  return status.st_size == 0 ? SharedMemory()
                             : SharedMemory(fd, static_cast<std::size_t>(status.st_size));
}

void SharedMemory::Unmap::operator()(std::byte* data) const { ::munmap(data, num_bytes); }

UniqueFd create_memfd(std::size_t num_bytes, const char* name) {
  // With vm.memfd_noexec=2 the kernel refuses a memfd without MFD_NOEXEC_SEAL.
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(::memfd_create(name, kFlags | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd.reset(::memfd_create(name, kFlags));  // an older kernel
  if (!fd) throw_errno("memfd_create");
  // Beyond it the kernel would also send SIGXFSZ, which ends a program that does not ignore it.
  rlimit most{};
  const bool is_too_large = ::getrlimit(RLIMIT_FSIZE, &most) == 0 && num_bytes > most.rlim_cur;
  if (is_too_large) errno = EFBIG;
  if (is_too_large || ::ftruncate(fd.get(), static_cast<off_t>(num_bytes)) != 0)
    throw_errno("ftruncate of a memfd to " + std::to_string(num_bytes) + " bytes");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw_errno("fcntl(F_ADD_SEALS)");
  return fd;
}

std::atomic<bool>& may_refuse_pages() {
  static std::atomic<bool> may_refuse = [] {
    int policy = 0;
    std::ifstream("/proc/sys/vm/overcommit_memory") >> policy;
    return policy == 2;
  }();
  return may_refuse;
}

void reserve_pages(std::byte* begin, std::size_t num_bytes) {
  if (!may_refuse_pages()) return;
  RINGCOMM_STEP("before pages are taken");
  const std::size_t skipped_bytes = reinterpret_cast<std::uintptr_t>(begin) % page_bytes();
  if (::madvise(begin - skipped_bytes, whole_pages(skipped_bytes + num_bytes),
                MADV_POPULATE_WRITE) == 0 ||
      errno == EINVAL)  // kernels before 5.14
    return;
  if (errno == EFAULT) errno = ENOMEM;
  throw_errno("taking " + std::to_string(num_bytes) +
              " bytes of shared memory from the system (free some, or raise vm.overcommit_ratio)");
}

void return_pages(std::byte* begin, std::size_t num_bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t skipped_bytes = whole_pages(address) - address;
  if (num_bytes <= skipped_bytes) return;
  // A failure only leaves unused memory allocated.
  ::madvise(begin + skipped_bytes, (num_bytes - skipped_bytes) / page_bytes() * page_bytes(),
            MADV_REMOVE);
}

}  // namespace ringcomm::host
