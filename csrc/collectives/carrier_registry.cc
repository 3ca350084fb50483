#include "collectives/carrier_registry.h"

#include <stdexcept>

#include "collectives/shm_carrier.h"

namespace ringcomm {

std::unique_ptr<Carrier> make_carrier(KeyValueStore& store, int rank, int world_size,
                                      const CommunicatorOptions& options,
                                      std::chrono::milliseconds timeout) {
  if (options.transport == "p2p")
    throw std::invalid_argument("transport p2p is not there yet; use shm");
  return std::make_unique<ShmCarrier>(store, rank, world_size, options, timeout);
}

}  // namespace ringcomm
