#pragma once

#include <cstdint>
#include <string>

#include "cuda/driver/driver_api.h"

namespace ringcomm::cuda {

/// Where a rank is, as far as others need it to map its memory and to take seats for it.
struct RankPlace {
  DeviceUuid device = {};
  std::string bootstrap_address;
  std::int64_t pid = 0;
  int num_seats = 0;  ///< of its GPU (DeviceRoom), for all groups
};

}  // namespace ringcomm::cuda
