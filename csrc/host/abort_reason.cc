#include "host/abort_reason.h"

#include "host/text_fields.h"

namespace ringcomm {

AbortReason AbortReason::of(const std::exception& error, int origin) {
  const auto* known = dynamic_cast<const Error*>(&error);
  return {.kind = known != nullptr ? known->info().kind : ErrorKind::kAborted,
          .origin = origin,
          .culprit = known != nullptr ? known->info().rank : origin,
          .text = error.what()};
}

std::string AbortReason::to_text() const {
  return to_fields({std::to_string(static_cast<int>(kind)), std::to_string(origin),
                    std::to_string(culprit), text});
}

AbortReason AbortReason::from_text(const std::string& text) {
  TextFields fields(text);
  return {.kind = static_cast<ErrorKind>(fields.number()),
          .origin = fields.number(),
          .culprit = fields.number(),
          .text = fields.next()};
}

}  // namespace ringcomm
