#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace ringcomm {

/// What went wrong; decides the exception's type in Python.
enum class ErrorKind : std::uint8_t {
  kMismatch,     ///< ranks called different collectives, or made the group with different options
  kPeerDied,     ///< a rank's process has ended, or has destroyed its side of the group
  kTimeout,      ///< a rank did not arrive in time
  kAborted,      ///< the group was aborted by its user
  kInterrupted,  ///< a signal handler of this process asked to stop
  kSystem,       ///< the operating system refused something
};

/// The rank and the call of an error. Unknown numbers are -1, unknown texts are empty.
struct ErrorInfo {
  ErrorKind kind = ErrorKind::kSystem;
  int rank = -1;          ///< the rank at fault, in the group's numbering
  std::int64_t pid = -1;  ///< its process
  std::string host = {};  ///< where that runs
  std::string op = {};    ///< the collective
  std::int64_t seq = -1;  ///< its number in the group
};

/// The engine's exception for failures at run time. Wrong arguments throw std::invalid_argument.
class Error : public std::runtime_error {
 public:
  Error(ErrorInfo info, const std::string& message)
      : std::runtime_error(message), info_(std::move(info)) {}

  const ErrorInfo& info() const { return info_; }

 private:
  ErrorInfo info_;
};

}  // namespace ringcomm
