#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "core/errors.h"

namespace ringcomm::shm {

/// Throws for the system call `what`, which has just failed and set errno.
[[noreturn]] inline void throw_errno(const std::string& what) {
  const int code = errno;
  throw Error({.kind = ErrorKind::kSystem}, "ringcomm: " + what +
                                                " failed: " + std::strerror(code) + " (errno " +
                                                std::to_string(code) + ")");
}

}  // namespace ringcomm::shm
