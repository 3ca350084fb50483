#pragma once

#include <unistd.h>

#include <cstddef>

namespace ringcomm {

/// The size of a page: 4 KiB, or 16 or 64 KiB on some arm64 systems.
inline std::size_t page_bytes() {
  static const auto num_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return num_bytes;
}

/// Rounded up to whole pages.
inline std::size_t whole_pages(std::size_t num_bytes) {
  return (num_bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

}  // namespace ringcomm
