#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "core/arch.h"
#include "core/errors.h"
#include "host/text_fields.h"

namespace ringcomm {

/// Why a group is no more.
struct AbortReason {
  ErrorKind kind = ErrorKind::kAborted;
  int origin = -1;   ///< the rank that failed
  int culprit = -1;  ///< the rank that it blames, or -1
  std::string text;

  /// That rank `origin` fails with this error.
  static AbortReason of(const std::exception& error, int origin) {
    const auto* known = dynamic_cast<const Error*>(&error);
    return {.kind = known != nullptr ? known->info().kind : ErrorKind::kAborted,
            .origin = origin,
            .culprit = known != nullptr ? known->info().rank : origin,
            .text = error.what()};
  }
  std::string to_text() const {
    return to_fields({std::to_string(static_cast<int>(kind)), std::to_string(origin),
                      std::to_string(culprit), text});
  }
  static AbortReason from_text(const std::string& text) {
    TextFields fields(text);
    return {.kind = static_cast<ErrorKind>(fields.number()),
            .origin = fields.number(),
            .culprit = fields.number(),
            .text = fields.next()};
  }
};

namespace host {

/// The reason of the first rank that fails, written once and read by all others.
struct alignas(kLineBytes) AbortRecord {
  /// kFirstWriter + r: rank r is writing it.
  static constexpr std::uint32_t kNone = 0, kWritten = 1, kFirstWriter = 2;
  std::uint32_t state = kNone;
  std::uint32_t kind = 0;     ///< an ErrorKind
  std::int32_t origin = -1;   ///< the rank that failed
  std::int32_t culprit = -1;  ///< the rank that it blames
  /// The ranks that have left; in the line of `state`, which rarely changes.
  std::uint32_t num_left = 0;
  char text[1024] = {};
};

}  // namespace host
}  // namespace ringcomm
