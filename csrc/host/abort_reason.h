#pragma once

#include <exception>
#include <string>

#include "core/errors.h"

namespace ringcomm {

/// Why a group is no more.
struct AbortReason {
  ErrorKind kind = ErrorKind::kAborted;
  int origin = -1;   ///< the rank that failed
  int culprit = -1;  ///< the rank that it blames, or -1
  std::string text;

  /// That rank `origin` fails with this error.
  static AbortReason of(const std::exception& error, int origin);
  std::string to_text() const;
  static AbortReason from_text(const std::string& text);
};

}  // namespace ringcomm
