#pragma once

#include <sys/random.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <string>

#include "host/system_error.h"

namespace ringcomm::host {

/// Bits that nobody can guess.
inline std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (::getrandom(&number, sizeof(number), 0) != sizeof(number))
    if (errno != EINTR) throw_errno("getrandom");
  return number;
}

/// 32 hexadecimal digits of 128 such bits.
inline std::string random_text() {
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx",
                static_cast<unsigned long long>(random_number()),
                static_cast<unsigned long long>(random_number()));
  return text;
}

}  // namespace ringcomm::host
