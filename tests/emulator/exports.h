#pragma once

#include "cuda/driver/driver_api.h"
#include "emulator/extra_api.h"

// The functions that the library exports, declared from the lists of their users; a definition with
// other parameters does not compile, and one that is missing does not link. exports.cc gives them
// CUDA's names, under which calls are counted.

namespace ringcomm::emulator {

using namespace cuda;

namespace api {
#define RINGCOMM_DECLARE(member, symbol, parameters) Result member parameters;
RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_DECLARE)
RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_DECLARE)
#undef RINGCOMM_DECLARE
}  // namespace api

/// Leaves the function with the Result of `expression` unless that is success.
#define RINGCOMM_TRY(expression)                                                                  \
  do {                                                                                            \
    if (const ::ringcomm::cuda::Result tried = (expression); tried != ::ringcomm::cuda::kSuccess) \
      return tried;                                                                               \
  } while (false)

}  // namespace ringcomm::emulator
