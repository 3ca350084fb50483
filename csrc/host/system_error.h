#pragma once

#include <string>

namespace ringcomm::host {

/// That the system call `what` has failed with the error `code`, and what to do about it.
std::string describe_errno(const std::string& what, int code);
/// Throws that of `what`, which has just failed and set errno.
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace ringcomm::host
