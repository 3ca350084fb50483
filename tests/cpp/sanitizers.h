#pragma once

namespace ringcomm::testing {

/// ThreadSanitizer does not see the hand-overs between ranks that are threads, since each maps the
/// group's memory for itself: large amounts of data through that memory tell it nothing.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kHasThreadSanitizer = true;
#else
inline constexpr bool kHasThreadSanitizer = false;
#endif

}  // namespace ringcomm::testing
