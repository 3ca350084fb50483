#include "host/random.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdio>

#include "host/system_error.h"

namespace ringcomm::host {

std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (::getrandom(&number, sizeof(number), 0) != sizeof(number))
    if (errno != EINTR) throw_errno("getrandom");
  return number;
}

std::string random_text() {
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx",
                static_cast<unsigned long long>(random_number()),
                static_cast<unsigned long long>(random_number()));
  return text;
}

}  // namespace ringcomm::host
