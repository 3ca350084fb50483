#pragma once

#include "emulator/extra_api.h"
#include "transport/cuda/driver_api.h"

// The functions that the library exports, declared from the lists of their users under CUDA's
// names; a definition with other parameters does not compile, and one that is missing does not
// link (exports.cc).

namespace ringcomm::emulator {

using namespace cuda;

namespace api {
#define RINGCOMM_EXPORT(member, symbol, parameters) \
  [[gnu::visibility("default")]] Result member parameters __asm__(symbol);
RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_EXPORT)
RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_EXPORT)
#undef RINGCOMM_EXPORT
}  // namespace api

/// Leaves the function with the Result of `expression` unless that is success.
#define RINGCOMM_TRY(expression)                                                                  \
  do {                                                                                            \
    if (const ::ringcomm::cuda::Result tried = (expression); tried != ::ringcomm::cuda::kSuccess) \
      return tried;                                                                               \
  } while (false)

}  // namespace ringcomm::emulator
