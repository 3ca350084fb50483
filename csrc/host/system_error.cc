#include "host/system_error.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "core/errors.h"

namespace ringcomm::host {
namespace {

// What to do about an error of the system, where that is known.
std::string remedy_of(int code) {
  if (code == EMFILE) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    return "; raise the limit of open files, " + std::to_string(limit.rlim_cur) + " (ulimit -n)";
  }
  if (code == ENOMEM) return "; free memory, or raise the limit of address space (ulimit -v)";
  if (code == EFBIG) return "; raise the limit of file sizes (ulimit -f)";
  if (code == EBADF) return "; a library of this process has closed its descriptors";
  if (code == EPERM || code == EACCES || code == ENOSYS)
    return "; allow this call in the container's seccomp filter or sandbox (Landlock, AppArmor)";
  return "";
}

}  // namespace

std::string describe_errno(const std::string& what, int code) {
  return "ringcomm: " + what + " failed: " + std::strerror(code) + " (errno " +
         std::to_string(code) + ")" + remedy_of(code);
}

void throw_errno(const std::string& what) {
  throw Error({.kind = ErrorKind::kSystem}, describe_errno(what, errno));
}

}  // namespace ringcomm::host
