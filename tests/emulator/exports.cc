#include "emulator/exports.h"

namespace ringcomm::emulator {

// Named here so that the library does not link without any of them.
#define RINGCOMM_NAME(member, symbol, parameters) &api::member,
extern const DriverApi kDriverApi;
const DriverApi kDriverApi = {RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_NAME)};
extern const ExtraDriverApi kExtraDriverApi;
const ExtraDriverApi kExtraDriverApi = {RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_NAME)};
#undef RINGCOMM_NAME

}  // namespace ringcomm::emulator
