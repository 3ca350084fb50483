#pragma once

namespace ringcomm::testing {

/// ThreadSanitizer does not see the rounds between ranks that are threads, since each maps the
/// group's memory for itself: large amounts of data through that memory tell it nothing.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kHasThreadSanitizer = true;
#else
inline constexpr bool kHasThreadSanitizer = false;
#endif

/// In a child that is forked while another thread allocates, AddressSanitizer's allocator may wait
/// for ever: seen with GCC 12 in a program that does nothing else.
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kHasAddressSanitizer = true;
#else
inline constexpr bool kHasAddressSanitizer = false;
#endif

}  // namespace ringcomm::testing
